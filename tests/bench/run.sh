#!/usr/bin/env bash
# run.sh BUILD [STEP...]: every measurement, into build/bench/: a CSV a step, results.csv of them all, table.md beside the
# peer, plots. Steps: setup ops parts engine refresh torch gap serve limits peer crowd report, by default; peer_avx2, keep. `keep` copies what
# is there into tests/bench/results and docs/plots. Eleven minutes on two quiet cores, without building the peer.
#
#   commit,processor,threads,bench,case,figure,value
set -eu
cd "$(dirname "$0")/../.."
build=${1-}
case $build in
'' | -*) why= ;;
*) why="$build has no bin/: it is no build folder; " ;;
esac
if [ -z "$why" ] || [ ! -d "$build/bin" ]; then
    echo "${why}usage: run.sh BUILD [STEP...]" >&2
    exit 2
fi
shift
steps=${*:-setup ops parts engine refresh torch gap serve limits peer crowd report}
bin=$build/bin
out=build/bench
threads=$(nproc)
[ "$threads" -le 2 ] || threads=2 # the figures that are kept are of two threads
model=${XDG_DATA_HOME:-$HOME/.local/share}/backcast/models/SmolLM2-135M-Instruct.Q4_1.gguf
commit=$(git describe --always --dirty 2>/dev/null || echo unknown)
isa=$(grep -qw avx512_vnni /proc/cpuinfo && echo ' AVX-512 VNNI' || true)$(grep -qw amx_int8 /proc/cpuinfo && echo ' AMX' || true)
processor=$(sed -n 's/^model name[^:]*: *//p' /proc/cpuinfo | head -n 1 | tr -d ',')${isa:- AVX2}
export PYTHONPATH="$PWD/$out/python${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$out"

# bench,case,figure,value lines, without the headers of those who print one -> $out/$1.csv
collect() {
    { echo "commit,processor,threads,bench,case,figure,value"
      awk -v p="$commit,$processor,$threads," '/^[a-z_]+,/ && !/^bench,case,/ { print p $0 }'; } >"$out/$1.csv.new"
    mv "$out/$1.csv.new" "$out/$1.csv"
}

step_setup() { tests/bench/setup.sh "$out/python"; }

# "linear Q4_1 1536x576 rows 1   10.9 us  50.9 GB/s  171 %  163.0 Gop/s  17 %" and the line of peaks
step_ops() {
    "$bin/bench_ops" --threads "$threads" --ms 40 | tee "$out/ops.txt" |
        sed -nE 's/^(.*[^ ]) +([0-9.]+) us +([0-9.]+) GB\/s +[0-9]+ % +([0-9.]+) Gop\/s +[0-9]+ %$/ops,\1,us,\2\nops,\1,gbs,\3\nops,\1,gops,\4/p
                 s/^cpu.*: reads ([0-9.]+) GB\/s, fma ([0-9.]+) Gop\/s, 8-bit ([0-9.]+) Gop\/s$/ops,peak,read_gbs,\1\nops,peak,fma_gops,\2\nops,peak,int8_gops,\3/p' |
        collect ops
}

# What is no kernel: pages of a cache, on huge pages and on small ones, and a token out of its logits.
step_parts() {
    {
        "$bin/bench_pages"
        "$bin/bench_pages" --small | sed 's/^pages,/pages_small,/'
        "$bin/bench_pick"
    } | collect parts
}

step_engine() {
    for n in 1 8; do
        "$bin/bench_engine" "$model" --threads "$threads" --sessions $n --prompt 512 --new 64 2>/dev/null |
            sed -nE "s/^(prefill|decode) +([0-9.]+) tokens.*/engine,$n sessions,\1_tps,\2/p"
    done | collect engine
}

step_refresh() {
    "$bin/bench_refresh" "$model" --threads "$threads" --n "${REFRESH_N:-256,512,1024,2048,4096}" --reps 3 | awk -F, 'NR > 1 {
            print "refresh," $5 " " $6 " " $7 ",refresh_ms," $9
            if ($5 " " $6 == "full logit") print "refresh,prefill " $7 ",prefill_ms," $10 "\nrefresh,decode " $7 ",decode_ms," $11
        }' | collect refresh
}

