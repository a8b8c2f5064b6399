"""A memory task in Python, with an expert: a number is shown, nothing follows for a while, then the number is asked for.

    elmur collect python:examples/recall.py:Recall --set expert=examples/recall.py:Expert --out recall.elmur
    elmur train small --env python:examples/recall.py:Recall --data recall.elmur --out out/recall
    elmur eval out/recall --env python:examples/recall.py:Recall
"""
import gymnasium
from gymnasium.spaces import Discrete


class Recall(gymnasium.Env):
    """Observations: the number 0..3, 4 while waiting, 5 when asked. Actions: the number, which counts when asked."""

    def __init__(self, numbers=4, wait=30):
        self.numbers, self.wait = numbers, wait
        self.observation_space, self.action_space = Discrete(numbers + 2), Discrete(numbers)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.number, self.time = int(self.np_random.integers(self.numbers)), 0
        return self.number, {"uses_action": False}

    def step(self, action):
        self.time += 1
        if self.time <= self.wait:
            return self.numbers, 0.0, False, False, {"uses_action": False}
        if self.time == self.wait + 1:
            return self.numbers + 1, 0.0, False, False, {}
        right = bool(action == self.number)
        return self.numbers, float(right), True, False, {"success": right}


class Expert:
    """Remembers what was shown. An expert may also be a function(observation, info) that reads the answer from info."""

    def reset(self):
        self.shown = None

    def __call__(self, observation, info):
        self.shown = int(observation) if self.shown is None else self.shown
        return self.shown
