"""Goldens of the policies that reference.py leaves out: knorm, keydiff and random, and a full cache (none).

    python baselines.py VECTORS          reads VECTORS/tiny-ARCH.gguf, writes VECTORS/baseline-ARCH.gguf

needs: numpy, gguf. A numpy forward pass of the tiny models, written from the method's description alone, in float32: it shares no line
with the daemon or with reference.py, and it checks itself against golden-ARCH.gguf's logits before it writes anything.
The files have the layout of golden-ARCH.gguf: `gen.*` texts and kept sets (same budget, keep, frozen and recent), and `values.POLICY` [70], the
value of each token of the prompt in a full cache: higher goes first. `twice.tova.keep{0,1}`: tova prunes the prompt to 50 and at once to 30.
"""
import json
import os
import sys

import gguf
import numpy as np

ARCHS = ["llama", "llama-rope3", "qwen2", "qwen3"]
SEED = 0x123456789abcdef0
F = np.float32


class File:
    def __init__(self, path):
        r = gguf.GGUFReader(path)
        self.tensors = {t.name: np.array(t.data).reshape([int(x) for x in t.shape[::-1]]) for t in r.tensors}
        self.keys = {k: f.contents() for k, f in r.fields.items()}


class Model:
    """caches are dicts: pos [n], k and v: per layer [n, kv heads, head size]"""

    def __init__(self, path):
        f = File(path)
        self.t = f.tensors
        arch = f.keys["general.architecture"]
        key = lambda name: f.keys[f"{arch}.{name}"]
        self.layers = int(key("block_count"))
        self.heads, self.kv_heads = int(key("attention.head_count")), int(key("attention.head_count_kv"))
        self.dim = int(key("attention.key_length"))
        self.eps = F(key("attention.layer_norm_rms_epsilon"))
        self.pairs = arch == "llama"
        self.inv_freq = (1.0 / float(key("rope.freq_base")) ** (np.arange(0, self.dim, 2) / self.dim)).astype(F)
        if "rope_freqs.weight" in self.t:
            self.inv_freq = self.inv_freq / self.t["rope_freqs.weight"]

    def norm(self, x, gain):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps) * gain

    def rotate(self, x, pos):
        """x [m, heads, dim]"""
        angle = pos[:, None].astype(F) * self.inv_freq[None]
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        out = np.empty_like(x)
        if self.pairs:
            a, b = x[..., 0::2], x[..., 1::2]
            out[..., 0::2], out[..., 1::2] = a * cos - b * sin, b * cos + a * sin
        else:
            half = self.dim // 2
            a, b = x[..., :half], x[..., half:]
            out[..., :half], out[..., half:] = a * cos - b * sin, b * cos + a * sin
        return out

    def project(self, layer, name, x):
        y = x @ self.t[f"blk.{layer}.{name}.weight"].T
        bias = self.t.get(f"blk.{layer}.{name}.bias")
        return y if bias is None else y + bias

    def heads_of(self, layer, name, x, pos, count):
        y = self.project(layer, name, x).reshape(len(x), count, self.dim)
        gain = self.t.get(f"blk.{layer}.{name}_norm.weight")
        return self.rotate(y if gain is None else self.norm(y, gain), pos)

    def empty(self):
        z = np.zeros((0, self.kv_heads, self.dim), F)
        return dict(pos=np.zeros(0, np.int64), k=[z] * self.layers, v=[z] * self.layers)

    def extend(self, cache, ids, pos):
        """-> logits [m, V]; the cache grows"""
        m, n = len(ids), len(cache["pos"])
        cache["pos"] = np.concatenate([cache["pos"], pos])
        hidden = np.arange(n + m)[None, :] > n + np.arange(m)[:, None]
        x = self.t["token_embd.weight"][ids]
        for l in range(self.layers):
            h = self.norm(x, self.t[f"blk.{l}.attn_norm.weight"])
            q = self.heads_of(l, "attn_q", h, pos, self.heads)
            k = self.heads_of(l, "attn_k", h, pos, self.kv_heads)
            v = self.project(l, "attn_v", h).reshape(m, self.kv_heads, self.dim)
            cache["k"][l], cache["v"][l] = np.concatenate([cache["k"][l], k]), np.concatenate([cache["v"][l], v])
            out = np.empty((m, self.heads, self.dim), F)
            for head in range(self.heads):
                g = head // (self.heads // self.kv_heads)
                s = q[:, head] @ cache["k"][l][:, g].T / F(np.sqrt(self.dim))
                s[hidden] = -np.inf
                p = np.exp(s - s.max(-1, keepdims=True))
                out[:, head] = (p / p.sum(-1, keepdims=True)) @ cache["v"][l][:, g]
            x = x + self.project(l, "attn_output", out.reshape(m, -1))
            h = self.norm(x, self.t[f"blk.{l}.ffn_norm.weight"])
            gate, up = self.project(l, "ffn_gate", h), self.project(l, "ffn_up", h)
            x = x + self.project(l, "ffn_down", gate / (1 + np.exp(-gate)) * up)
        self.last_query = q[-1]                                         # last layer, newest token: [heads, head size]
        head = self.t.get("output.weight", self.t["token_embd.weight"])
        return self.norm(x, self.t["output_norm.weight"]) @ head.T


def evict(cache, keep):
    return dict(pos=cache["pos"][keep], k=[k[keep] for k in cache["k"]], v=[v[keep] for v in cache["v"]])


# ---- values: higher goes first -------------------------------------------------------------------------------------

def knorm(cache):
    return np.mean([np.linalg.norm(k.astype(np.float64), axis=-1).mean(-1) for k in cache["k"]], 0)


