#!/usr/bin/env python3
"""PyTorch peers of the baselines at T-Maze size, as a PyTorch user would write them.

DT and RATE: scaled_dot_product_attention with the relative position term as its additive mask; BC-LSTM: nn.LSTM;
DMamba: the reference scan of the Mamba paper's code (a loop over tokens). Sizes are those of `elmur bench train --policy X`.
Prints one JSON object per line: {"peer", "policy", "device", "work", "ms"}.
Work units: train = one batch with one optimizer step; step = one environment step of one episode.
"""
import argparse, json, math, time
import torch
import torch.nn as nn
import torch.nn.functional as F

OBS, ACT, D = 4, 4, 64


class Tokens(nn.Module):
    """Return, observation, action of every step, side by side in time."""

    def __init__(self):
        super().__init__()
        self.r, self.o, self.a = nn.Linear(1, D), nn.Linear(OBS, D), nn.Embedding(ACT + 1, D)

    def forward(self, r, o, a):
        x = torch.stack([self.r(r), self.o(o), torch.tanh(self.a(a))], 2)
        return x.flatten(1, 2)


def encodings(distances):
    f = 10000 ** (-torch.arange(0, D, 2, device=distances.device) / D)
    x = distances[:, None].float() * f
    return torch.cat([x.sin(), x.cos()], -1)


class RelativeLayer(nn.Module):
    def __init__(self, heads, width, inner, drop, drop_attention):
        super().__init__()
        self.h, self.w = heads, width
        self.qkv, self.r = nn.Linear(D, 3 * heads * width, False), nn.Linear(D, heads * width, False)
        self.o, self.n1 = nn.Linear(heads * width, D, False), nn.LayerNorm(D)
        self.ffn = inner and nn.Sequential(nn.Linear(D, inner), nn.ReLU(), nn.Dropout(drop), nn.Linear(inner, D), nn.Dropout(drop))
        if inner:
            self.n2 = nn.LayerNorm(D)
        self.drop, self.drop_attention = nn.Dropout(drop), drop_attention

    def forward(self, x, pe, index, mask, u, w):
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.h, self.w).permute(2, 0, 3, 1, 4)
        r = self.r(pe).view(-1, self.h, self.w).permute(1, 2, 0)
        # Row i of the position term is read at the distance of every key.
        position = torch.matmul(q + w[:, None], r).gather(-1, index.expand(b, self.h, t, t))
        bias = (position / math.sqrt(self.w)).masked_fill(mask, float("-inf"))
        y = F.scaled_dot_product_attention(q + u[:, None], k, v, attn_mask=bias.to(q.dtype),
                                           dropout_p=self.drop_attention if self.training else 0.0)
        x = self.n1(x + self.drop(self.o(y.transpose(1, 2).reshape(b, t, -1))))
        return self.n2(x + self.ffn(x)) if self.ffn else x


class Dt(nn.Module):
    batch, steps, segments = 64, 30, 1

    def __init__(self, heads=8, width=32, layers=8, inner=64, drop=0.2, drop_attention=0.1):
        super().__init__()
        self.tokens, self.head, self.drop = Tokens(), nn.Linear(D, ACT, False), nn.Dropout(drop)
        self.u, self.w = nn.Parameter(torch.randn(heads, width) * 0.2), nn.Parameter(torch.randn(heads, width) * 0.2)
        self.layers = nn.ModuleList([RelativeLayer(heads, width, inner, drop, drop_attention) for _ in range(layers)])

    def forward(self, r, o, a):
        x = self.drop(self.tokens(r, o, a))
        t = x.shape[1]
        at = torch.arange(t, device=x.device)
        index, mask = (at[:, None] - at).clamp(min=0), at[:, None] < at
        pe = self.drop(encodings(at))
        for layer in self.layers:
            x = layer(x, pe, index, mask, self.u, self.w)
        return self.head(self.drop(x)[:, 1::3])

    def loss(self, r, o, a, y):
        return F.cross_entropy(self(r, o, a).float().reshape(-1, ACT), y.reshape(-1))


