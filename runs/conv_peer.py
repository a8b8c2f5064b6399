"""The convolutions of the published image encoder in PyTorch, as `elmur bench conv` measures them: python runs/conv_peer.py [--threads N]."""

import argparse
import json
import time

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--images", type=int, default=1280)
parser.add_argument("--channels", type=int, default=6)
parser.add_argument("--size", type=int, default=128)
parser.add_argument("--threads", type=int, default=0)
parser.add_argument("--rounds", type=int, default=5)
parser.add_argument("--device", default="cpu")
args = parser.parse_args()
if args.threads:
    torch.set_num_threads(args.threads)

for layout in (torch.contiguous_format, torch.channels_last):
    net = torch.nn.Sequential(
        torch.nn.Conv2d(args.channels, 32, 8, 4), torch.nn.ReLU(),
        torch.nn.Conv2d(32, 64, 4, 2), torch.nn.ReLU(),
        torch.nn.Conv2d(64, 64, 3, 1), torch.nn.ReLU(),
    ).to(args.device, memory_format=layout)
    images = torch.rand(args.images, args.channels, args.size, args.size, device=args.device)
    images = images.to(memory_format=layout)
    times = []
    for round in range(args.rounds + 2):
        start = time.perf_counter()
        net.zero_grad(set_to_none=True)
        net(images).sum().backward()
        if args.device != "cpu":
            torch.cuda.synchronize()
        if round >= 2:
            times.append(1e3 * (time.perf_counter() - start))
    times.sort()
    print(json.dumps({
        "work": "convolutions, forward and backward", "peer": f"torch {torch.__version__}", "layout": str(layout),
        "images": args.images, "threads": torch.get_num_threads(), "ms": times[len(times) // 2], "best_ms": times[0],
    }))
