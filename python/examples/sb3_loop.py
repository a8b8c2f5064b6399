"""Put a policy into a loop in the manner of Stable-Baselines3: `predict` with an explicit state.

python python/examples/sb3_loop.py [folder for the run]

The same loop evaluates a recurrent policy of Stable-Baselines3: `model.predict(obs, state, episode_start, deterministic)`.
"""

import sys

import gymnasium
import numpy as np

import elmur


def evaluate_policy(model, env, episodes: int) -> list[float]:
    """Returns of episodes in a vector environment (NEXT_STEP), whatever the model is."""
    rows = env.num_envs
    obs, _ = env.reset(seed=1000)
    state, start = None, elmur.episode_starts(env)
    totals, returns = np.zeros(rows), []
    while len(returns) < episodes:
        actions, state = model.predict(obs, state=state, episode_start=start, deterministic=True)
        obs, rewards, terminated, truncated, _ = env.step(actions)
        start = elmur.episode_starts(env, terminated, truncated)
        totals += rewards
        for row in np.flatnonzero(terminated | truncated):
            returns.append(float(totals[row]))
            totals[row] = 0.0
    return returns


def main(out: str) -> float:
    env_id = "elmur/RepeatFirstEasy-v0"
    data = elmur.collect(env_id, episodes=300)
    settings = {"model.layers": 1, "train.batches": 200, "train.batch": 64, "eval.every": 50, "eval.target": 1.0}
    run = elmur.train("small", data, out, settings=settings, overwrite=True)
    returns = evaluate_policy(run.policy, gymnasium.make_vec(env_id, num_envs=8), episodes=32)
    print(f"mean return {np.mean(returns):.3f} of at most 1")
    return float(np.mean(returns))


if __name__ == "__main__":
    assert main(*(sys.argv[1:] or ["out/sb3-loop"])) > 0.9
