#!/bin/bash
# gpu.sh [--quick] [--dry-run] [--build DIR] [--out DIR]: what a machine with a GPU can tell, in ten minutes; a table last.
#
#   min  step      what
#    0   card      what nvidia-smi says
#    0   build     the CUDA backend for this card alone, no shim (--build DIR: that one, as it is)
#    1   limits    what the card can do: copy, read, product of halves, launch (tests/bench/gpu_limits.cu)
#    2   tests     ctest -L gpu: every kernel against ref, odd sizes
#    2   goldens   the texts and kept sets of every policy, in process; then the whole daemon's
#    3   models    random weights in the shape of Qwen2.5-7B, f16 and 4-bit (tests/bench/random_model.c)
#    4   refresh   the four scores at n = 512 ... 18700; of eight sessions with small caches, one after the other and together
#    6   decode    batches of 1, 8 and 32
#    7   serve     backcast bench on the 4-bit model, through a daemon; gap: a decoding neighbour of a session that is refreshed
#    7   kernels   microseconds of each kernel in a refresh of 512 tokens and a decode step, if ncu may count
#    8   torch     the same refreshes in PyTorch, if it is there (refresh_torch.py)
#    9   fault     a device that dies: the daemon ends with code 70, and the next one answers
#    9   sanitizer memcheck, racecheck and synccheck of the kernels' tests, if compute-sanitizer may run
#
# --quick      four minutes: no torch, no sanitizer, short lists
# --dry-run    the same script on the shim (backend simt) with a tiny model: its logic, not its numbers
#
# No step needs a network. One that fails or takes too long is a line of the table, and the others still run; the exit
# code says whether all of them went well. What does not fit into the ten (four) minutes, because the build took them, is left
# out, and a line too. Clocks are never touched.
set -u
cd "$(dirname "$0")/../.." || exit 1
quick=0 dry=0 build=build/gpu out=build/gpu-report own=1
while [ $# -gt 0 ]; do
    case $1 in
    --quick) quick=1 ;;
    --dry-run) dry=1 ;;
    --build) build=${2:?--build needs a folder} own=0; shift ;;
    --out) out=${2:?--out needs a folder}; shift ;;
    *) sed -n '2,27s/^# \{0,1\}//p' "$0"; exit 2 ;;
    esac
    shift
done
rm -rf "$out"
mkdir -p "$out" || exit 1
work=$(mktemp -d "$([ -w /dev/shm ] && [ $dry = 0 ] && echo /dev/shm || echo "${TMPDIR:-/tmp}")/backcast-gpu-XXXXXX") || exit 1
daemon=
trap '[ -z "$daemon" ] || kill "$daemon" 2>/dev/null; rm -rf "$work"' EXIT
bad=0 start=$SECONDS
total=$([ $dry = 1 ] && echo 3600 || { [ $quick = 1 ] && echo 240 || echo 600; })
: >"$out/steps"

step() { # name, seconds, command...: its output is $out/name.log
    local name=$1 limit=$2 from=$SECONDS code left=$((total - (SECONDS - start)))
    shift 2
    [ $left -ge 10 ] || { left_out "$name" 'no time was left'; return 1; }
    [ $limit -le $left ] || limit=$left
    printf '%3d s  %s\n' $((SECONDS - start)) "$name"
    timeout -k 5 "$limit" bash -c '"$@"' _ "$@" >"$out/$name.log" 2>&1
    code=$?
    case $code in
    0) echo "$name,ok,$((SECONDS - from))" ;;
    77) left_out "$name" "$(head -n 1 "$out/$name.log")"; return 77 ;;
    124 | 137) echo "$name,longer than $limit s,$((SECONDS - from))"; bad=1 ;;
    *) echo "$name,FAILED ($code: $out/$name.log),$((SECONDS - from))"; bad=1 ;;
    esac >>"$out/steps"
    [ $code = 0 ] || { tail -n 5 "$out/$name.log"; bad=1; }
    return $code
}
left_out() { echo "$1,left out: $2,0" >>"$out/steps"; }

if [ $dry = 1 ]; then
    backend=simt card='the shim' shape=tiny sizes=64,130 batches=1,3 context=30 steps=3 reps=1 block=64 serve=fast_logit_512
    small=32 sessions=3
    gap='100 --policy keydiff --rounds 1'
    tests=kn_vec
