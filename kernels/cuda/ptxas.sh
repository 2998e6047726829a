#!/bin/sh
# ptxas.sh check|update DIR: what ptxas said of every kernel against the table beside this script, ptxas.tsv.
#
#   DIR      kernels/cuda of a build folder: FILE.ptxas (nvcc -Xptxas -v) and FILE.ptx (of the newest architecture)
#   check    fails if a kernel of a built architecture is not as the table says, or breaks a rule:
#              no kernel spills; hot kernels (hot_kernel below) fetch with 16-byte loads
#            With another nvcc than the table's, registers may differ by a quarter; the rules stay.
#   update   writes the table, keeping columns of architectures that were not built: for a deliberate change, with
#            all of them:
#                cmake --preset release -DBACKCAST_CUDA_ARCHS='75;80;89;90' && cmake --build build/release --target backcast-cuda
#                kernels/cuda/ptxas.sh update build/release/kernels/cuda
#
# The table: a line a kernel; a column an architecture, REGISTERS/STACK/SPILLED/SHARED (bytes); the last one the bytes that
# the loads of its PTX fetch from global memory, WIDE/ALL: those of 16 bytes each (vector loads and cp.async) and all,
# every instruction counted once.
set -eu
export LC_ALL=C
case ${1-} in check | update) ;; *) echo "usage: $0 check|update DIR" >&2; exit 2 ;; esac
[ -d "${2-}" ] || { echo "$0: no folder ${2-}" >&2; exit 2; }
table=$(dirname "$0")/ptxas.tsv
ls "$2"/*.ptxas >/dev/null 2>&1 || { echo "$0: no report in $2" >&2; exit 2; }
nvcc=$(cat "$2/nvcc.version")
now=$(mktemp)
trap 'rm -f "$now"' EXIT

# reports -> lines "KERNEL<tab>ARCH<tab>R/S/P/M", and "KERNEL<tab>loads<tab>W/A"
cat "$2"/*.ptxas | c++filt | awk '
    /Compiling entry function/ {
        k = $0; sub(/^[^\047]*\047/, "", k); arch = k; sub(/\047 for \047.*/, "", k)
        sub(/.*\047 for \047/, "", arch); sub(/\047.*/, "", arch)
    }
    /bytes stack frame/ { stack = $1; spill = $5 > $9 ? $5 : $9 }
    /Used [0-9]+ registers/ {
        smem = 0
        if (match($0, /[0-9]+ bytes smem/)) smem = substr($0, RSTART, RLENGTH) + 0
        match($0, /Used [0-9]+/); regs = substr($0, RSTART + 5, RLENGTH - 5)
        gsub(/\(.*/, "", k); sub(/^void /, "", k)
        print k "\t" arch "\t" regs "/" stack "/" spill "/" smem
    }' >"$now"
cat "$2"/*.ptx | c++filt | awk '
    /\.entry/ { k = $0; sub(/.*\.entry */, "", k); gsub(/\(.*/, "", k); sub(/^void /, "", k); names[k] }
    /ld\.global/ {
        b = /\.[busf]64[ \t]/ ? 8 : /\.[busf]16[ \t]/ ? 2 : /\.[bus]8[ \t]/ ? 1 : 4
        b *= /\.v4\./ ? 4 : /\.v2\./ ? 2 : 1
        all[k] += b
        if (b >= 16) wide[k] += b
    }
    /cp\.async\.c[ga]/ { # port.cuh: 16 bytes past the first-level cache, or the number that it says
        b = /\.cg\./ ? 16 : /, 4;/ ? 4 : /, 8;/ ? 8 : 16
        all[k] += b
        if (b >= 16) wide[k] += b
    }
    END { for (k in names) print k "\tloads\t" wide[k] + 0 "/" all[k] + 0 }' >>"$now"

awk -F '\t' -v mode="$1" -v table="$table" -v nvcc="$nvcc" '
    # Kernels whose time is the time that memory takes. Half of what they fetch comes 16 bytes at a time: scales, slots and
    # the paths of odd sizes are the rest. Codes of two bits (Q2_K, Q3_K) are 8 bytes a block; gemm_int8 reads what its sums
    # are added to in fours, and everything else by cp.async.
    function hot_kernel(k) { return k ~ /^(gemv_|gemm_|attn_few|attn_many|logit_|rmsnorm|kv_write)/ }
    function wide_least(k) { return k ~ /quant<1[01]>|^gemm_int8/ ? 0.25 : 0.5 }
    function fail(text) { print "ptxas: " text; bad++ }
    function near(a, b) { return a <= b * 1.25 && b <= a * 1.25 }
    function same(a, b, k, col,   x, y) {
        if (a == b) return 1
        if (col == "loads" || known == nvcc) return 0
        split(a, x, "/"); split(b, y, "/")
        return near(x[1], y[1]) && near(x[4], y[4])
    }
    BEGIN {
        while ((getline line < table) > 0) {
            n = split(line, f, "\t")
            if (line ~ /^# nvcc /) known = substr(line, 8)
            else if (f[1] == "kernel") for (i = 2; i <= n; i++) { cols[i] = f[i]; n_cols = n }
            else if (line !~ /^#/) for (i = 2; i <= n; i++) old[f[1], cols[i]] = f[i]
            if (line !~ /^#/ && f[1] != "kernel") was[f[1]]
        }
    }
    { got[$1, $2] = $3; is[$1]; built[$2] }
    END {
        for (k in is) for (a in built) {
            v = got[k, a]
            if (v == "") { fail(k ": no report for " a); continue }
            split(v, p, "/")
            if (a != "loads" && p[3] > 0) fail(k " spills " p[3] " bytes on " a)
            if (a == "loads" && hot_kernel(k) && p[1] < wide_least(k) * p[2])
                fail(k ": " p[1] " of " p[2] " bytes are fetched 16 at a time")
            if (mode == "check" && k in was && !same(v, old[k, a], k, a))
                fail(k " " a ": " v ", the table has " old[k, a])
            if (mode == "check" && !(k in was) && a == "loads") fail(k " is not in the table")
        }
        if (mode == "check") {
            for (k in was) if (!(k in is)) fail(k " is in the table and in no report")
            exit bad > 0
        }
        split("sm_75 sm_80 sm_89 sm_90 loads", order, " ")
        print "# Registers/stack/spilled/shared memory of each kernel, and its wide/all global loads: see ptxas.sh." > table
        print "# nvcc " nvcc > table
        line = "kernel"
        for (i = 1; i <= 5; i++) line = line "\t" order[i]
        print line > table
        close(table)
        for (k in is) {
            line = k
            for (i = 1; i <= 5; i++) {
                v = got[k, order[i]]
                if (v == "") v = old[k, order[i]]
                line = line "\t" (v == "" ? "-" : v)
            }
            print line | "sort >> " table
        }
        close("sort >> " table)
        exit bad > 0
    }' "$now" || { [ "$1" = update ] || echo "ptxas: if that is meant, see kernels/cuda/ptxas.sh: update" >&2; exit 1; }
