#!/usr/bin/env python3
"""plot.py RESULTS.csv FOLDER: the plots of docs/PERFORMANCE.md, SVG and PNG, out of what run.sh has collected.

peer.*      ours / peer, figure by figure      serve.*     tokens a second over sessions, and the gaps between tokens
refresh.*   milliseconds over cached tokens    roofline.*  every op against what the machine reads and computes
"""
import csv
import os
import re
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

OURS, SAME, BEST, GREY = "#c2410c", "#94a3b8", "#475569", "#cbd5e1"
plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "backcast", "svg.fonttype": "none",
                     "axes.axisbelow": True, "figure.facecolor": "white", "legend.frameon": False})


def read(path):
    rows = {}
    with open(path, newline="") as f:
        for r in csv.DictReader(f):
            rows.setdefault(r["bench"], {}).setdefault(r["case"], {})[r["figure"]] = float(r["value"])
            rows[r["bench"], "about"] = f'{r["processor"]}, {r["threads"]} threads, {r["commit"]}'
    return rows


def save(fig, folder, name, about):
    fig.text(0.995, 0.005, about, ha="right", va="bottom", size=6, color="#64748b")
    fig.tight_layout(rect=(0, 0.02, 1, 1))
    fig.savefig(os.path.join(folder, name + ".svg"), metadata={"Date": None})
    fig.savefig(os.path.join(folder, name + ".png"), dpi=130)
    plt.close(fig)


def peer(rows, folder):
    got = rows.get("peer_llama")
    if not got or "backcast file" not in got:
        return
    us, same = got["backcast file"], got.get("llama.cpp file", {})
    others = {c: m for c, m in got.items() if c.startswith("llama.cpp") and c != "llama.cpp file"}
    keys = ["prefill_512_tps", "prefill_2048_tps", "decode_tps", "decode_512_tps", "decode_2048_tps", "decode_8_together_tps"]
    names = ["prefill\n512", "prefill\n2,048", "decode\nempty", "decode\nat 512", "decode\nat 2,048", "8 sessions\ntogether"]
    fig, ax = plt.subplots(figsize=(7.5, 3.4))
    for at, k in enumerate(keys):
        bars = [(us.get(k), OURS), (same.get(k), SAME)] + [(m.get(k), BEST) for m in others.values()]
        for i, (v, colour) in enumerate(bars):
            if v:
                ax.bar(at + (i - (len(bars) - 1) / 2) * 0.27, v, 0.25, color=colour)
                ax.text(at + (i - (len(bars) - 1) / 2) * 0.27, v * 1.03, f"{v:.0f}", ha="center", size=7)
    labels = ["backcast", "llama.cpp, same file"] + [c.replace(" ", ", ", 1) for c in others]
    for colour, label in zip([OURS, SAME] + [BEST] * len(others), labels):
        ax.bar(0, 0, color=colour, label=label)
    ax.set_yscale("log")
    ax.set_xticks(range(len(keys)), names)
    ax.set_ylabel("tokens/s (log)")
    ax.legend(ncols=3, loc="upper center", bbox_to_anchor=(0.5, 1.15))
    save(fig, folder, "peer", rows["peer_llama", "about"])


def serve(rows, folder):
    got = rows.get("serve")
    if not got:
        return
    counts = sorted(int(c.split()[0]) for c in got if c.endswith("sessions"))
    of = lambda figure: [got[f"{n} sessions"][figure] for n in counts]  # noqa: E731
    fig, (a, b) = plt.subplots(1, 2, figsize=(7.5, 3.2))
    a.plot(counts, of("engine_per_s"), "--", color=BEST, label="the engine alone")
    a.plot(counts, of("tokens_per_s"), "o-", color=OURS, label="through socket and ring")
    a.set_ylabel("tokens/s, all sessions (prompts included)")
    b.plot(counts, of("gap_p50_ms"), "o-", color=OURS, label="median")
    b.plot(counts, of("gap_p99_ms"), "s:", color=OURS, label="99th percentile")
    b.set_ylabel("ms between two tokens of a session")
    for ax in (a, b):
        ax.set_xscale("log", base=2)
        ax.set_xticks(counts, counts)
        ax.set_xlabel("sessions")
        ax.set_ylim(bottom=0)
        ax.grid(color=GREY, lw=0.4)
        ax.legend()
    save(fig, folder, "serve", rows["serve", "about"])