else
    backend=cuda shape=qwen2.5-7b context=1024 steps=34 reps=5 block=4096 tests= gap=4096 serve=
    sizes=512,768,4096,10000,18700 batches=1,8,32 small=32,128 sessions=8
    [ $quick = 0 ] || { sizes=512,4096 batches=1,32 reps=3; }
    card=$(nvidia-smi --query-gpu=name,driver_version,memory.total,compute_cap --format=csv,noheader 2>/dev/null | head -n 1)
    [ -n "$card" ] || { echo "gpu.sh: nvidia-smi finds no GPU (--dry-run runs on the shim)"; exit 1; }
fi
bin=$build/bin

# ---- build and tests ----
build_all() {
    local arch
    arch=$(echo "$card" | sed 's/.*, //; s/\.//')
    cmake -S . -B "$build" -DCMAKE_BUILD_TYPE=RelWithDebInfo -DBACKCAST_CUDA=on "-DBACKCAST_CUDA_ARCHS=$arch" \
        -DBACKCAST_SIMT=OFF -DBACKCAST_WERROR=OFF && cmake --build "$build" -j "$(nproc)"
}
# A build that came from another machine knows its folder by another name, so ctest would not find the programs.
tests_all() {
    local name bad=0
    if grep -qsx "# Build directory: $(cd "$build" && pwd)" "$build/CTestTestfile.cmake"; then
        ctest --test-dir "$build" -L gpu -LE long ${tests:+-R "$tests"} --no-tests=error --output-on-failure
        return
    fi
    for name in $(cd "$bin" && ls -d test_kn_* test_cuda_* | grep -v -e _threads -e _long | grep "$tests"); do
        "$bin/$name" >"$out/$name.log" 2>&1
        case $? in
        0) echo "$name: passed" ;;
        77) echo "$name: skipped" ;;
        *) echo "$name: FAILED"; tail -n 20 "$out/$name.log"; bad=1 ;;
        esac
    done
    return $bad
}
export -f build_all tests_all
export build card bin out tests
if [ $own = 1 ] && [ $dry = 0 ]; then
    step build 300 build_all || { cat "$out/steps"; exit 1; }
elif [ ! -x "$bin/bench_refresh" ]; then
    echo "gpu.sh: no $bin/bench_refresh: build it, or give --build DIR"
    exit 1
else
    left_out build "$build as it is"
fi
if [ $dry = 1 ]; then
    left_out limits 'the shim has none'
else
    step limits 60 "$bin/gpu_limits"
fi
step tests 180 tests_all
if [ $dry = 1 ]; then
    left_out daemon 'test_shim_daemon is that'
else
    step goldens 120 "$bin/test_golden_gen"
    step daemon 120 bash -c '"$bin/test_shim_daemon" cuda && "$bin/test_shim_daemon_long" cuda'
fi

# ---- benches ----
# A program under the profiler: what each kernel took. Those that load weights are left out: there are thousands.
kernels() {
    ncu --clock-control none --print-units base -k 'regex:^(?!.*(repack|memset)).*$' --metrics gpu__time_duration.sum \
        --csv --page raw "$@" 2>&1 | python3 tests/bench/ncu_table.py
}
export -f kernels
if [ $dry = 1 ]; then # no counters here: what a card's looked like
    step kernels-sample 10 bash -c 'python3 tests/bench/ncu_table.py tests/bench/ncu_sample.csv | grep -x " *8.2 us in all *3 times *2.72 us  (2, 512, 1)  *bias_rows"'
fi
for type in f16 q4_0; do
    model=$work/$type.gguf
    step "model-$type" 60 "$bin/random_model" $shape $type "$model" || continue
    step "refresh-$type" 150 "$bin/bench_refresh" "$model" --backend $backend --n $sizes --reps $reps --block $block
    [ $quick = 1 ] || # caches of several sessions: one after the other, and together
        step "together-$type" 40 "$bin/bench_refresh" "$model" --backend $backend --n $small --sessions $sessions --reps $reps --block $block
    step "decode-$type" 90 "$bin/bench_decode" "$model" --backend $backend --batch $batches --context $context --steps $steps
    if [ $quick = 0 ] && [ $type = q4_0 ]; then # through the daemon's socket; and what a neighbour feels of a refresh
        step serve-$type 90 "$bin/backcast" bench -m "$model" --rounds 3 ${serve:+--only $serve}
        step gap-$type 60 "$bin/bench_gap" "$model" --backend $backend --tokens $gap
    fi
    if [ $quick = 0 ] && [ $dry = 0 ] && command -v ncu >/dev/null; then
        step kernels-refresh-$type 70 kernels "$bin/bench_refresh" "$model" --backend $backend --n 512 --reps 1 --block $block
        step kernels-decode-$type 70 kernels "$bin/bench_decode" "$model" --backend $backend --batch 1,8,32 --context $context --steps 1
    fi
    for log in refresh together decode; do # what the lines that follow are
        [ -f "$out/$log-$type.log" ] && sed -i "1i $log,$type" "$out/$log-$type.log"
    done
    rm -f "$model"
