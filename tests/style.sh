#!/usr/bin/env bash
# The house rules that a machine can check: file <= 800 lines, function <= 70 (kernels <= 120), no left-over marks, READMEs,
# formatting. Prints every breach; exit 1 if there is one. (Rights to include are CMake's to enforce.)
set -u
cd "$(dirname "$0")/.."
bad=$(mktemp)
trap 'rm -f "$bad"' EXIT
list() { git ls-files "$@" 2>/dev/null | grep -v '^tests/vectors/'; }

for f in $(list '*.c' '*.h' '*.cc' '*.cu' '*.cuh' '*.py' '*.sh' '*.proto' '*.tbl'); do
    case $f in *unicode_data*) continue ;; esac
    n=$(wc -l <"$f")
    [ "$n" -le 800 ] || echo "$f: $n lines (800 at most)" >>"$bad"
done
for f in $(list '*.c' '*.h' '*.cc' '*.cu' '*.cuh'); do
    max=70
    case $f in kernels/*) max=120 ;; esac
    awk -v max=$max -v f="$f" '
        /^[A-Za-z_].*\)$/ || /^[A-Za-z_].*\)[ ]*(__attribute__.*)?$/ { head = $0 }
        /^\{/ { start = NR; name = head }
        /^\}/ { if (start && NR - start > max + 1) printf "%s:%d: function of %d lines (%d at most): %s\n", f, start, NR - start - 1, max, name; start = 0 }
    ' "$f" >>"$bad"
done
list '*.c' '*.h' '*.cc' '*.cu' '*.cuh' | xargs grep -nwE 'TODO|FIXME|XXX' >>"$bad"
# Which backend runs is kernels/'s business: nobody above it is compiled for one, includes its headers or calls its libraries.
list 'daemon/*' 'client/*' 'proto/*' | grep -E '\.(c|h|proto|in)$' |
    xargs grep -nE '^ *# *(if|ifdef|ifndef|elif|include).*(CUDA|SIMT|cuda|simt|cublas)|\b(cuda|cublas|cu)[A-Z][A-Za-z]*\(|\bkn_cuda_' |
    sed 's/$/ (the backend shows above kernels\/)/' >>"$bad"
for d in . client docs docs/decisions tests tests/vectors \
    $(list '*.c' '*.h' '*.cc' '*.cu' '*.proto' '*.service.in' | xargs -n1 dirname | sort -u); do
    case $d in systemd/user|tests/simt/include) continue ;; esac # in the README above them
    [ -f "$d/README.md" ] || echo "$d/ has no README.md" >>"$bad"
done
for f in $(git ls-files | cut -d/ -f1 | sort -u); do
    case $f in .*|CMakeLists.txt|CMakePresets.json|Makefile|README.md|LICENSE|daemon|client|proto|kernels|systemd|tests|docs) ;;
        *) echo "$f does not belong at the top level" >>"$bad" ;;
    esac
done
if command -v clang-format >/dev/null; then
    list '*.c' '*.h' '*.cc' '*.cu' '*.cuh' | xargs clang-format --dry-run --Werror 2>&1 | grep -E 'error|warning' | cut -c1-160 | head -n 40 >>"$bad"
else
    echo "clang-format is not installed: formatting not checked"
fi
if [ -s "$bad" ]; then
    echo "house rules broken:"
    cat "$bad"
    exit 1
fi
echo "house rules: kept"