def refresh(rows, folder):
    got = rows.get("refresh")
    if not got:
        return
    fig, ax = plt.subplots(figsize=(7.5, 3.6))
    styles = {"full logit": (OURS, "o-"), "full logprob": (OURS, "s--"), "fast logit": ("#0e7490", "o-"),
              "fast logprob": ("#0e7490", "s--"), "prefill": (BEST, ":"), "decode": (SAME, ":")}
    for kind, (colour, style) in styles.items():
        points = sorted((int(c.rsplit(" ", 1)[1]), next(iter(m.values()))) for c, m in got.items()
                        if c.rsplit(" ", 1)[0] == kind)
        label = {"prefill": "prefill of n tokens", "decode": "one decode step"}.get(kind, f"{kind} refresh")
        ax.plot([n for n, _ in points], [v for _, v in points], style, color=colour, label=label)
    for kind, style in (("full logit", "x-"), ("fast logprob", "x--")):  # the same in PyTorch, its faster type
        points = sorted((int(c.rsplit(" ", 1)[1]), min(v for f, v in m.items() if f not in ("ours_ms", "ratio")))
                        for c, m in rows.get("refresh_torch", {}).items() if c.rsplit(" ", 1)[0] == kind)
        if points:
            ax.plot([n for n, _ in points], [v for _, v in points], style, color=GREY, label=f"PyTorch, {kind}")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    sizes = sorted({int(c.rsplit(" ", 1)[1]) for c in got})
    ax.set_xticks(sizes, sizes)
    ax.set_xlabel("cached tokens")
    ax.set_ylabel("ms")
    ax.grid(color=GREY, lw=0.4)
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
    save(fig, folder, "refresh", rows["refresh", "about"])


def roofline(rows, folder):
    got = dict(rows.get("ops", {}))
    peak = got.pop("peak", None)
    if not peak:
        return
    fig, ax = plt.subplots(figsize=(7.5, 4))
    xs = [10 ** (k / 20) for k in range(-20, 81)]
    for gops, name, style in ((peak["int8_gops"], "8-bit products", "-"), (peak["fma_gops"], "float products", "--")):
        ax.plot(xs, [min(gops, x * peak["read_gbs"]) for x in xs], style, color=BEST, lw=1)
        ax.text(xs[-1], gops * 1.06, f"{name}: {gops:.0f} Gop/s", ha="right", size=7, color=BEST)
    ax.text(0.12, 0.16 * peak["read_gbs"], f'memory: {peak["read_gbs"]:.0f} GB/s', rotation=38, size=7, color=BEST)
    kinds = (("linear Q4_1", OURS, "o"), ("linear Q8_0", "#0e7490", "o"), ("linear Q4_K", "#7c3aed", "o"),
             ("linear F16", "#15803d", "^"), ("attention", "#be185d", "s"))
    for kind, colour, mark in kinds:
        points = [(m["gops"] / m["gbs"], m["gops"]) for c, m in got.items() if c.startswith(kind) and m.get("gbs")]
        ax.plot([p[0] for p in points], [p[1] for p in points], mark, ms=4, alpha=0.8, color=colour, label=kind, ls="")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("operations a byte of weights (or of cache)")
    ax.set_ylabel("Gop/s")
    ax.grid(color=GREY, lw=0.4)
    ax.legend(loc="lower right")
    save(fig, folder, "roofline", rows["ops", "about"])


def main():
    if len(sys.argv) != 3 or re.match("-", sys.argv[1]):
        sys.exit(__doc__)
    os.makedirs(sys.argv[2], exist_ok=True)
    rows = read(sys.argv[1])
    for plot in (peer, serve, refresh, roofline):
        plot(rows, sys.argv[2])


if __name__ == "__main__":
    main()
