"""Whole stories: an expert in Python, demonstrations, training, evaluation."""

import gymnasium

import elmur


def balance(seen, info):
    """An expert that holds CartPole for all of its 500 steps."""
    position, speed, angle, turn = seen
    return int(angle + 0.4 * turn + 0.03 * position + 0.1 * speed > 0)


def test_cartpole_is_learnt_from_an_expert_in_python(tmp_path):
    env = gymnasium.make_vec("CartPole-v1", num_envs=4)
    data = elmur.collect(env, balance, episodes=24, noise=0.25)
    settings = {"policy": "bc-lstm", "train.batches": 150, "eval.every": 75}
    run = elmur.train("small", data, tmp_path / "run", settings=settings, progress=False)
    result = elmur.evaluate(run.policy, "CartPole-v1", episodes=20)
    assert result.mean_return == 500 and (result.lengths == 500).all(), result
    # A Gymnasium user's own loop.
    env, policy = gymnasium.make("CartPole-v1"), run.policy
    seen, _ = env.reset(seed=12)
    total, start, over = 0.0, True, False
    while not over:
        seen, reward, terminated, truncated, _ = env.step(policy.act(seen, start))
        total, start, over = total + reward, False, terminated or truncated
    assert total == 500