class Rate(nn.Module):
    batch, steps, segments, m = 128, 10, 3, 15

    def __init__(self, heads=4, width=32, layers=10, drop=0.2):
        super().__init__()
        self.tokens, self.head, self.drop = Tokens(), nn.Linear(D, ACT, False), nn.Dropout(drop)
        self.u, self.w = nn.Parameter(torch.randn(heads, width) * 0.2), nn.Parameter(torch.randn(heads, width) * 0.2)
        self.layers = nn.ModuleList([RelativeLayer(heads, width, 0, drop, 0.0) for _ in range(layers)])
        self.memory, self.valve = nn.Parameter(torch.randn(self.m, D)), nn.MultiheadAttention(D, 2, batch_first=True)

    def segment(self, memory, r, o, a):
        m, x = self.m, self.tokens(r, o, a)
        x = self.drop(torch.cat([memory, x, memory], 1))
        t = x.shape[1]
        at = torch.arange(t, device=x.device)
        mask = at[:, None] < at
        mask = torch.where((at[:, None] < m), at[None] >= m, mask) & ~(at[:, None] >= t - m)
        distance = at[:, None] - at
        pe = self.drop(encodings(torch.arange(-t + 1, t, device=x.device)))
        for layer in self.layers:
            x = layer(x, pe, distance + t - 1, mask, self.u, self.w)
        x = self.drop(x)
        out = F.relu(x[:, -m:])
        return self.head(x[:, m:-m][:, 1::3]), self.valve(memory, out, out, need_weights=False)[0]

    def forward(self, memory, r, o, a):
        return self.segment(memory, r, o, a)

    def loss(self, r, o, a, y):
        memory, n, parts = self.memory.expand(o.shape[0], -1, -1), self.steps, []
        for s in range(self.segments):
            part = slice(s * n, (s + 1) * n)
            logits, memory = self.segment(memory, r[:, part], o[:, part], a[:, part])
            parts.append(logits)
        return F.cross_entropy(torch.cat(parts, 1).float().reshape(-1, ACT), y.reshape(-1))


class Lstm(nn.Module):
    batch, steps, segments = 64, 30, 1

    def __init__(self):
        super().__init__()
        self.encoder, self.lstm, self.head = nn.Linear(OBS, D), nn.LSTM(D, 128, batch_first=True), nn.Linear(128, ACT, False)

    def forward(self, o, state=None):
        h, state = self.lstm(self.encoder(o), state)
        return self.head(h), state

    def loss(self, r, o, a, y):
        return F.cross_entropy(self(o)[0].float().reshape(-1, ACT), y.reshape(-1))


class Mixer(nn.Module):
    def __init__(self, n=16, w=4, r=4):
        super().__init__()
        e = 2 * D
        self.e, self.n, self.r = e, n, r
        self.into, self.conv = nn.Linear(D, 2 * e, False), nn.Conv1d(e, e, w, groups=e, padding=w - 1)
        self.x, self.dt, self.out = nn.Linear(e, r + 2 * n, False), nn.Linear(r, e), nn.Linear(e, D, False)
        self.a, self.d = nn.Parameter(torch.log(torch.arange(1.0, n + 1)).repeat(e, 1)), nn.Parameter(torch.ones(e))

    def forward(self, x):
        t = x.shape[1]
        p, z = self.into(x).chunk(2, -1)
        u = F.silu(self.conv(p.transpose(1, 2))[..., :t].transpose(1, 2))
        s, b, c = self.x(u).split([self.r, self.n, self.n], -1)
        delta, a = F.softplus(self.dt(s)), -torch.exp(self.a)
        decay = torch.exp(delta[..., None] * a)
        into = (delta * u)[..., None] * b[:, :, None]
        h, ys = x.new_zeros(x.shape[0], self.e, self.n), []
        for i in range(t):
            h = decay[:, i] * h + into[:, i]
            ys.append((h * c[:, i, None]).sum(-1))
        y = torch.stack(ys, 1) + u * self.d
        return self.out(y * F.silu(z))

    def step(self, x, window, h):
        p, z = self.into(x).chunk(2, -1)
        window = torch.cat([window[..., 1:], p[..., None]], -1)
        u = F.silu((window * self.conv.weight[:, 0]).sum(-1) + self.conv.bias)
        s, b, c = self.x(u).split([self.r, self.n, self.n], -1)
        delta = F.softplus(self.dt(s))
        h = torch.exp(delta[..., None] * -torch.exp(self.a)) * h + (delta * u)[..., None] * b[:, None]
        y = (h * c[:, None]).sum(-1) + u * self.d
        return self.out(y * F.silu(z)), window, h


class Mamba(nn.Module):
    batch, steps, segments = 128, 30, 1

    def __init__(self, layers=2, drop=0.2):
        super().__init__()
        self.tokens, self.head, self.drop = Tokens(), nn.Linear(D, ACT, False), nn.Dropout(drop)
        self.mixers = nn.ModuleList([Mixer() for _ in range(layers)])
        self.ffns = nn.ModuleList([nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D), nn.Dropout(drop)) for _ in range(layers)])
        self.n1, self.n2 = (nn.ModuleList([nn.LayerNorm(D) for _ in range(layers)]) for _ in range(2))
        self.last = nn.LayerNorm(D)

    def forward(self, r, o, a):
        x = self.drop(self.tokens(r, o, a))
        for mixer, ffn, n1, n2 in zip(self.mixers, self.ffns, self.n1, self.n2):
            x = x + mixer(n1(x))
            x = x + ffn(n2(x))
        return self.head(self.last(x)[:, 1::3])

    def token(self, x, states):
        for i, (mixer, ffn, n1, n2) in enumerate(zip(self.mixers, self.ffns, self.n1, self.n2)):
            y, *states[i] = mixer.step(n1(x), *states[i])
            x = x + y
            x = x + ffn(n2(x))
        return x

    def act(self, r, o, a, states):
        self.token(self.tokens.r(r), states)
        y = self.head(self.last(self.token(self.tokens.o(o), states)))
        self.token(torch.tanh(self.tokens.a(a)), states)
        return y

    def loss(self, r, o, a, y):
        return F.cross_entropy(self(r, o, a).float().reshape(-1, ACT), y.reshape(-1))


