#!/usr/bin/env python3
"""peer_llama.py: the same model file in llama.cpp (llama-cpp-python), in turns with `backcast bench`.

    peer_llama.py MODEL --ours build/release/bin/backcast [--rounds 5] [--threads 2] [--types file,Q4_0]
                  [--isa NAME] [--raw RAW.csv]
    peer_llama.py MODEL --ours build/release/bin/backcast --each F16,BF16,Q8_0 [--rounds 5] [--raw RAW.csv]
    peer_llama.py --table RAW.csv           medians and ratios of what --raw has gathered

A round is every figure once: ours, the peer with the file as it is, the peer with each other type. Programs
take turns, so that what changes on the machine changes for all of them; the figures are medians of the
rounds. A type is made from the file by the peer's own quantiser: without the model's original weights it
loses accuracy, which speed does not see. `--raw` appends, so that a long run may be cut into pieces.

--each makes a file of every type, and both programs run that one: prefill of 512 tokens, decode with an empty cache and
behind 512, a table of a line a type. The files lie beside RAW.csv and stay there.

--isa is for ours: with a peer built for the same (setup.sh DIR avx2, and DIR in PYTHONPATH), what both do on a
lesser processor. Both sides read the same made-up token ids. prefill: n tokens in one call, logits of the last one. decode: 64
single steps behind n cached tokens. together: n sequences of 16 tokens take 32 steps in one batch each.
"""
import argparse
import csv
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial

EACH = {"prefill_512_tps": "prefill 512", "decode_tps": "decode", "decode_512_tps": "decode behind 512"}
STEPS, STEPS_TOGETHER, CONTEXT, SEQUENCES = 64, 32, 4096, (1, 2, 4, 8, 16)


def token_ids(n):
    return [300 + ((k * 2654435761 & 0xFFFFFFFF) >> 8) % 20000 for k in range(n)]


class Peer:
    """One model file in llama.cpp: a context of CONTEXT tokens for 16 sequences."""

    def __init__(self, path, threads, flash):
        import llama_cpp as lc

        self.lc = lc
        self.quiet = lc.llama_log_callback(lambda level, text, data: None)
        lc.llama_log_set(self.quiet, ctypes.c_void_p(0))
        lc.llama_backend_init()
        mp = lc.llama_model_default_params()
        mp.n_gpu_layers = 0
        self.model = lc.llama_model_load_from_file(path.encode(), mp)
        if not self.model:
            sys.exit(f"peer_llama: {path} cannot be loaded")
        cp = lc.llama_context_default_params()
        cp.n_ctx, cp.n_batch, cp.n_ubatch, cp.n_seq_max = CONTEXT, 2048, 512, max(SEQUENCES)
        cp.n_threads = cp.n_threads_batch = threads
        cp.kv_unified = True
        cp.flash_attn_type = {"auto": lc.LLAMA_FLASH_ATTN_TYPE_AUTO, "on": lc.LLAMA_FLASH_ATTN_TYPE_ENABLED,
                              "off": lc.LLAMA_FLASH_ATTN_TYPE_DISABLED}[flash]
        self.ctx = lc.llama_init_from_model(self.model, cp)
        self.batch = lc.llama_batch_init(2048, 0, 1)

    def close(self):
        self.lc.llama_batch_free(self.batch)
        self.lc.llama_free(self.ctx)
        self.lc.llama_model_free(self.model)

    def clear(self):
        self.lc.llama_memory_clear(self.lc.llama_get_memory(self.ctx), True)

    def decode(self, rows):
        """rows: (token, position, sequence, wants logits)."""
        b = self.batch
        b.n_tokens = len(rows)
        for i, (token, pos, seq, logits) in enumerate(rows):
            b.token[i], b.pos[i], b.n_seq_id[i], b.logits[i] = token, pos, 1, logits
            b.seq_id[i][0] = seq
        if self.lc.llama_decode(self.ctx, b) != 0:
            sys.exit("peer_llama: llama_decode failed")
        self.lc.llama_synchronize(self.ctx)

    def prompt(self, ids, seq=0):
        self.decode([(t, i, seq, i + 1 == len(ids)) for i, t in enumerate(ids)])

    def steps(self, depth, n):
        start = time.perf_counter()
        for i in range(n):
            self.decode([(500 + i, depth + i, 0, True)])
        return n / (time.perf_counter() - start)

    def round(self, depths=(512, 2048), sequences=SEQUENCES):
        ret = {}
        self.clear()
        self.prompt(token_ids(64))  # buffers and caches are warm
        for depth in depths:
            ids = token_ids(depth)
            self.clear()
            start = time.perf_counter()
            self.prompt(ids)
            ret[f"prefill_{depth}_tps"] = depth / (time.perf_counter() - start)
            ret[f"decode_{depth}_tps"] = self.steps(depth, STEPS)
        self.clear()
        self.prompt(token_ids(1))
        ret["decode_tps"] = self.steps(1, STEPS)
        for n in sequences:
            self.clear()
            for s in range(n):
                self.prompt(token_ids(16), s)
            start = time.perf_counter()
            for i in range(STEPS_TOGETHER):
                self.decode([(500 + i, 16 + i, s, True) for s in range(n)])
            ret[f"decode_{n}_together_tps"] = n * STEPS_TOGETHER / (time.perf_counter() - start)
        return ret


