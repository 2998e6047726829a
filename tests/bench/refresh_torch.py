#!/usr/bin/env python3
"""refresh_torch.py [--n 512,768,...] [--reps 3]: a counter-causal refresh in plain PyTorch, in the shape of Qwen2.5-7B.
refresh_torch.py --ours build/release/bin/bench_refresh --model MODEL [--n 256,512,...] [--threads 2]: SmolLM2-135M's on the CPU, beside ours.

What one would write with the framework's own parts, to stand beside bench_refresh on the same machine: linear layers in half precision
(bfloat16 and float32 on a CPU), scaled_dot_product_attention with an explicit n x n mask (row i sees j > i), logits of the whole
vocabulary for the log-probability, one gathered row of the head for the logit. Weights and the stored keys and values are random.

Alone: a line a variant, SCORE,VALUE,N,MILLISECONDS (median). Beside ours the two take turns (ours, torch, torch, ours), and CSV comes
out, medians of --rounds turns:

    refresh_torch,SCORE VALUE N,ours_ms,MS       refresh_torch,SCORE VALUE N,bfloat16_ms,MS    refresh_torch,SCORE VALUE N,float32_ms,MS
    refresh_torch,SCORE VALUE N,ratio,R          the faster type's time / ours
"""
import argparse
import statistics
import subprocess
import sys
import time

try:
    import torch
    import torch.nn.functional as F
except ImportError:
    sys.exit("refresh_torch.py: no PyTorch here")


class Shape:
    def __init__(self, layers, d, heads, kv_heads, head_dim, ff, vocab, theta):
        self.layers, self.d, self.heads, self.kv_heads, self.head_dim = layers, d, heads, kv_heads, head_dim
        self.ff, self.vocab, self.theta = ff, vocab, theta


QWEN2_5_7B = Shape(28, 3584, 28, 4, 128, 18944, 152064, 1e6)
SMOLLM2_135M = Shape(30, 576, 9, 3, 64, 1536, 49152, 1e5)
EPS = 1e-6
VARIANTS = [(score, value) for score in ("full", "fast") for value in ("logit", "logprob")]


class Layer:
    def __init__(self, s, make):
        self.s = s
        self.q, self.o = make(s.heads * s.head_dim, s.d), make(s.d, s.heads * s.head_dim)
        self.gate, self.up, self.down = make(s.ff, s.d), make(s.ff, s.d), make(s.d, s.ff)
        self.norm = torch.ones(2, s.d, dtype=self.q.dtype, device=self.q.device)

    def attend(self, x, k, v, mask, angles):
        s = self.s
        q = F.linear(rmsnorm(x, self.norm[0]), self.q).view(-1, s.heads, s.head_dim)
        q = turn(q, angles).transpose(0, 1)
        k, v = (t.repeat_interleave(s.heads // s.kv_heads, dim=0) for t in (k, v))
        a = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask)[0]
        return x + F.linear(torch.nan_to_num(a).transpose(0, 1).reshape(-1, s.heads * s.head_dim), self.o)

    def mlp(self, x):
        h = rmsnorm(x, self.norm[1])
        return x + F.linear(F.silu(F.linear(h, self.gate)) * F.linear(h, self.up), self.down)


def rmsnorm(x, gain):
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype) * gain


