#!/usr/bin/env bash
# installed.sh BUILD: `cmake --install --prefix DIR` names DIR, and nothing else, in every file that it writes; a
# stranger's program builds against it with pkg-config alone, as client/examples/hello.c says.
set -eu
build=$1
here=$(cd "$(dirname "$0")/.." && pwd)
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
fail() { echo "installed.sh: $*" >&2; exit 1; }

cmake --install "$build" --prefix "$dir/there" >"$dir/log" 2>&1 || { cat "$dir/log"; fail "the install failed"; }
pc=$(find "$dir/there" -name libbackcast.pc)
[ -n "$pc" ] || fail "no libbackcast.pc"
grep -qx "prefix=$dir/there" "$pc" || fail "libbackcast.pc: $(grep prefix= "$pc")"
n=0
for unit in $(find "$dir/there" -name backcast.service); do
    grep -qx "ExecStart=$dir/there/bin/backcastd" "$unit" || fail "$unit: $(grep ExecStart "$unit")"
    n=$((n + 1))
done
[ $n = 2 ] || fail "$n services, not 2"
! grep -rIl '@[A-Z_]*@' "$dir/there" || fail "names that were not replaced"
! grep -rIl /usr/local "$dir/there/lib" || fail "another prefix"
"$dir/there/bin/backcastd" --version | grep -q '^backcastd ' || fail "backcastd does not run"
export PKG_CONFIG_PATH=${pc%/*}
cc "$here/client/examples/hello.c" -o "$dir/hello" $(pkg-config --cflags --libs libbackcast) ||
    fail "hello.c does not build"
lib=$(dirname "$(find "$dir/there" -name 'libbackcast.so.0')")
if LD_LIBRARY_PATH=$lib "$dir/hello" /nowhere/sock 2>"$dir/err"; then fail "hello found a daemon"; fi
grep -q 'no daemon listens' "$dir/err" || { cat "$dir/err"; fail "hello does not run"; }