def median(run, rounds, sync):
    times = []
    for _ in range(rounds):
        sync(); t = time.perf_counter(); run(); sync()
        times.append(time.perf_counter() - t)
    return sorted(times)[len(times) // 2]


def train(kind, device, compiled=False, bf16=False, graph=False):
    net = kind().to(device)
    opt = torch.optim.AdamW(net.parameters(), lr=3e-4, fused=True, capturable=device == "cuda")
    b, t = kind.batch, kind.steps * kind.segments
    r, o = torch.rand(b, t, 1, device=device), torch.randn(b, t, OBS, device=device)
    a, y = (torch.randint(0, ACT, (b, t), device=device) for _ in range(2))
    loss_of = torch.compile(net.loss) if compiled else net.loss

    def batch():
        with torch.autocast(device, torch.bfloat16, enabled=bf16):
            loss = loss_of(r, o, a, y)
        opt.zero_grad(set_to_none=True); loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0); opt.step()

    sync = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    for _ in range(3):
        batch()
    if not graph:
        return median(batch, 7 if device == "cpu" else 20, sync)
    side = torch.cuda.Stream(); side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            batch()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph(); opt.zero_grad(set_to_none=True)
    with torch.cuda.graph(captured):
        batch()
    return median(captured.replay, 100, sync)


def step(name, device, compiled):
    net = KINDS[name]().to(device).eval()
    one = lambda n: (torch.rand(1, n, 1, device=device), torch.randn(1, n, OBS, device=device), torch.randint(0, ACT, (1, n), device=device))
    if name == "dt":  # the whole window again, as it slides
        args = one(30)
        f = net
    elif name == "rate":  # the mean window of a segment of 10 steps
        args = (torch.randn(1, 15, D, device=device), *one(5))
        f = net
    elif name == "bc-lstm":
        args = (torch.randn(1, 1, OBS, device=device), tuple(torch.zeros(1, 1, 128, device=device) for _ in range(2)))
        f = net
    else:
        states = [[torch.zeros(1, 2 * D, 4, device=device), torch.zeros(1, 2 * D, 16, device=device)] for _ in range(2)]
        r, o, a = one(1)
        args = (r[:, 0], o[:, 0], a[:, 0], states)
        f = net.act
    f = torch.compile(f) if compiled else f
    sync = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    with torch.no_grad():
        for _ in range(10):
            f(*args)
        return median(lambda: f(*args), 100, sync)


KINDS = {"dt": Dt, "rate": Rate, "bc-lstm": Lstm, "dmamba": Mamba}


def report(peer, policy, device, work, run):
    try:
        ms = round(run() * 1e3, 4)
    except Exception as error:  # a row that does not exist is said, not hidden
        print(json.dumps({"peer": peer, "policy": policy, "device": device, "work": work, "error": str(error)[:200]}), flush=True)
        return
    print(json.dumps({"peer": peer, "policy": policy, "device": device, "work": work, "ms": ms}), flush=True)


if __name__ == "__main__":
    cli = argparse.ArgumentParser()
    cli.add_argument("--device", default="cpu")
    cli.add_argument("--policy", action="append", choices=list(KINDS))
    cli.add_argument("--threads", type=int, default=0)
    cli.add_argument("--quick", action="store_true", help="leave out torch.compile")
    args = cli.parse_args()
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    if args.threads:
        torch.set_num_threads(args.threads)
    for name in args.policy or KINDS:
        kind, device = KINDS[name], args.device
        report("torch", name, device, "train", lambda: train(kind, device))
        if not args.quick:
            report("torch.compile", name, device, "train", lambda: train(kind, device, compiled=True))
        if device == "cuda":
            report("torch+graph tf32", name, device, "train", lambda: train(kind, device, graph=True))
            report("torch+graph bf16", name, device, "train", lambda: train(kind, device, bf16=True, graph=True))
            if not args.quick:
                report("torch.compile+graph bf16", name, device, "train", lambda: train(kind, device, True, True, True))
        else:
            torch.set_num_threads(1)
            report("torch", name, device, "step B=1", lambda: step(name, device, False))
            if not args.quick:
                report("torch.compile", name, device, "step B=1", lambda: step(name, device, True))
            torch.set_num_threads(args.threads or torch.get_num_threads())
