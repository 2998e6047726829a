#!/usr/bin/env bash
# make check: house rules, then every test of the release build (with the default model), then the small models
# under AddressSanitizer and UndefinedBehaviorSanitizer, then the threaded code under ThreadSanitizer. --long adds the long tests.
# The last line counts: N passed, N failed.
set -u
cd "$(dirname "$0")/.."
jobs=$(nproc)
long=0
archs=90 # of the CUDA backend: the newest, with PTX for later ones
[ "${1-}" != --long ] || { long=1; archs='75;80;89;90'; }
passed=0 failed=0
export CTEST_OUTPUT_ON_FAILURE=1

build() { # preset [target]: builds it or stops everything
    cmake --preset "$1" "-DBACKCAST_CUDA_ARCHS=$archs" >"build/$1.cmake.log" 2>&1 ||
        { cat "build/$1.cmake.log"; echo "0 passed, 1 failed"; exit 1; }
    grep -o 'SKIPPED (.*' "build/$1.cmake.log"
    cmake --build "build/$1" -j "$jobs" ${2:+--target "$2"} >"build/$1.make.log" 2>&1 ||
        { grep -E -A8 'error|warning|undefined' "build/$1.make.log" | head -n 60; echo "0 passed, 1 failed"; exit 1; }
}
run() { # preset, ctest arguments: runs its tests and adds them up
    preset=$1; shift
    echo "== $preset: ctest $*"
    ctest --test-dir "build/$preset" --no-tests=error "$@" 2>&1 | tee "build/$preset.ctest.log" | grep -vE '^ *Start|^Internal|^Test project'
    f=$(grep -cE '\*\*\*(Failed|Timeout|Exception|Not Run)' "build/$preset.ctest.log")
    s=$(grep -cE '\*\*\*Skipped' "build/$preset.ctest.log")
    p=$(grep -cE 'Test +#[0-9]+:.* Passed ' "build/$preset.ctest.log")
    [ "$p" -gt 0 ] || f=$((f + 1))
    [ "$s" = 0 ] || echo "($s skipped)"
    passed=$((passed + p)) failed=$((failed + f))
}

mkdir -p build
start=$SECONDS
if tests/style.sh; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
build release
build/release/bin/backcast pull || { echo "the default model could not be fetched"; failed=$((failed + 1)); }
# programs that compute run side by side; those that start daemons and watch clocks run alone
if [ $long = 1 ]; then skip='^$'; else skip=long; fi
run release -j "$jobs" -LE "$skip|scenario"
run release -L scenario -LE "$skip"
# the shim under AddressSanitizer takes many minutes: the shim has guard pages and a race detector of its own
if [ $long = 1 ]; then build asan-simt; run asan-simt -L 'simt|kernels'; fi
if [ $long = 1 ]; then build asan; else build asan short_tests; fi
run asan -j "$jobs" -LE 'long|model|scenario'
run asan -L scenario -LE 'long|model'
build tsan threads_tests
run tsan -L threads
echo "make check took $((SECONDS - start)) s"
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