# The same refreshes in PyTorch, in turns with ours, where it is installed: nothing here installs it.
step_torch() {
    python3 -c 'import torch' 2>/dev/null || { echo "no PyTorch: no comparison with it" >&2; return 0; }
    python3 tests/bench/refresh_torch.py --ours "$bin/bench_refresh" --model "$model" --threads "$threads" \
        --n "${TORCH_N:-256,512,1024}" --reps 2 | collect torch
}

step_serve() { "$bin/bench_serve" "$model" --threads "$threads" --rounds "${SERVE_ROUNDS:-9}" --sessions "${SERVE_SESSIONS:-32}" | collect serve; }
step_gap() {
    for p in "counter_causal_fast --score logit" "counter_causal_fast --score logprob" h2o keydiff; do
        "$bin/bench_gap" "$model" --threads "$threads" --rounds "${GAP_ROUNDS:-3}" --policy $p
    done | collect gap
    "$bin/bench_pauses" | collect pauses
}

step_limits() { "$bin/bench_limits" "$model" --threads "$threads" | collect limits; }

# PEER_ROUNDS: appended to what is there with PEER_APPEND=1, so that a run may be cut into pieces
step_peer() {
    [ "${PEER_APPEND:-0}" = 1 ] || rm -f "$out/peer_raw.csv"
    python3 tests/bench/peer_llama.py "$model" --ours "$bin/backcast" --threads "$threads" --rounds "${PEER_ROUNDS:-5}" \
        --raw "$out/peer_raw.csv" || echo "no comparison with the peer" >&2
    [ ! -f "$out/peer_raw.csv" ] || python3 tests/bench/peer_llama.py --table "$out/peer_raw.csv" --csv | collect peer
}

# Two programs on the same cores.
step_crowd() {
    python3 tests/bench/crowd.py "$model" --ours "$bin/bench_engine" --threads "$threads" | collect crowd
    [ "$(wc -l <"$out/crowd.csv")" -gt 1 ] || echo "no comparison with the peer in a crowd" >&2
}

# What both do without AVX-512. Builds the peer once more.
step_peer_avx2() {
    tests/bench/setup.sh "$out/python-avx2" avx2
    [ "${PEER_APPEND:-0}" = 1 ] || rm -f "$out/peer_avx2_raw.csv"
    PYTHONPATH="$PWD/$out/python-avx2:$PYTHONPATH" python3 tests/bench/peer_llama.py "$model" --ours "$bin/backcast" --isa avx2 \
        --threads "$threads" --rounds "${PEER_ROUNDS:-5}" --raw "$out/peer_avx2_raw.csv"
    python3 tests/bench/peer_llama.py --table "$out/peer_avx2_raw.csv" | tee "$out/table_avx2.md"
    python3 tests/bench/peer_llama.py --table "$out/peer_avx2_raw.csv" --csv | sed 's/^peer_llama/peer_llama_avx2/' | collect peer_avx2
}

step_report() {
    first=1
    for f in ops parts engine refresh torch gap pauses serve limits peer peer_avx2 crowd quality; do
        [ -f "$out/$f.csv" ] || continue
        tail -n "+$first" "$out/$f.csv"
        first=2
    done >"$out/results.csv"
    [ ! -f "$out/peer_raw.csv" ] || python3 tests/bench/peer_llama.py --table "$out/peer_raw.csv" >"$out/table.md"
    python3 tests/bench/plot.py "$out/results.csv" "$out/plots"
    echo "figures: $out/results.csv, $out/table.md; plots: $out/plots"
}

step_keep() {
    name=$(echo "$processor" | tr 'A-Z ' 'a-z-' | tr -cd 'a-z0-9-')
    mkdir -p tests/bench/results docs/plots
    cp "$out/results.csv" "tests/bench/results/$name.csv"
    cp "$out"/plots/*.svg "$out"/plots/*.png docs/plots/
}

for s in $steps; do
    echo "== bench: $s"
    begun=$SECONDS
    "step_$s"
    echo "($s took $((SECONDS - begun)) s)"
done
