"""Train on a recording of LeRobot (versions 2.1 and 3, pictures and videos included) and act as on the robot.

python python/examples/train_lerobot.py DATASET [folder for the run] [batches]
"""

import sys

import numpy as np

import elmur


def main(dataset: str, out: str = "out/lerobot", batches: str = "500") -> float:
    data = elmur.Dataset.from_lerobot(dataset)
    print(data, data.observation_space, data.action_space)
    settings = {"model.segment_length": 10, "train.batches": int(batches), "train.batch": 32}
    run = elmur.train("small", data, out, settings=settings, overwrite=True)
    print(f"mean squared error of held-out episodes: {run.metrics[-1]['score']:.4f}")

    # What the loop on the robot does, here with what was recorded: reset, then one observation at a time.
    policy, episode = run.policy, data[0]
    policy.reset()
    chosen = []
    for step in range(len(episode["actions"])):
        observation = {key: array[step] for key, array in episode["observations"].items()}
        chosen.append(policy.select_action(observation))
    error = float(np.mean((np.stack(chosen) - episode["actions"]) ** 2))
    print(f"mean squared error along the first episode: {error:.4f}")
    return error


if __name__ == "__main__":
    main(*sys.argv[1:])
