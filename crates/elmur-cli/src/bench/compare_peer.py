"""The peer of `elmur bench compare`: the T-Maze model of the paper in PyTorch, written well (fused projections,
scaled_dot_product_attention, no waits for the host), acting also in ONNX Runtime.

Reads one JSON object per line, {"work": "train" | "step", "batch": rows, "threads": threads, "rounds": rounds}, measures
every peer and answers one line {"peer", "ms"} for each, then {"end": true}. A training unit is a batch of 3 segments x
128 rows x 10 tokens with 3 optimizer steps; a step is one environment step of `batch` rows with half a segment in view.
"""

import json
import sys
import time


def say(**fields):
    print(json.dumps(fields), flush=True)


try:
    import torch
    import torch.nn as nn
    import torch.nn.functional as F
except ImportError as error:
    say(missing="torch", error=str(error))
    sys.exit(0)

D, H, B, L, S, M = 128, 2, 128, 10, 3, 2


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(D, D, False), nn.Linear(D, 2 * D, False), nn.Linear(D, D)

    def forward(self, x, memory, bias=None, causal=False):
        b, t, _ = x.shape
        q = self.q(x).view(b, t, H, -1).transpose(1, 2)
        k, v = self.kv(memory).view(b, memory.shape[1], 2, H, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=causal)
        return self.o(y.transpose(1, 2).reshape(b, t, D))


class Ffn(nn.Module):
    """Two shared experts of 512, one matrix of 1024, and two routed experts of 32, of which one is active."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(D, 2, False)
        self.shared_up, self.shared_down = nn.Linear(D, 2048, False), nn.Linear(1024, D, False)
        self.routed_up, self.routed_down = nn.Linear(D, 128, False), nn.Linear(64, D, False)
        self.norm = nn.LayerNorm(D)

    def forward(self, x):
        chosen = F.one_hot(self.router(x).argmax(-1), 2).to(x.dtype)
        g, u = self.shared_up(x).chunk(2, -1)
        y = self.shared_down(F.silu(g) * u)
        g, u = self.routed_up(x).chunk(2, -1)
        e = (F.silu(g) * u).view(*x.shape[:2], 2, 32) * chosen[..., None]
        return self.norm(x + y + self.routed_down(e.flatten(2)))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attend, self.read, self.write = Attention(), Attention(), Attention()
        self.n1, self.n2, self.n3 = (nn.LayerNorm(D) for _ in range(3))
        self.token_ffn, self.memory_ffn = Ffn(), Ffn()
        self.table = nn.Embedding(2047, H)

    def bias(self, q, k):
        return self.table((q[:, :, None] - k[:, None, :]).clamp(-1023, 1023) + 1023).permute(0, 3, 1, 2)

    def forward(self, x, m, p, t, newest):
        x = self.n1(x + self.attend(x, x, causal=True))
        x = self.token_ffn(self.n2(x + self.read(x, m, self.bias(t, p))))
        u = self.memory_ffn(self.n3(m + self.write(m, x, self.bias(p, t))))
        slot = torch.arange(M)[None] == p.argmin(1, keepdim=True)
        alpha = torch.where(p < 0, 1.0, 0.05) * slot
        return x, m + (u - m) * alpha[..., None], torch.where(slot, newest, p)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = nn.Linear(4, D), nn.Linear(D, 4)
        self.layers = nn.ModuleList([Layer() for _ in range(2)])

    def forward(self, x, memory, anchors, t, newest):
        x, ms, ps = self.encoder(x), [], []
        for layer, m, p in zip(self.layers, memory, anchors):
            x, m, p = layer(x, m, p, t, newest)
            ms.append(m)
            ps.append(p)
        return self.head(x), ms, ps


def median(run, rounds):
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2] * 1e3


def training(compiled):
    """A function that trains one batch."""
    net = Policy()
    opt = torch.optim.AdamW(net.parameters(), lr=2e-4, fused=True)
    f = torch.compile(net) if compiled else net
    xs, ys = torch.randn(S, B, L, 4), torch.randint(0, 4, (S, B * L))

    def batch():
        ms = [torch.randn(B, M, D) * 1e-3 for _ in range(2)]
        ps = [torch.full((B, M), -1) for _ in range(2)]
        for s in range(S):
            t = torch.arange(s * L, s * L + L).expand(B, L)
            y, after, ps = f(xs[s], [m.detach() for m in ms], ps, t, torch.full((1, 1), s * L + L - 1))
            loss = F.cross_entropy(y.reshape(-1, 4), ys[s], label_smoothing=0.16)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 5.0)
            opt.step()
            ms = after

    for _ in range(3):
        batch()
    return batch


def step_inputs(b, tokens=L // 2):
    return (torch.randn(b, tokens, 4), [torch.randn(b, M, D)] * 2, [torch.zeros(b, M, dtype=torch.int64)] * 2,
            torch.arange(tokens).expand(b, tokens).contiguous(), torch.full((1, 1), 9))


def torch_step(net, b):
    """A function that takes one step."""
    args = step_inputs(b)

    def step():
        with torch.no_grad():
            net(*args)

    for _ in range(10):
        step()
    return step


def onnx_step(net, b, threads):
    """A function that takes one step in ONNX Runtime."""
    import os
    import tempfile

    import onnxruntime as ort

    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x, m0, m1, p0, p1, t, newest):
            y, ms, ps = self.net(x, [m0, m1], [p0, p1], t, newest)
            return (y, *ms, *ps)

    x, ms, ps, t, newest = step_inputs(b)
    args = (x, *ms, *ps, t, newest)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "step.onnx")
        torch.onnx.export(Flat(), args, path, input_names=list("xabcdtn"), dynamo=False)
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    feed = {i.name: a.numpy() for i, a in zip(session.get_inputs(), args)}
    for _ in range(20):
        session.run(None, feed)
    return lambda: session.run(None, feed)


def main():
    torch.manual_seed(0)
    net = Policy().eval()
    # What was built once is measured in every round; what cannot be built is named once and left out.
    built, failed = {}, set()

    def measure(peer, key, build, rounds):
        if key in failed:
            return
        try:
            if key not in built:
                built[key] = build()
            say(peer=peer, ms=median(built[key], rounds))
        except Exception as error:
            failed.add(key)
            say(peer=peer, failed=f"{type(error).__name__}: {error}".splitlines()[0][:200])

    say(ready=True, torch=torch.__version__)
    for line in sys.stdin:
        task = json.loads(line)
        threads, rounds = task["threads"], task["rounds"]
        torch.set_num_threads(threads)
        if task["work"] == "train":
            measure("torch", ("train", threads), lambda: training(False), rounds)
            measure("torch.compile", ("compiled", threads), lambda: training(True), rounds)
        else:
            b = task["batch"]
            measure("torch", ("step", b, threads), lambda: torch_step(net, b), rounds)
            measure("onnxruntime", ("onnx", b, threads), lambda: onnx_step(net, b, threads), rounds)
        say(end=True)


main()
