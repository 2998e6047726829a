#!/bin/sh
# compile.sh BASE NEWEST COMMAND...: runs nvcc; ptxas's report goes to BASE.ptxas, the PTX of architecture NEWEST to BASE.ptx, all
# else to the screen.
base=$1 newest=$2
shift 2
keep=$(mktemp -d) || exit 1
trap 'rm -rf "$keep"' EXIT
"$@" --keep --keep-dir "$keep" 2>"$keep/log"
code=$?
grep -E '^ptxas|^ +[0-9]+ bytes' "$keep/log" >"$base.ptxas"
grep -vE '^ptxas info|^ +[0-9]+ bytes|^$' "$keep/log" >&2
[ $code = 0 ] || exit $code
for ptx in "$keep"/*compute_"$newest"*.ptx "$keep"/*.ptx; do # with one architecture the name says none
    [ -f "$ptx" ] && exec cp "$ptx" "$base.ptx"
done
echo "$0: nvcc kept no PTX" >&2
exit 1