done
if [ $quick = 1 ]; then
    left_out torch quick
elif python3 -c 'import torch, sys; sys.exit(0 if torch.cuda.is_available() else 1)' 2>/dev/null; then
    step torch 90 python3 tests/bench/refresh_torch.py --n $sizes
else
    left_out torch 'PyTorch with CUDA is not here'
fi

# ---- a device that dies ----
daemon_up() { # options...: waits until it serves
    "$bin/backcastd" --no-config --backend $backend --model tests/vectors/tiny-llama.gguf --socket "$work/s/socket" \
        --state-dir none "$@" >>"$out/daemon.log" 2>&1 &
    daemon=$!
    for _ in $(seq 300); do
        "$bin/backcast" ls --socket "$work/s/socket" >/dev/null 2>&1 && return 0
        kill -0 $daemon 2>/dev/null || return 1
        sleep 0.1
    done
    return 1
}
fault() {
    local code from
    daemon_up --inject launch:400 || return 1
    timeout 60 "$bin/backcast" run --socket "$work/s/socket" --raw --max-tokens 2000 --ignore-end "The mill" >/dev/null 2>>"$out/daemon.log"
    wait $daemon
    code=$?
    daemon=
    [ $code = 70 ] || { echo "the daemon ended with $code, not 70"; return 1; }
    from=$(date +%s%N)
    daemon_up || return 1
    timeout 60 "$bin/backcast" run --socket "$work/s/socket" --raw --max-tokens 1 "The mill" >/dev/null 2>>"$out/daemon.log" || return 1
    echo "from the start of the next daemon to its first token: $((($(date +%s%N) - from) / 1000000)) ms"
    kill $daemon
    wait $daemon
    daemon=
}
printf '%3d s  fault\n' $((SECONDS - start))
if fault >"$out/fault.log" 2>&1; then
    echo "fault,exit 70; $(cat "$out/fault.log"),0" >>"$out/steps"
else
    echo "fault,FAILED ($out/fault.log $out/daemon.log),0" >>"$out/steps"
    bad=1
fi

# ---- last, so that a refusal costs nothing ----
if [ $quick = 1 ] || [ $dry = 1 ]; then
    left_out sanitizer "$([ $quick = 1 ] && echo quick || echo 'the shim has its own checks')"
elif command -v compute-sanitizer >/dev/null; then
    for tool in memcheck racecheck synccheck; do
        step "$tool" 60 compute-sanitizer --tool $tool --error-exitcode 9 "$bin/test_cuda_pass"
    done
else
    left_out sanitizer 'compute-sanitizer is not here'
fi

