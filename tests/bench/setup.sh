#!/usr/bin/env bash
# setup.sh DIR [avx2]: what only `make bench` needs: matplotlib, and llama-cpp-python built for this machine, into DIR (a folder of
# Python modules), unless python3 has them. Building the peer takes ten minutes or more, once. Without it the bench goes on. avx2: the peer as it is on a
# processor without AVX-512, always built.
set -eu
dir=$1
peer=0.3.36
mkdir -p "$dir"
export PYTHONPATH="$dir${PYTHONPATH:+:$PYTHONPATH}"

isa=${2:-native}
has() { python3 -c "$1" 2>/dev/null; }

[ "$isa" = avx2 ] || has 'import matplotlib' || python3 -m pip install -q --target "$dir" matplotlib

# The build is for this processor, but without AMX: with it this version's native build crashes at the first prompt.
if [ "$isa" = avx2 ]; then
    flags="-DGGML_NATIVE=OFF -DGGML_SSE42=ON -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON"
    has() { [ -d "$dir/llama_cpp" ]; }
elif grep -qw amx_tile /proc/cpuinfo; then
    flags="-DGGML_NATIVE=OFF -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON -DGGML_AVX512=ON"
    flags="$flags -DGGML_AVX512_VBMI=ON -DGGML_AVX512_VNNI=ON -DGGML_AVX512_BF16=ON"
else
    flags="-DGGML_NATIVE=ON"
fi
if ! has "import llama_cpp; assert llama_cpp.__version__ == '$peer'"; then
    echo "building llama-cpp-python $peer ($flags)"
    CMAKE_ARGS="$flags" python3 -m pip install -q --target "$dir" "llama-cpp-python==$peer" ||
        echo "llama-cpp-python could not be built: no comparison" >&2
fi
