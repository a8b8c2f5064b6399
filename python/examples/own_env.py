"""Train a memory policy on an environment of your own: show a number, wait thirty steps, ask for it.

python python/examples/own_env.py [folder for the run]
"""

import sys

import gymnasium
import numpy as np
from gymnasium import spaces

import elmur


class Recall(gymnasium.Env):
    """Shows a number in the first step, then nothing, and asks for it in the last."""

    observation_space = spaces.Dict(number=spaces.Discrete(5), asked=spaces.Discrete(2))
    action_space = spaces.Discrete(5)

    def __init__(self, wait: int = 30) -> None:
        self.wait = wait

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.number, self.time = self.np_random.integers(1, 5), 0
        return {"number": self.number, "asked": 0}, {}

    def step(self, action):
        if self.time > self.wait:
            right = action == self.number
            return {"number": 0, "asked": 0}, float(right), True, False, {"is_success": bool(right)}
        self.time += 1
        return {"number": 0, "asked": int(self.time > self.wait)}, 0.0, False, False, {}


class Expert:
    """Remembers the number; answers 0 until it is asked."""

    def reset(self):
        self.number = None

    def __call__(self, seen, info):
        self.number = self.number or seen["number"]
        return self.number if seen["asked"] else 0


def main(out: str) -> elmur.Evaluation:
    data = elmur.collect(Recall, Expert, episodes=300)
    settings = {"model.layers": 1, "train.batches": 300, "train.batch": 64, "eval.target": 1.0, "eval.every": 50}
    run = elmur.train("small", data, out, settings=settings, overwrite=True)
    result = elmur.evaluate(run.policy, Recall, episodes=100)
    print(f"{run.ended} after {run.metrics[-1]['batch']} batches: {result}")
    return result


if __name__ == "__main__":
    assert main(*(sys.argv[1:] or ["out/recall"])).success_rate > 0.99