def keydiff(cache):
    per_layer = []
    for k in cache["k"]:
        unit = k.astype(np.float64) / np.linalg.norm(k, axis=-1, keepdims=True)
        mean = unit.mean(0)                                             # [kv heads, head size]
        cosine = (unit * mean).sum(-1) / np.linalg.norm(mean, axis=-1)
        per_layer.append(cosine.mean(-1))
    return np.mean(per_layer, 0)


def mix(z):
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9 % 2**64
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb % 2**64
    return z ^ (z >> 31)


def random(cache):
    """24 bits of splitmix64's finaliser over the seed and the token's position."""
    golden = 0x9e3779b97f4a7c15
    key = mix((SEED + golden) % 2**64)
    return np.array([(mix((key + golden * int(p)) % 2**64) >> 40) / 2**24 for p in cache["pos"]])


def tova(cache, query):
    """The newest token's last-layer attention over the cache as it is now, low first to go."""
    group = len(query) // cache["k"][-1].shape[1]
    rows = []
    for head, q in enumerate(query):
        s = cache["k"][-1][:, head // group] @ q / F(np.sqrt(len(q)))
        p = np.exp(s - s.max())
        rows.append(p / p.sum())
    return -np.mean(rows, 0)


POLICIES = dict(knorm=knorm, keydiff=keydiff, random=random)


def keep_lowest(value, keep, frozen, recent):
    n = len(value)
    middle = np.arange(frozen, n - recent)
    order = middle[np.argsort(value[middle], kind="stable")]
    chosen = order[: keep - frozen - recent]
    ranked = value[order]
    cut = (ranked[len(chosen)] - ranked[len(chosen) - 1]) / ranked.std()
    return np.sort(np.concatenate([np.arange(frozen), chosen, np.arange(n - recent, n)])), cut


def run(model, prompt, n_new, policy=None, budget=48, keep=32, frozen=2, recent=6, chunk=7):
    """-> text, kept sets, the narrowest lead of a chosen token, the narrowest cut"""
    cache, at, pending, text, kept, leads, cuts = model.empty(), 0, prompt, [], [], [], []
    while True:
        while len(pending):
            room = chunk if policy is None else budget - len(cache["pos"])
            if room == 0:
                k, cut = keep_lowest(policy(cache), keep, frozen, recent)
                cache = evict(cache, k)
                kept.append(k)
                cuts.append(cut)
                continue
            m = min(chunk, len(pending), room)
            logits = model.extend(cache, pending[:m], np.arange(at, at + m))[-1]
            at, pending = at + m, pending[m:]
        top = np.sort(logits)[-2:]
        leads.append(top[1] - top[0])
        text.append(int(logits.argmax()))
        if len(text) == n_new:
            return text, kept, min(leads), min(cuts, default=1.0)
        pending = np.array(text[-1:])


def prune_twice(model, prompt, keeps=(50, 30), frozen=2, recent=6):
    """tova with no new token between two prunes: the same query over what is left. -> kept sets, the narrowest cut"""
    cache, kept, cuts = model.empty(), [], []
    model.extend(cache, prompt, np.arange(len(prompt)))
    for keep in keeps:
        k, cut = keep_lowest(tova(cache, model.last_query), keep, frozen, recent)
        cache = evict(cache, k)
        kept.append(k)
        cuts.append(cut)
    return kept, min(cuts)


def check_model(model, golden):
    tokens = golden.tensors["tokens"]
    got = model.extend(model.empty(), tokens, np.arange(len(tokens)))
    off = float(np.abs(got - golden.tensors["logits"]).max())
    assert off < 1e-3, off
    return off


def write(path, model_name, tensors, cases):
    w = gguf.GGUFWriter(path, "golden")
    w.add_string("golden.model", model_name)
    w.add_string("golden.cases", json.dumps(cases))
    for name, t in tensors.items():
        t = np.asarray(t)
        w.add_tensor(name, t.astype(np.int32 if t.dtype.kind in "iu" else np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def make(folder, arch, seed):
    model = Model(os.path.join(folder, f"tiny-{arch}.gguf"))
    off = check_model(model, File(os.path.join(folder, f"golden-{arch}.gguf")))
    rng = np.random.default_rng(seed)
    while True:                                                         # a prompt whose runs leave no close calls
        prompt = rng.integers(3, 288, 70)
        runs = {name: run(model, prompt, 40, policy) for name, policy in dict(none=None, **POLICIES).items()}
        twice, cut = prune_twice(model, prompt)
        if min(r[2] for r in runs.values()) > 0.003 and min(cut, *(r[3] for r in runs.values())) > 1e-3:
            break
    full = model.empty()
    model.extend(full, prompt, np.arange(len(prompt)))
    tensors, cases = {"gen.prompt": prompt}, []
    for name, (text, kept, _, _) in runs.items():
        tensors[f"gen.{name}"] = text
        for i, k in enumerate(kept):
            tensors[f"gen.{name}.keep{i}"] = k
        if name != "none":
            tensors[f"values.{name}"] = POLICIES[name](full)
            cases.append(dict(name=f"gen.{name}", budget=48, keep=32, frozen=2, recent=6, chunk=7, n_new=40,
                              trigger="budget", refreshes=len(kept), seed=str(SEED)))
    for i, k in enumerate(twice):
        tensors[f"twice.tova.keep{i}"] = k
    write(os.path.join(folder, f"baseline-{arch}.gguf"), f"tiny-{arch}.gguf", tensors, cases)
    print(arch, "logits off by", off, "narrowest lead", min(r[2] for r in runs.values()), "narrowest cut",
          min(r[3] for r in runs.values()))


if __name__ == "__main__":
    for i, arch in enumerate(ARCHS):
        make(sys.argv[1], arch, 100 + i)