def requantise(path, kind, folder):
    import llama_cpp as lc

    out = os.path.join(folder, f"{os.path.basename(path)}.{kind}.gguf")
    if os.path.exists(out):
        return out
    p = lc.llama_model_quantize_default_params()
    p.nthread = 0
    p.ftype = getattr(lc, f"LLAMA_FTYPE_ALL_{kind}" if kind == "F32" else f"LLAMA_FTYPE_MOSTLY_{kind}")
    p.allow_requantize = True
    quiet = lc.llama_log_callback(lambda level, text, data: None)
    lc.llama_log_set(quiet, ctypes.c_void_p(0))
    if lc.llama_model_quantize(path.encode(), (out + ".new").encode(), ctypes.byref(p)) != 0:
        sys.exit(f"peer_llama: {path} cannot be made {kind}")
    os.rename(out + ".new", out)
    return out


def ours(a, model, *only):
    """One round of `backcast bench`: the figures whose names have one of `only` in them, else all speeds; decode_8_tps is the peer's 8 together."""
    cmd = [a.ours, "bench", "-m", model, "--threads", str(a.threads), "--rounds", "1", "--json", "--quiet"]
    cmd += ["--isa", a.isa] if a.isa else []
    ret = {}
    for text in only or ("tps",):
        run = subprocess.run([*cmd, "--only", text], stdout=subprocess.PIPE, check=True, text=True)
        ret.update({k: v for k, v in json.loads(run.stdout).items() if k.endswith(("_tps", "_ms"))})
    if "decode_8_tps" in ret:
        ret["decode_8_together_tps"] = ret.pop("decode_8_tps")
    return ret


def theirs(a, path, flash, *what):
    """One round of the peer's."""
    p = Peer(path, a.threads, flash)
    ret = p.round(*what)
    p.close()
    return ret


def gather(a, turns):
    """turns: (program, type, what gives its figures), each once a round; they go to RAW.csv as they come."""
    new = not os.path.exists(a.raw)
    with open(a.raw, "a", newline="") as f:
        out = csv.writer(f)
        if new:
            out.writerow(["program", "type", "metric", "value"])
        for _ in range(a.rounds):
            for program, kind, figures in turns:
                out.writerows([program, kind, k, f"{v:.3f}"] for k, v in figures().items())
                f.flush()


def measure(a):
    turns = [("backcast", "file", partial(ours, a, a.model))] if a.ours else []
    for t in a.types.split(","):
        kind, _, flash = t.partition("/")
        path = a.model if kind == "file" else requantise(a.model, kind, os.path.dirname(a.raw) or ".")
        turns.append(("llama.cpp", t, partial(theirs, a, path, flash or "auto")))
    gather(a, turns)


