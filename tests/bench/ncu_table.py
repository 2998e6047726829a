"""ncu_table.py [FILE]: what each kernel took, of what `ncu --csv --page raw --metrics gpu__time_duration.sum` wrote (a file, or stdin):

       81.7 us in all     3 times     27.23 us  (2, 64, 1)         nvjet_sm90_hss_112x128_64x7_2x1_v_bx_TNN

by name and grid: sum, calls, median; the largest sum first. Of the form that is read: lines of ncu's own (==PROF==) and of the
program that it runs may stand anywhere; every other line starts with a quote: names of columns, their units, a kernel each.
Exit code 77: ncu may not count on this machine; 1: there is no kernel."""
import collections
import csv
import sys

US = {"nsecond": 1e-3, "ns": 1e-3, "usecond": 1.0, "us": 1.0, "msecond": 1e3, "ms": 1e3, "second": 1e6, "s": 1e6}


def main():
    lines = list(open(sys.argv[1]) if len(sys.argv) > 1 else sys.stdin)
    rows = list(csv.reader(line for line in lines if line.startswith('"')))
    if any("ERR_NVGPUCTRPERM" in line for line in lines):
        print("ncu may not count on this machine: ERR_NVGPUCTRPERM")
        return 77
    if len(rows) < 3:
        sys.stdout.writelines(lines[-5:])
        print("no kernel was counted")
        return 1
    name, grid, time = (rows[0].index(k) for k in ("Kernel Name", "Grid Size", "gpu__time_duration.sum"))
    us = US[rows[1][time]]
    times = collections.defaultdict(list)
    for r in rows[2:]:
        times[r[name].split("(")[0], r[grid]].append(float(r[time].replace(",", "")) * us)
    for (k, g), t in sorted(times.items(), key=lambda e: -sum(e[1])):
        print("%10.1f us in all %5d times %9.2f us  %-18s %s" % (sum(t), len(t), sorted(t)[len(t) // 2], g, k))
    return 0


sys.exit(main())
