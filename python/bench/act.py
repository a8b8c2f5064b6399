"""What a call of `Policy.act` costs beside the same step in Rust.

python python/bench/act.py RUN [--rows 1] [--calls 20000]

Prints microseconds per call: the session's step in Rust, in the same process, and what Python sees of it.
"""

import argparse
import time

import numpy as np
from gymnasium.vector.utils import batch_space

import elmur


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--calls", type=int, default=20_000)
    given = parser.parse_args()
    policy = elmur.Policy.load(given.run, rows=given.rows)
    seen = batch_space(policy.observation_space, given.rows).sample()
    start, out = np.zeros(given.rows, bool), policy.act(seen)
    ways = {
        "act(obs)": lambda: policy.act(seen),
        "act(obs, episode_start)": lambda: policy.act(seen, start),
        "act(obs, episode_start, out=out)": lambda: policy.act(seen, start, out=out),
        "predict(obs, state)": lambda state=policy.predict(seen)[1]: policy.predict(seen, state),
        "snapshot()": lambda: policy.snapshot(),
    }
    if isinstance(seen, np.ndarray) and seen.dtype == np.float32:
        ways["act(obs as float64)"] = lambda wide=seen.astype(np.float64): policy.act(wide)
    calls = given.calls // 5
    inside = [1e6 * policy._seconds_in_rust(seen, calls) / calls for _ in range(5)]
    print(f"in Rust: {np.median(inside):.2f} us (best {min(inside):.2f})")
    for name, call in ways.items():
        rounds = []
        for _ in range(5):
            begin = time.perf_counter()
            for _ in range(given.calls // 5):
                call()
            rounds.append((time.perf_counter() - begin) / (given.calls // 5))
        print(f"{name}: {1e6 * np.median(rounds):.2f} us (best {1e6 * min(rounds):.2f})")


if __name__ == "__main__":
    main()
