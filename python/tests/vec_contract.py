"""What a vector environment of Gymnasium must do, checked against SyncVectorEnv of the same single environment."""

import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space


def same(a, b):
    """Whether two values or infos are equal in everything: structure, types, shapes and numbers."""
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b))
    a, b = np.asarray(a), np.asarray(b)
    if a.dtype == object:
        pairs = [(x, y) for x, y in zip(a.flat, b.flat) if x is not None or y is not None]
        return a.shape == b.shape and b.dtype == object and all(same(x, y) for x, y in pairs)
    return a.shape == b.shape and a.dtype == b.dtype and np.array_equal(a, b)


def shares(a, b):
    """Whether two values have memory in common."""
    if isinstance(a, dict):
        return any(shares(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return any(shares(x, y) for x, y in zip(a, b))
    return np.shares_memory(a, b)


def check_spaces(env, ref, num_envs, mode):
    assert isinstance(env, VectorEnv) and env.num_envs == num_envs
    assert env.metadata["autoreset_mode"] is mode, "the member of the enum, not its name"
    assert env.single_observation_space == ref.single_observation_space
    assert env.single_action_space == ref.single_action_space
    assert env.observation_space == batch_space(env.single_observation_space, num_envs)
    assert env.action_space == batch_space(env.single_action_space, num_envs)


def check_infos(infos, done, mode):
    if mode is not AutoresetMode.SAME_STEP:
        assert "final_obs" not in infos
        return
    assert ("final_obs" in infos) == bool(done.any())
    if done.any():
        assert same(infos["_final_obs"], done) and infos["final_obs"].dtype == object


def check_reset_masks(env, num_envs):
    wrong = (np.zeros(num_envs, bool), np.ones(num_envs + 1, bool), [True] * num_envs, np.ones(num_envs, int))
    for mask in wrong:
        try:
            env.reset(options={"reset_mask": mask})
        except (ValueError, TypeError):
            continue
        raise AssertionError(f"reset_mask {mask} was accepted")


def check(make_vec, make_one, num_envs=5, steps=60, most=1200, seed=3):
    """Drives both with the same seeds and actions in every mode: for so many steps, and on until an episode has ended."""
    for mode in AutoresetMode:
        ended = 0
        env = make_vec(num_envs, mode)
        ref = SyncVectorEnv([make_one] * num_envs, autoreset_mode=mode)
        check_spaces(env, ref, num_envs, mode)
        seen, infos = env.reset(seed=seed)
        expected, expected_infos = ref.reset(seed=seed)
        assert seen in env.observation_space and same(seen, expected) and same(infos, expected_infos), (mode, "reset")
        env.action_space.seed(seed)
        before, done = seen, np.zeros(num_envs, bool)
        for step in range(most):
            if step >= steps and ended > 0 and not done.any():
                break
            actions = env.action_space.sample()
            seen, rewards, terminated, truncated, infos = env.step(actions)
            expected = ref.step(actions)
            for array, dtype in ((rewards, np.float64), (terminated, np.bool_), (truncated, np.bool_)):
                assert isinstance(array, np.ndarray) and array.shape == (num_envs,) and array.dtype == dtype
            assert same((seen, rewards, terminated, truncated, infos), expected), (mode, step, infos, expected[4])
            assert not shares(seen, before), "observations of two calls share memory"
            before, done = seen, terminated | truncated
            ended += int(done.sum())
            check_infos(infos, done, mode)
            if mode is AutoresetMode.DISABLED and done.any():
                options = {"reset_mask": done.copy()}
                seen, _ = env.reset(options=options)
                assert "reset_mask" not in options
                expected, _ = ref.reset(options={"reset_mask": done.copy()})
                assert same(seen, expected), (mode, "a masked reset keeps the other rows")
        first, second = env.reset(seed=seed)[0], env.reset(seed=seed)[0]
        listed = env.reset(seed=[seed + row for row in range(num_envs)])[0]
        assert same(first, second) and same(first, listed), "an integer seed means seed, seed + 1, ..."
        check_reset_masks(env, num_envs)
        assert ended > 0, f"no episode ended in {most} steps"
        env.close()
        env.close()
        ref.close()
