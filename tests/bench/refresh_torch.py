#!/usr/bin/env python3
"""refresh_torch.py [--n 512,768,...] [--reps 5]: a counter-causal refresh in plain PyTorch, in the shape of Qwen2.5-7B.

What one would write with the framework's own parts, to stand beside bench_refresh on the same card: half-precision linear
layers, scaled_dot_product_attention with an explicit n x n mask (row i sees j > i), logits of the whole vocabulary for the
log-probability, one gathered row of the head for the logit. Weights and the stored keys and values are random. A line a
variant: SCORE,VALUE,N,MILLISECONDS (median).
"""
import argparse
import statistics
import torch
import torch.nn.functional as F

LAYERS, D, HEADS, KV_HEADS, HEAD_DIM, FF, VOCAB = 28, 3584, 28, 4, 128, 18944, 152064
EPS = 1e-6


def weights(rows, cols):
    return torch.empty(rows, cols, dtype=torch.float16, device="cuda").uniform_(-0.03, 0.03)


class Layer:
    def __init__(self):
        self.q, self.o = weights(HEADS * HEAD_DIM, D), weights(D, HEADS * HEAD_DIM)
        self.gate, self.up, self.down = weights(FF, D), weights(FF, D), weights(D, FF)
        self.norm = torch.ones(2, D, dtype=torch.float16, device="cuda")

    def attend(self, x, k, v, mask, angles):
        q = F.linear(rmsnorm(x, self.norm[0]), self.q).view(-1, HEADS, HEAD_DIM)
        q = turn(q, angles).transpose(0, 1)
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=0) for t in (k, v))
        a = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask)[0]
        return x + F.linear(torch.nan_to_num(a).transpose(0, 1).reshape(-1, HEADS * HEAD_DIM), self.o)

    def mlp(self, x):
        h = rmsnorm(x, self.norm[1])
        return x + F.linear(F.silu(F.linear(h, self.gate)) * F.linear(h, self.up), self.down)


def rmsnorm(x, gain):
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).half() * gain


def turn(x, angles):
    a, b = x[..., : HEAD_DIM // 2], x[..., HEAD_DIM // 2 :]
    cos, sin = angles.cos()[:, None].half(), angles.sin()[:, None].half()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def refresh(model, n, full, logprob):
    layers, embd, head, norm, ids, keys, values, hidden, angles = model
    mask = torch.ones(n, n, dtype=torch.bool, device="cuda").triu(1)
    x = embd[ids[:n]] if full else hidden[:n]
    for i in range(LAYERS if full else 1):
        layer = layers[i if full else -1]
        x = layer.attend(x, keys[i][:, :n], values[i][:, :n], mask, angles[:n])
        if full:
            x = layer.mlp(x)
    x = rmsnorm(x, norm)
    logit = (x * head[ids[:n]]).sum(-1)
    if not logprob:
        return logit
    for at in range(0, n, 1024):  # the whole vocabulary of all rows would not fit
        rows = slice(at, min(n, at + 1024))
        logit[rows] -= F.linear(x[rows], head).float().logsumexp(-1)
    return logit


def measure(work, reps):
    times = []
    for i in range(reps + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times += [begin.elapsed_time(end)] if i else []
    return statistics.median(times)


@torch.inference_mode()
def main():
    p = argparse.ArgumentParser()
    p.add_argument("--n", default="512,768,4096,10000,18700")
    p.add_argument("--reps", type=int, default=3)
    o = p.parse_args()
    sizes = [int(n) for n in o.n.split(",")]
    top = max(sizes)
    shape = (LAYERS, KV_HEADS, top, HEAD_DIM)
    steps = 1e6 ** (-torch.arange(0, HEAD_DIM, 2, device="cuda").float() / HEAD_DIM)
    model = ([Layer() for _ in range(LAYERS)], weights(VOCAB, D), weights(VOCAB, D),
             torch.ones(D, dtype=torch.float16, device="cuda"), torch.randint(0, VOCAB, (top,), device="cuda"),
             torch.randn(shape, dtype=torch.float16, device="cuda"), torch.randn(shape, dtype=torch.float16, device="cuda"),
             weights(top, D), torch.arange(top, device="cuda").float()[:, None] * steps)
    for n in sizes:
        for full in (True, False):
            for logprob in (False, True):
                name = "%s,%s,%d" % ("full" if full else "fast", "logprob" if logprob else "logit", n)
                try:
                    print("%s,%.3f" % (name, measure(lambda: refresh(model, n, full, logprob), o.reps)), flush=True)
                except torch.cuda.OutOfMemoryError:
                    print("%s,out of memory" % name, flush=True)


if __name__ == "__main__":
    main()