# ---- the table ----
# Limits: the larger of operations / peak and bytes / bandwidth (docs/GPU.md), both as step limits measured them on this card, or
# of the datasheet if it could not.
awk -F, -v card="$card" -v dry=$dry '
    function limit(full, logprob, n,   l, w, f, b) {
        l = full ? 28 : 1
        w = 2 * 3584 * 3584 + (full ? 3 * 3584 * 18944 : 0)
        f = 2 * n * l * w + l * 4 * 28 * 128 * n * (n - 1) / 2 + (logprob ? 2 * n * 3584 * 152064 : 0)
        b = 2 * l * w + l * n * 4 * 4 * 128 + (full ? 2 : 4) * n * 3584 + (logprob ? 2 * 3584 * 152064 : 0)
        return 1e3 * (f / flops > b / bytes ? f / flops : b / bytes)
    }
    BEGIN {
        if (card ~ /4090/) { flops = 165.2e12; bytes = 1.008e12; want["full/logit"] = 50; want["fast/logit"] = 0.25; want["fast/logprob"] = 4.6 }
        if (card ~ /H100/) { flops = 989e12; bytes = 3.35e12 }
        if (card ~ /H200/) { flops = 989e12; bytes = 4.8e12 }
        if (card ~ /H[12]00/) { want["full/logit"] = 10; want["fast/logit"] = 0.08; want["fast/logprob"] = 1.0 }
        print "\n" card "\n"
        printf "%-6s %-24s %8s %10s %10s %8s  %s\n", "model", "what", "n", "ms", "limit", "x limit", ""
    }
    FNR == 1 { split(FILENAME, p, "/"); file = p[length(p)]; sub(/\.log$/, "", file); type = file; sub(/.*-/, "", type) }
    file == "limits" && $1 == "f16" { flops = $2 * 1e12; printf "%-6s %-24s %8s %10.1f TFLOP/s\n", "card", "product of halves", "8192", $2 }
    file == "limits" && ($1 == "copy" || $1 == "read") { bytes = $2 * 1e9; printf "%-6s %-24s %8s %10.1f GB/s\n", "card", $1, "", $2 }
    file == "limits" && $1 ~ /^launch/ { printf "%-6s %-24s %8s %10.3f us\n", "card", $1, "", $2 }
    file ~ /^refresh-/ && $7 + 0 > 0 {
        what = $5 "/" $6; l = flops && !dry ? limit($5 == "full", $6 == "logprob", $7) : 0
        note = $7 == 512 && type == "f16" && (what in want) ? ($9 <= want[what] ? "goal met: " : "GOAL MISSED: ") want[what] " ms" : ""
        printf "%-6s %-24s %8d %10.3f %10s %8s  %s\n", type, "refresh " what, $7, $9, l ? sprintf("%.3f", l) : "-", l ? sprintf("%.2f", $9 / l) : "-", note
    }
    file ~ /^together-/ && $8 + 0 > 0 {
        printf "%-6s %-24s %8d %10.3f %10s %8s  %s\n", type, $7 " x " $5 "/" $6, $8, $11, "-", "-", sprintf("one after the other: %.3f, %.2f times that", $10, $12)
    }
    file ~ /^decode-/ && $4 + 0 > 0 {
        part = bytes ? $9 * 1e9 / bytes : 0; goal = type == "f16" ? 0.8 : 0.65
        note = sprintf("%.0f tokens/s", $8) (part && $4 == 1 ? sprintf(", %.0f %% of bandwidth: %s", 100 * part, part >= goal ? "goal met" : "GOAL MISSED: " 100 * goal) : "")
        printf "%-6s %-24s %8d %10.3f %10s %8s  %s\n", type, "decode, batch", $4, $7, "-", "-", note
    }
    file ~ /^serve-/ && / (tokens\/s|ms) / { print "daemon " $0 }
    file ~ /^gap-/ && /ratio|worst_ms|step_ms/ { printf "%-6s %-40s %-9s %s\n", "gap", $2, $3, $4 }
    file == "torch" && $3 + 0 > 0 { printf "%-6s %-24s %8d %10.3f %10s %8s\n", "f16", "torch " $1 "/" $2, $3, $4, "-", "-" }
    file == "steps" { if (!steps++) print ""; printf "%-12s %4d s  %s\n", $1, $3, $2 }
' $(ls "$out"/limits.log "$out"/refresh-*.log "$out"/together-*.log "$out"/decode-*.log "$out"/serve-*.log "$out"/gap-*.log "$out"/torch.log 2>/dev/null) "$out/steps" | tee "$out/table.txt"
# The same as CSV, in the form of the other benches' results.
{
    echo "commit,processor,threads,bench,case,figure,value"
    cat "$out"/limits.log "$out"/refresh-*.log "$out"/together-*.log "$out"/decode-*.log "$out"/torch.log 2>/dev/null |
        awk -F, -v p="$(git describe --always --dirty 2>/dev/null || echo unknown),${card%%,*},1" '
            $1 ~ /^(refresh|together|decode)$/ { what = $1; type = $2; next }
            $1 ~ /^sm_/ && what == "together" { c = p ",gpu_together," type " " $5 " " $6 " " $7 " x " $8 ","
                          print c "one_by_one_ms," $10 "\n" c "together_ms," $11; next }
            $1 ~ /^sm_/ { print p ",gpu_refresh," type " " $5 " " $6 " " $7 ",refresh_ms," $9
                          if ($5 $6 == "fulllogit") print p ",gpu_refresh," type " prefill " $7 ",prefill_ms," $10 }
            $1 ~ /^(cuda|simt)$/ { print p ",gpu_decode," type " " $4 " sequences,step_ms," $7 "\n" p ",gpu_decode," type " " $4 " sequences,weights_gbs," $9 }
            $1 ~ /^(full|fast)$/ && $4 > 0 { print p ",gpu_torch,f16 " $1 " " $2 " " $3 ",refresh_ms," $4 }
            $3 ~ /^(GB|TFLOP|us)/ { print p ",gpu_limits," $1 "," $3 "," $2 }'
} >"$out/results.csv"
echo
echo "$((SECONDS - start)) s; all of it is in $out"
exit $bad