def turn(x, angles):
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    cos, sin = angles.cos()[:, None].to(x.dtype), angles.sin()[:, None].to(x.dtype)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Model:
    """Random weights, keys, values and hidden rows of up to `top` tokens."""

    def __init__(self, shape, top, dtype, device):
        def make(rows, cols):
            return torch.empty(rows, cols, dtype=dtype, device=device).uniform_(-0.03, 0.03)

        s, cache = shape, (shape.layers, shape.kv_heads, top, shape.head_dim)
        steps = s.theta ** (-torch.arange(0, s.head_dim, 2, device=device).float() / s.head_dim)
        self.s, self.device = s, device
        self.layers = [Layer(s, make) for _ in range(s.layers)]
        self.embd, self.head = make(s.vocab, s.d), make(s.vocab, s.d)
        self.norm = torch.ones(s.d, dtype=dtype, device=device)
        self.ids = torch.randint(0, s.vocab, (top,), device=device)
        self.keys, self.values = (torch.randn(cache, dtype=dtype, device=device) for _ in range(2))
        self.hidden = make(top, s.d)
        self.angles = torch.arange(top, device=device).float()[:, None] * steps

    def refresh(self, n, full, logprob):
        mask = torch.ones(n, n, dtype=torch.bool, device=self.device).triu(1)
        x = self.embd[self.ids[:n]] if full else self.hidden[:n]
        for i in range(self.s.layers if full else 1):
            layer = self.layers[i if full else -1]
            x = layer.attend(x, self.keys[i][:, :n], self.values[i][:, :n], mask, self.angles[:n])
            if full:
                x = layer.mlp(x)
        x = rmsnorm(x, self.norm)
        logit = (x * self.head[self.ids[:n]]).sum(-1)
        if not logprob:
            return logit
        for at in range(0, n, 1024):  # the whole vocabulary of all rows would not fit
            rows = slice(at, min(n, at + 1024))
            logit[rows] -= F.linear(x[rows], self.head).float().logsumexp(-1)
        return logit

    def measure(self, n, score, value, reps):
        """Milliseconds: median of reps, after one that is not counted."""
        times = []
        for i in range(reps + 1):
            if self.device == "cuda":
                torch.cuda.synchronize()
            begin = time.perf_counter()
            self.refresh(n, score == "full", value == "logprob")
            if self.device == "cuda":
                torch.cuda.synchronize()
            times += [(time.perf_counter() - begin) * 1e3] if i else []
        return statistics.median(times)


def ours(o, n):
    """{(score, value): ms} of one run of bench_refresh."""
    out = subprocess.run([o.ours, o.model, "--threads", str(o.threads), "--n", str(n), "--reps", str(o.reps)],
                         check=True, capture_output=True, text=True).stdout.splitlines()
    head, lines = out[0].split(","), [line.split(",") for line in out[1:]]
    at = [head.index(name) for name in ("score", "value", "refresh_ms")]
    return {(line[at[0]], line[at[1]]): float(line[at[2]]) for line in lines}


def beside(o, sizes):
    torch.set_num_threads(o.threads)
    types = o.types.split(",")
    models = {t: Model(SMOLLM2_135M, max(sizes), getattr(torch, t), "cpu") for t in types}
    for n in sizes:
        times = {}
        for _ in range(o.rounds):
            for who in ("ours", "torch", "torch", "ours"):
                got = {}
                if who == "ours":
                    got = {v + ("ours",): ms for v, ms in ours(o, n).items()}
                else:
                    got = {v + (t,): m.measure(n, *v, o.reps) for t, m in models.items() for v in VARIANTS}
                for key, ms in got.items():
                    times.setdefault(key, []).append(ms)
        for v in VARIANTS:
            case = "refresh_torch,%s %s %d," % (v + (n,))
            ms = {who: statistics.median(times[v + (who,)]) for who in ["ours"] + types}
            for who, t in ms.items():
                print("%s%s_ms,%.2f" % (case, who, t))
            print("%sratio,%.2f" % (case, min(ms[t] for t in types) / ms["ours"]), flush=True)


def alone(o, sizes):
    model = Model(QWEN2_5_7B, max(sizes), torch.float16, "cuda")
    for n in sizes:
        for v in VARIANTS:
            try:
                print("%s,%s,%d,%.3f" % (v + (n, model.measure(n, *v, o.reps))), flush=True)
            except torch.cuda.OutOfMemoryError:
                print("%s,%s,%d,out of memory" % (v + (n,)), flush=True)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--n", help="default: 512,768,4096,10000,18700; beside ours 256,512,1024,2048")
    p.add_argument("--reps", type=int, default=3)
    p.add_argument("--ours", metavar="BENCH_REFRESH", help="on the CPU, in turns with this")
    p.add_argument("--model", help="for --ours")
    p.add_argument("--rounds", type=int, default=1, help="of ours, torch, torch, ours")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--types", default="bfloat16,float32", help="of the CPU's reference")
    o = p.parse_args()
    if (o.ours is None) != (o.model is None):
        p.error("--ours and --model belong together")
    sizes = o.n or ("256,512,1024,2048" if o.ours else "512,768,4096,10000,18700")
    sizes = [int(n) for n in sizes.split(",")]
    with torch.inference_mode():
        beside(o, sizes) if o.ours else alone(o, sizes)


if __name__ == "__main__":
    main()
