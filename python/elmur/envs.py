"""The library's environments for Gymnasium: T-Maze, CartPole and POPGym's 48 tasks, one by one or in vectors.

    gymnasium.make("elmur/TMaze-v0", length=90)
    gymnasium.make_vec("elmur/RepeatFirstEasy-v0", num_envs=64, autoreset_mode="SameStep")

Keywords besides Gymnasium's are settings of the environment (``length`` of T-Maze, ``version`` of POPGym's tasks), changes
of what is seen and done (``previous_action=True``, ``chosen_cell=True``, ``first_step=True``, ``encoding="one_hot"`` or
``"floats"``, ``flat_action=True``) and ``purpose`` ("evaluate", or "collect" for the corridors of all lengths that demonstrations are
collected in). Vectors also take ``autoreset_mode``, and ``threads`` to step many rows on several cores.

A row's episodes depend on its own seed alone: episode k after ``reset(seed=s)`` is a function of (s, k), in a vector of any
size, in every autoreset mode and in the single environment. Pickling keeps how an environment was made, not its episode.
"""

from __future__ import annotations

import json
from typing import Any

import gymnasium
import numpy as np
from gymnasium.utils import EzPickle
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from elmur._elmur import Rows, environments
from elmur.spaces import to_gymnasium

_SHORT = {"tmaze": "TMaze", "cartpole": "CartPole"}
_WRAPPERS = ("previous_action", "chosen_cell", "first_step", "encoding", "flat_action")


def gymnasium_id(name: str) -> str:
    """The Gymnasium id of the environment that the library and the command line call `name`."""
    base = name.removeprefix("popgym-").removesuffix("-v0")
    return f"elmur/{_SHORT.get(base, base)}-v0"


def register() -> None:
    """Registers all environments in Gymnasium."""
    for name in environments():
        if gymnasium_id(name) not in gymnasium.registry:
            gymnasium.register(
                gymnasium_id(name),
                entry_point="elmur.envs:ElmurEnv",
                vector_entry_point="elmur.envs:ElmurVectorEnv",
                kwargs={"name": name},
            )


def _spec(name: str, settings: dict[str, Any]) -> str:
    wrappers = {key: settings[key] for key in _WRAPPERS if key in settings}
    settings = {key: value for key, value in settings.items() if key not in _WRAPPERS}
    return json.dumps({"name": name, **settings, "wrappers": wrappers})


def _row(tree: Any, row: int) -> Any:
    """One row of arrays, or of a tuple of them."""
    return tuple(_row(part, row) for part in tree) if isinstance(tree, tuple) else tree[row]


class ElmurEnv(gymnasium.Env, EzPickle):
    """One environment of the library."""

    metadata = {"render_modes": []}

    def __init__(
        self,
        name: str,
        *,
        purpose: str = "evaluate",
        render_mode: str | None = None,
        **settings: Any,
    ) -> None:
        EzPickle.__init__(self, name, purpose=purpose, render_mode=render_mode, **settings)
        self.name = name
        self.render_mode = render_mode
        self.native_spec = _spec(name, settings)
        self._rows = Rows(self.native_spec, 1, "Disabled", purpose, 1)
        self.observation_space, self.action_space = map(to_gymnasium, self._rows.spaces())
        self._seeded = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is None and not self._seeded:
            seed = int(self.np_random.integers(2**63))
        self._seeded = True
        return _row(self._rows.reset(None if seed is None else [int(seed)]), 0), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        seen, rewards, terminated, truncated, success, _ = self._rows.step(np.asarray(action)[None])
        info = {} if success is None else {"is_success": bool(success[0][0])}
        return _row(seen, 0), float(rewards[0]), bool(terminated[0]), bool(truncated[0]), info


class ElmurVectorEnv(VectorEnv, EzPickle):
    """Many rows of one environment of the library, stepped by one call."""

    def __init__(
        self,
        name: str,
        num_envs: int = 1,
        *,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        purpose: str = "evaluate",
        threads: int = 1,
        render_mode: str | None = None,
        **settings: Any,
    ) -> None:
        mode = AutoresetMode(autoreset_mode)
        given = {"autoreset_mode": mode, "purpose": purpose, "threads": threads}
        EzPickle.__init__(self, name, num_envs, render_mode=render_mode, **given, **settings)
        self.name = name
        self.num_envs = num_envs
        self.render_mode = render_mode
        self.metadata = {"render_modes": [], "autoreset_mode": mode}
        self.native_spec = _spec(name, settings)
        self._rows = Rows(self.native_spec, num_envs, mode.value, purpose, threads)
        self.single_observation_space, self.single_action_space = map(to_gymnasium, self._rows.spaces())
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._same_step = mode is AutoresetMode.SAME_STEP
        self._seeded = np.zeros(num_envs, bool)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        if seed is None:
            seeds: list[int | None] = [None] * self.num_envs
        elif isinstance(seed, (int, np.integer)):
            seeds = [int(seed) + row for row in range(self.num_envs)]
        else:
            seeds = list(seed)
        if len(seeds) != self.num_envs:
            raise ValueError(f"seed: expected {self.num_envs} seeds, one per row, got {len(seeds)}")
        mask = self._reset_mask(options)
        for row in np.flatnonzero(mask & ~self._seeded):
            if seeds[row] is None:
                seeds[row] = int(self.np_random.integers(2**63))
        self._seeded |= mask
        if wrong := [one for one in seeds if one is not None and not 0 <= one < 2**64]:
            raise ValueError(f"seed: expected integers from 0 to 2**64 - 1, got {wrong[0]}")
        given = {int(row): one for row in np.flatnonzero(mask) if (one := seeds[row]) is not None}
        others = [row for row in np.flatnonzero(mask) if seeds[row] is None]
        seen = None
        if given:
            seen = self._rows.reset(list(given.values()), list(given))
        if others:
            seen = self._rows.reset(None, others)
        return seen, {}

    def _reset_mask(self, options: dict[str, Any] | None) -> np.ndarray:
        """The rows to reset, as a mask."""
        if options is None or "reset_mask" not in options:
            return np.ones(self.num_envs, bool)
        mask = options.pop("reset_mask")
        if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_:
            raise TypeError(f"options['reset_mask']: expected a NumPy array of booleans, got {type(mask).__name__}")
        if mask.shape != (self.num_envs,):
            raise ValueError(f"options['reset_mask']: expected shape ({self.num_envs},), got {mask.shape}")
        if not mask.any():
            raise ValueError("options['reset_mask']: expected at least one row, got none")
        return mask

    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        seen, rewards, terminated, truncated, success, ended = self._rows.step(actions)
        if not ended:
            return seen, rewards, terminated, truncated, {}
        info: dict[str, Any] = {} if success is None else {"is_success": success[0], "_is_success": success[1]}
        if self._same_step:
            done = terminated | truncated
            final, last = np.full(self.num_envs, None, object), self._rows.final_observations()
            for row in np.flatnonzero(done):
                final[row] = _row(last, int(row))
            info = {"final_obs": final, "_final_obs": done, "final_info": info, "_final_info": done.copy()}
        return seen, rewards, terminated, truncated, info