def measure_each(a):
    """Both programs on a file of each type, in turns, type by type."""
    turns = []
    for t in a.each.split(","):
        path = requantise(a.model, t, os.path.dirname(a.raw) or ".")
        turns.append(("backcast", t, partial(ours, a, path, "512_tps", "decode_tps")))
        turns.append(("llama.cpp", t, partial(theirs, a, path, "auto", (512,), ())))
    gather(a, turns)


def table_each(got):
    print("| file |" + "".join(f" {k}, ours | peer | ratio |" for k in EACH.values()))
    print("|---|" + "---:|---:|---:|" * len(EACH))
    for t in [t for p, t in got if p == "backcast"]:
        cells = ""
        for k in EACH:
            mine, theirs = (got[p, t][k][0] for p in ("backcast", "llama.cpp"))
            cells += f" {mine:.1f} | {theirs:.1f} | {mine / theirs:.2f} |"
        print(f"| {t} |{cells}")
    print(f"\nMedians of {sorted({n for m in got.values() for _, n in m.values()})} rounds.")


def medians(raw):
    got = {}
    with open(raw, newline="") as f:
        for r in csv.DictReader(f):
            got.setdefault((r["program"], r["type"]), {}).setdefault(r["metric"], []).append(float(r["value"]))
    return {who: {k: (statistics.median(v), len(v)) for k, v in m.items()} for who, m in got.items()}


def table(raw, as_csv):
    got = medians(raw)
    us = got.get(("backcast", "file"), {})
    peers = [t for p, t in got if p == "llama.cpp"]
    if as_csv:
        for (program, kind), m in got.items():
            for k, (v, n) in m.items():
                print(f"peer_llama,{program} {kind},{k},{v:.2f}")
        return
    if sum(p == "backcast" for p, _ in got) > 1:
        table_each(got)
        return
    print("| figure | ours |" + "".join(f" peer, {t} |" for t in peers) + " ours / same file | ours / best |")
    print("|---|---:|" + "---:|" * len(peers) + "---:|---:|")
    metrics = sorted({k for m in got.values() for k in m if k.endswith("_tps")}, key=order)
    for k in metrics:
        theirs = [got["llama.cpp", t].get(k, (None, 0))[0] for t in peers]
        mine = us.get(k, (None, 0))[0]
        known = [v for v in theirs if v is not None]
        same = got.get(("llama.cpp", "file"), {}).get(k, (None, 0))[0]
        cells = [mine, *theirs]
        print(f"| {k} |" + "".join(f" {v:.1f} |" if v is not None else " |" for v in cells)
              + (f" {mine / same:.2f} |" if mine and same else " |")
              + (f" {mine / max(known):.2f} |" if mine and known else " |"))
    for k in sorted(k for k in us if k.endswith("_ms")):
        print(f"| {k} | {us[k][0]:.2f} |" + " |" * (len(peers) + 2))
    rounds = sorted({n for m in got.values() for _, n in m.values()})
    print(f"\nMedians of {rounds[0] if len(rounds) == 1 else rounds} rounds.")


def order(key):
    head = ("prefill", "decode_tps", "decode_512", "decode_2048", "decode")
    number = [int(w) for w in key.split("_") if w.isdigit()]
    return next(i for i, h in enumerate(head) if key.startswith(h)), number


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", nargs="?")
    p.add_argument("--ours", metavar="BACKCAST")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--isa", help="ours: avx512, avx2")
    p.add_argument("--types", default="file,Q4_0", help="file, or a type to make of it; /on, /off: flash attention")
    p.add_argument("--each", metavar="TYPES", help="both on a file of each of these types")
    p.add_argument("--raw", metavar="CSV", default="peer_raw.csv")
    p.add_argument("--table", metavar="CSV")
    p.add_argument("--csv", action="store_true", help="with --table: for machines")
    a = p.parse_args()
    if a.table:
        table(a.table, a.csv)
    elif a.each and not a.ours:
        p.error("--each needs --ours")
    elif a.model:
        measure_each(a) if a.each else measure(a)
    else:
        p.error("MODEL is missing")


if __name__ == "__main__":
    main()
