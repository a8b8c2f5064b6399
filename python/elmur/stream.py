"""Any environment as a stream of steps: one or many rows, whatever happens to a row whose episode ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from elmur._elmur import ElmurError

_ended: WeakKeyDictionary[Any, np.ndarray] = WeakKeyDictionary()
"""For environments that reset in the next step: the rows whose episode ended in the last one."""


def _mode(env: Any) -> str:
    """How ended rows are reset: "NextStep", "SameStep" or "Disabled"; "Disabled" for a single environment."""
    mode = (env.metadata or {}).get("autoreset_mode")
    if mode is None:
        return "NextStep" if hasattr(env, "num_envs") else "Disabled"
    return getattr(mode, "value", mode)


def episode_starts(env: Any, terminated: Any = None, truncated: Any = None) -> Any:
    """Which rows begin an episode with the newest observation: `episode_start` of the next `Policy.act`.

    After ``env.reset()``: ``start = episode_starts(env)``. After ``env.step(...)``: ``start = episode_starts(env, terminated,
    truncated)``. In NEXT_STEP mode those are the rows whose previous step ended an episode, in the other modes the rows whose
    episode ended in this step: with DISABLED, and with a single environment, reset them before acting.
    """
    rows = getattr(env, "num_envs", None)
    if terminated is None:
        _ended.pop(env, None)
        return np.bool_(True) if rows is None else np.ones(rows, bool)
    done = np.logical_or(terminated, truncated)
    if _mode(env) != "NextStep":
        return done
    before = _ended.get(env)
    _ended[env] = done
    return np.zeros(rows, bool) if before is None else before


def row_of(tree: Any, row: int) -> Any:
    """One row of arrays, or of a tuple or dictionary of them."""
    if isinstance(tree, dict):
        return {key: row_of(part, row) for key, part in tree.items()}
    if isinstance(tree, tuple):
        return tuple(row_of(part, row) for part in tree)
    return tree[row]


def stack(trees: list[Any]) -> Any:
    """Values of a space, one after the other along a first axis."""
    if isinstance(trees[0], dict):
        return {key: stack([tree[key] for tree in trees]) for key in trees[0]}
    if isinstance(trees[0], tuple):
        return tuple(stack([tree[i] for tree in trees]) for i in range(len(trees[0])))
    return np.stack(trees)


def copied(tree: Any) -> Any:
    """A value with memory of its own: some environments write to the same arrays again."""
    if isinstance(tree, dict):
        return {key: copied(part) for key, part in tree.items()}
    if isinstance(tree, tuple):
        return tuple(copied(part) for part in tree)
    return np.array(tree)


def row_info(infos: dict[str, Any], row: int) -> dict[str, Any]:
    """The infos of one row of a vector environment."""
    info = {}
    for key, values in infos.items():
        if key.startswith("_") and key[1:] in infos:
            continue
        known = infos.get(f"_{key}")
        if known is not None and not known[row]:
            continue
        info[key] = row_info(values, row) if isinstance(values, dict) else values[row]
    return info


class Stream:
    """Steps of an environment, single or vector, in any autoreset mode.

    `observation` (of all rows), `start` (which rows begin an episode with it) and `info` are what comes next; `step` returns
    what each row went through.
    """

    def __init__(self, env: Any, rows: int, what: str, **options: Any) -> None:
        import gymnasium
        from gymnasium.vector import VectorEnv

        self.owned = isinstance(env, str) or (callable(env) and not isinstance(env, (gymnasium.Env, VectorEnv)))
        if isinstance(env, str):
            env = gymnasium.make_vec(env, num_envs=rows, **options)
        elif self.owned:
            env = env()
        if not isinstance(env, (gymnasium.Env, VectorEnv)):
            got = type(env).__name__
            raise ElmurError(f"{what}: expected an environment of Gymnasium, an id or a function that makes one, got {got}")
        self.env: Any = env
        self.vector = isinstance(env, VectorEnv)
        self.rows: int = getattr(env, "num_envs", 1)
        self.observation_space = getattr(env, "single_observation_space", env.observation_space)
        self.action_space = getattr(env, "single_action_space", env.action_space)
        self._mode = _mode(env)
        self._waiting = np.zeros(self.rows, bool)

    def begin(self, seed: int | None) -> None:
        """Starts an episode in every row."""
        self.observation, self.info = self.env.reset(seed=seed)
        self.start = np.ones(self.rows, bool)
        self._waiting[:] = False

    def row(self, row: int) -> Any:
        """The newest observation of a row."""
        return row_of(self.observation, row) if self.vector else self.observation

    def info_of(self, row: int) -> dict[str, Any]:
        """The newest info of a row."""
        return row_info(self.info, row) if self.vector else self.info

    def step(self, actions: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, Callable[[int], Any], Any]:
        """Takes a step. Returns which rows went through it (the others began an episode instead), rewards, terminated,
        truncated, a function that gives the observation that a row's step ended with, and one that gives its info."""
        if not self.vector:
            return self._step_one(actions)
        seen, rewards, terminated, truncated, info = self.env.step(actions)
        done = np.logical_or(terminated, truncated)
        stepped = ~self._waiting
        self.observation, self.info = seen, info
        if self._mode == "NextStep":
            self.start, self._waiting = self._waiting, done
            return stepped, rewards, terminated, truncated, self.row, lambda row: row_info(info, row)
        self.start = done
        if self._mode == "SameStep":

            def last(row: int) -> Any:
                return info["final_obs"][row] if done[row] else row_of(seen, row)

            def told(row: int) -> dict[str, Any]:
                return row_info(info.get("final_info", {}), row) if done[row] else row_info(info, row)

            return stepped, rewards, terminated, truncated, last, told
        if done.any():
            self.observation, self.info = self.env.reset(options={"reset_mask": done.copy()})
        return stepped, rewards, terminated, truncated, lambda row: row_of(seen, row), lambda row: row_info(info, row)

    def _step_one(self, action: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, Callable[[int], Any], Any]:
        seen, reward, terminated, truncated, info = self.env.step(action)
        self.observation, self.info = seen, info
        self.start = np.array([terminated or truncated])
        if self.start[0]:
            self.observation, self.info = self.env.reset()
        flags = np.array([[terminated], [truncated]], bool)
        return np.ones(1, bool), np.array([float(reward)]), *flags, lambda _: seen, lambda _: info

    def close(self) -> None:
        """Closes the environment if it was made here."""
        if self.owned:
            self.env.close()


def quotas(episodes: int, rows: int) -> np.ndarray:
    """How many episodes each row plays. Rows with a fixed number each make short episodes as likely as long ones; the first
    so many to end would be too many short ones."""
    return np.array([episodes // rows + (row < episodes % rows) for row in range(rows)])
