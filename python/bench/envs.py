"""Steps per second of POPGym's tasks through Python: ours beside the package's own, in vectors of the same size in the same run.

pip install "popgym[navigation]" .
python python/bench/envs.py [--rows 64] [--seconds 2] [--repeats 3] [--only FAMILY ...]

Ours is `gymnasium.make_vec("elmur/...")` on one thread. The peer is POPGym's environment in Gymnasium's SyncVectorEnv (one
process) and in its AsyncVectorEnv (one process per row; take few rows). All are stepped in NEXT_STEP mode with the same actions,
drawn before. The table has the median of the repeats, which alternate between the three.
"""

import argparse
import importlib
import itertools
import time

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

import elmur  # noqa: F401  registers the environments

FAMILIES = {
    "RepeatFirst": "repeat_first:RepeatFirstMedium",
    "CountRecall": "count_recall:CountRecallMedium",
    "Concentration": "concentration:ConcentrationMedium",
    "Battleship": "battleship:BattleshipMedium",
    "LabyrinthExplore": "labyrinth_explore:LabyrinthExploreMedium",
    "NoisyPositionOnlyPendulum": "noisy_position_only_pendulum:NoisyPositionOnlyPendulumMedium",
}


def steps_per_second(env, actions, seconds):
    """Steps of all rows per second, episodes begun anew included."""
    env.reset(seed=0)
    for action in itertools.islice(itertools.cycle(actions), 20):
        env.step(action)
    begin, steps = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - begin) < seconds:
        for action in actions:
            env.step(action)
        steps += len(actions) * env.num_envs
    return steps / elapsed


def peer(path):
    module, name = path.split(":")
    return getattr(importlib.import_module(f"popgym.envs.{module}"), name)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=list(FAMILIES))
    parser.add_argument("--no-async", action="store_true", help="without one process per row")
    given = parser.parse_args()
    print(f"| family (Medium), {given.rows} rows | ours, steps/s | POPGym, Sync | POPGym, Async | ratio to the better |")
    print("|---|---|---|---|---|")
    for family in given.only:
        make = peer(FAMILIES[family])
        envs = [gymnasium.make_vec(f"elmur/{family}Medium-v0", num_envs=given.rows), SyncVectorEnv([make] * given.rows)]
        if not given.no_async:
            envs.append(AsyncVectorEnv([make] * given.rows))
        envs[0].action_space.seed(0)
        actions = [envs[0].action_space.sample() for _ in range(10)]
        rounds = [[steps_per_second(env, actions, given.seconds) for env in envs] for _ in range(given.repeats)]
        ours, *peers = np.median(rounds, axis=0)
        shown = [f"{x:,.0f}" for x in (ours, *peers)] + ["-"] * (2 - len(peers))
        print(f"| {family} | {' | '.join(shown)} | {ours / max(peers):,.0f}x |", flush=True)
        for env in envs:
            env.close()


if __name__ == "__main__":
    main()
