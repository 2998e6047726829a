#!/bin/sh
# compile.sh LOG COMMAND...: runs nvcc; ptxas's report goes to LOG, all else to the screen.
log=$1
shift
"$@" 2>"$log.all"
code=$?
grep -E '^ptxas|^ +[0-9]+ bytes' "$log.all" >"$log"
grep -vE '^ptxas info|^ +[0-9]+ bytes|^$' "$log.all" >&2
rm -f "$log.all"
exit $code
