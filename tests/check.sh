#!/usr/bin/env bash
# make check: house rules, then every test of the release build (with the default model), then the small models
# under AddressSanitizer and UndefinedBehaviorSanitizer, then the threaded code under ThreadSanitizer. --long adds the long tests.
# While the tests of one build run, the next is built with the processor time that they leave:
#
#     build release | test release        | test asan       | test tsan
#                   | build asan ..  build tsan ..    (nice 10)
#
# The last line counts: N passed, N failed.
set -u
cd "$(dirname "$0")/.."
jobs=$(nproc)
long=0
archs=90 # of the CUDA backend: the newest, with PTX for later ones
[ "${1-}" != --long ] || { long=1; archs='75;80;89;90'; }
passed=0 failed=0
export CTEST_OUTPUT_ON_FAILURE=1

build() { # preset [target]: builds it; says what went wrong
    cmake --preset "$1" "-DBACKCAST_CUDA_ARCHS=$archs" >"build/$1.cmake.log" 2>&1 || { cat "build/$1.cmake.log"; return 1; }
    grep -o 'SKIPPED (.*' "build/$1.cmake.log"
    cmake --build "build/$1" -j "$jobs" ${2:+--target "$2"} >"build/$1.make.log" 2>&1 ||
        { grep -E -A8 'error|warning|undefined' "build/$1.make.log" | head -n 60; return 1; }
}
stop() { echo "the $1 build failed"; echo "$passed passed, $((failed + 1)) failed"; exit 1; }
behind() { # "preset [target]" ...: builds them one after another behind the tests
    set -m # a process group of its own, which the trap can end
    (
        renice -n 10 "$BASHPID" >/dev/null
        for b in "$@"; do
            # shellcheck disable=SC2086
            build $b >"build/${b%% *}.said" 2>&1
            echo $? >"build/${b%% *}.built"
        done
    ) </dev/null &
    builder=$!
    set +m
    trap 'kill -- -$builder 2>/dev/null' EXIT
    trap 'exit 130' INT TERM
}
built() { # preset: waits until it is built, or stops everything
    while [ ! -s "build/$1.built" ] && kill -0 "$builder" 2>/dev/null; do sleep 1; done
    cat "build/$1.said"
    [ "$(cat "build/$1.built")" = 0 ] || stop "$1"
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
rm -f build/*.said build/*.built
start=$SECONDS
if tests/style.sh; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
build release || stop release
if [ $long = 1 ]; then behind asan-simt asan 'tsan threads_tests'; else behind 'asan short_tests' 'tsan threads_tests'; fi
build/release/bin/backcast pull || { echo "the default model could not be fetched"; failed=$((failed + 1)); }
# programs run side by side; of those that start daemons and watch clocks, one at a time (tests/CMakeLists.txt)
if [ $long = 1 ]; then skip='^$'; else skip=long; fi
run release -j "$jobs" -LE "$skip"
# the shim under AddressSanitizer takes many minutes: the shim has guard pages and a race detector of its own
if [ $long = 1 ]; then built asan-simt; run asan-simt -L 'simt|kernels'; fi
built asan
run asan -j "$jobs" -LE 'long|model'
built tsan
wait "$builder"
trap - EXIT INT TERM
run tsan -j "$jobs" -L threads
echo "make check took $((SECONDS - start)) s"
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
