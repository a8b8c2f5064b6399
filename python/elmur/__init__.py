"""Policies with external layer memory (ELMUR): load, act, collect, train and evaluate from Python.

    import elmur

    data = elmur.collect("elmur/RepeatFirstEasy-v0", episodes=300)
    run = elmur.train("small", data, "out/repeat-first", settings={"train.batches": 200})
    print(elmur.evaluate(run.policy, "elmur/RepeatFirstEasy-v0", episodes=50))

Importing the package registers all environments of the library in Gymnasium as ``elmur/NAME-v0``.
"""

from importlib.util import find_spec

from elmur._elmur import Dataset, ElmurError, Policy, Snapshot, __version__
from elmur.collecting import collect
from elmur.evaluating import Evaluation, evaluate
from elmur.stream import episode_starts
from elmur.training import Run, config, policies, presets, train

if find_spec("gymnasium") is not None:
    from elmur.envs import register

    register()

__all__ = [
    "Dataset",
    "ElmurError",
    "Evaluation",
    "Policy",
    "Run",
    "Snapshot",
    "__version__",
    "collect",
    "config",
    "episode_starts",
    "evaluate",
    "policies",
    "presets",
    "train",
]
