"""A training batch of the robot policy in PyTorch, the peer of `elmur bench train --preset mikasa-RememberColor3`:
the same encoder and layers on random pictures that are on the device already, without changes of pictures.

python runs/vision_peer.py [--device cuda] [--threads N] [--rounds N] [--compiled 0|1] [--bf16 0|1] [--channels-last 0|1]

Without the last three it measures all eight kinds, half of which are compiled first.
"""

import argparse
import json
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--device", default="cpu")
parser.add_argument("--threads", type=int, default=0)
parser.add_argument("--rounds", type=int, default=5)
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--segments", type=int, default=2)
parser.add_argument("--steps", type=int, default=20)
for kind in ("--compiled", "--bf16", "--channels-last"):
    parser.add_argument(kind, type=int, choices=(0, 1), help="only with (1) or without it (0)")
args = parser.parse_args()
if args.threads:
    torch.set_num_threads(args.threads)
gpu = args.device != "cpu"
if gpu:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True

D, HEADS, LAYERS, SLOTS, WRITTEN, SIZE = 128, 4, 2, 32, 8, 64
B, S, L = args.batch, args.segments, args.steps


def norm(channels):
    return nn.GroupNorm(channels // 8, channels)


class Block(nn.Module):
    """relu(norm(conv(relu(norm(conv/2(x))))) + conv1x1/2(x))."""

    def __init__(self, before, after):
        super().__init__()
        self.a, self.b = nn.Conv2d(before, after, 3, 2, 1, bias=False), nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.skip, self.na, self.nb = nn.Conv2d(before, after, 1, 2, bias=False), norm(after), norm(after)

    def forward(self, x):
        return F.relu(self.nb(self.b(F.relu(self.na(self.a(x))))) + self.skip(x))


class Eyes(nn.Module):
    """Both cameras with the same weights, and a few features of every place."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 32, 5, 2, 2, bias=False), norm(32)
        self.blocks = nn.Sequential(Block(32, 64), Block(64, 64))
        self.grid, self.out = nn.Linear(64, 16), nn.Linear(2 * (SIZE // 8) ** 2 * 16, D)

    def forward(self, images):
        rows, steps = images.shape[:2]
        x = images.flatten(0, 1).unflatten(1, (2, 3)).flatten(0, 1).to(self.stem.weight.dtype) / 255
        if channels_last:
            x = x.to(memory_format=torch.channels_last)
        x = self.blocks(F.relu(self.norm(self.stem(x))))
        x = F.relu(self.grid(x.flatten(2).transpose(1, 2)))
        return self.out(x.reshape(rows, steps, -1))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(D, D, False), nn.Linear(D, 2 * D, False), nn.Linear(D, D)

    def forward(self, x, seen, bias=None, causal=False):
        b, t, _ = x.shape
        q = self.q(x).view(b, t, HEADS, -1).transpose(1, 2)
        k, v = self.kv(seen).view(b, seen.shape[1], 2, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=causal)
        return self.o(y.transpose(1, 2).reshape(b, t, D))


class Ffn(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(D, 512, False), nn.Linear(256, D, False)

    def forward(self, x):
        g, u = self.up(x).chunk(2, -1)
        return self.down(F.silu(g) * u)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attend, self.read, self.write = Attention(), Attention(), Attention()
        self.norms = nn.ModuleList([nn.LayerNorm(D) for _ in range(5)])
        self.token_ffn, self.memory_ffn = Ffn(), Ffn()
        self.table = nn.Embedding(2047, HEADS)

    def bias(self, q, k):
        return self.table((q[:, :, None] - k[:, None, :]).clamp(-1023, 1023) + 1023).permute(0, 3, 1, 2)

    def forward(self, x, m, p, t):
        n = self.norms
        x = x + self.attend(n[0](x), n[0](x), causal=True)
        x = x + self.read(n[1](x), m, self.bias(t, p).to(x.dtype))
        x = x + self.token_ffn(n[2](x))
        # The slots that were written least recently.
        slots = p.topk(WRITTEN, 1, largest=False).indices
        old = m.gather(1, slots[..., None].expand(-1, -1, D))
        at = p.gather(1, slots)
        u = old + self.write(n[3](old), x, self.bias(at, t).to(x.dtype))
        u = u + self.memory_ffn(n[4](u))
        new = torch.where((at < 0)[..., None], u, torch.lerp(old, u.to(old.dtype), 0.5))
        m = m.scatter(1, slots[..., None].expand(-1, -1, D), new.to(m.dtype))
        return x, m, p.scatter(1, slots, t[:, -1:].expand(-1, WRITTEN))


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.eyes, self.norm, self.head = Eyes(), nn.LayerNorm(D), nn.Linear(D, 8)
        self.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])
        self.memory = nn.Parameter(torch.randn(LAYERS, SLOTS, D) * 0.1)

    def forward(self, images, targets, weights):
        ms = [m.expand(B, -1, -1) for m in self.memory]
        ps = [torch.full((B, SLOTS), -1, device=images.device) for _ in ms]
        loss = 0.0
        for s in range(S):
            t = torch.arange(s * L, s * L + L, device=images.device).expand(B, L)
            x = self.eyes(images[:, s * L:s * L + L])
            for i, layer in enumerate(self.layers):
                x, ms[i], ps[i] = layer(x, ms[i], ps[i], t)
            error = (torch.tanh(self.head(self.norm(x))).float() - targets[:, s * L:s * L + L]).square().mean(-1)
            loss = loss + (error * weights[:, s * L:s * L + L]).sum()
        return loss / weights.sum()


def measure(compiled, bf16):
    net = Policy().to(args.device)
    if channels_last:
        net = net.to(memory_format=torch.channels_last)
    opt = torch.optim.AdamW(net.parameters(), lr=5e-4, weight_decay=0.02, fused=True)
    run = torch.compile(net) if compiled else net
    images = torch.randint(0, 256, (B, S * L, 6, SIZE, SIZE), dtype=torch.uint8, device=args.device)
    targets, weights = torch.rand(B, S * L, 8, device=args.device), torch.rand(B, S * L, device=args.device)
    times = []
    for i in range(args.rounds + 3):
        start = time.perf_counter()
        opt.zero_grad(set_to_none=True)
        with torch.autocast(args.device, torch.bfloat16, enabled=bf16):
            loss = run(images, targets, weights)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        if gpu:
            torch.cuda.synchronize()
        if i >= 3:
            times.append(1e3 * (time.perf_counter() - start))
    return sorted(times)


def kinds(only):
    return (False, True) if only is None else (bool(only),)


for channels_last in kinds(args.channels_last):
    for compiled in kinds(args.compiled):
        for bf16 in kinds(args.bf16):
            try:
                times = measure(compiled, bf16)
            except Exception as error:  # A compiler may be missing.
                print(json.dumps({"compiled": compiled, "bf16": bf16, "error": str(error)[:200]}), flush=True)
                continue
            print(json.dumps({
                "work": "training batch of the robot policy", "peer": f"torch {torch.__version__}",
                "channels_last": channels_last, "compiled": compiled, "bf16": bf16, "batch": B, "steps": S * L,
                "threads": torch.get_num_threads(), "ms": round(times[len(times) // 2], 2), "best_ms": round(times[0], 2),
            }), flush=True)
