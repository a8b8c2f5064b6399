"""Spaces of Gymnasium and spaces of the library.

The library knows Discrete, MultiDiscrete, Box (32-bit floats), bytes (pictures, channels first) and tuples of them. What
Gymnasium has besides is translated where nothing is lost: a Dict is a tuple of its parts in the order of their sorted keys,
a MultiBinary is a MultiDiscrete of twos, a picture with its channels last, or without channels, is taken with
the channels first.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from elmur._elmur import ElmurError

_LOWEST = float(np.finfo(np.float32).min)
_HIGHEST = float(np.finfo(np.float32).max)


def to_gymnasium(space: str | dict[str, Any]) -> Any:
    """The Gymnasium space of a space of the library (JSON, or the dictionary it means)."""
    from gymnasium import spaces

    ((kind, of),) = (json.loads(space) if isinstance(space, str) else space).items()
    if kind == "discrete":
        return spaces.Discrete(of["n"])
    if kind == "multi_discrete":
        return spaces.MultiDiscrete(of["sizes"])
    if kind == "bytes":
        return spaces.Box(0, 255, tuple(of["shape"]), np.uint8)
    if kind == "box":
        shape = tuple(of["shape"])
        low, high = (np.asarray(of[bound], np.float32) for bound in ("low", "high"))
        low = np.where(low <= _LOWEST, np.float32(-np.inf), low)
        high = np.where(high >= _HIGHEST, np.float32(np.inf), high)
        low, high = (np.broadcast_to(x, shape) if x.size == 1 else x.reshape(shape) for x in (low, high))
        return spaces.Box(low.astype(np.float32), high.astype(np.float32), shape, np.float32)
    return spaces.Tuple([to_gymnasium(part) for part in of["parts"]])


def observation_space(space: Any, what: str = "observation space") -> dict[str, Any]:
    """The library's space of the observations of a Gymnasium space. Bounds are left out: recordings exceed them."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        parts = [observation_space(space[key], f"{what}, key {key!r}") for key in sorted(space.keys())]
        return parts[0] if len(parts) == 1 else {"tuple": {"parts": parts}}
    if isinstance(space, spaces.Tuple):
        parts = [observation_space(part, f"{what}, part {i}") for i, part in enumerate(space.spaces)]
        return parts[0] if len(parts) == 1 else {"tuple": {"parts": parts}}
    if isinstance(space, spaces.Box):
        shape = list(space.shape)
        if len(shape) == 3 and shape[2] <= 4 < 8 <= min(shape[:2]):
            shape = [shape[2], shape[0], shape[1]]
        elif len(shape) == 2 and space.dtype == np.uint8 and min(shape) >= 8:
            shape = [1, *shape]
        if space.dtype == np.uint8:
            return {"bytes": {"shape": shape}}
        return {"box": {"shape": shape, "low": [_LOWEST], "high": [_HIGHEST]}}
    return _choices(space, what)


def observation_keys(space: Any) -> list[dict[str, Any]] | None:
    """Name, shape and order of axes of every part of a Dict, as datasets note them; None for other spaces."""
    from gymnasium import spaces

    def parts(space: Any, path: str) -> list[dict[str, Any]]:
        if isinstance(space, spaces.Dict):
            return [part for key in sorted(space.keys()) for part in parts(space[key], f"{path}/{key}")]
        if isinstance(space, spaces.Tuple):
            return [part for i, one in enumerate(space.spaces) for part in parts(one, f"{path}/{i}")]
        shape = [1] if isinstance(space, spaces.Discrete) else [int(n) for n in space.shape]
        (native,) = observation_space(space).values()
        last = isinstance(space, spaces.Box) and native["shape"] != shape
        return [{"name": path[1:], "shape": shape, **({"channels_last": True} if last else {})}]

    return parts(space, "") if isinstance(space, spaces.Dict) else None


def action_space(space: Any, what: str = "action space") -> dict[str, Any]:
    """The library's space of the actions of a Gymnasium space: a Box, or one or more choices."""
    from gymnasium import spaces

    if isinstance(space, spaces.Box):
        low, high = (np.clip(np.asarray(x, np.float64), _LOWEST, _HIGHEST).ravel() for x in (space.low, space.high))
        return {"box": {"shape": list(space.shape), "low": low.tolist(), "high": high.tolist()}}
    return _choices(space, what)


def _choices(space: Any, what: str) -> dict[str, Any]:
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        if space.start != 0:
            raise ElmurError(
                f"{what}: expected choices from 0 on, got {space}; shift them with a wrapper of Gymnasium, such as "
                "TransformObservation or TransformAction"
            )
        return {"discrete": {"n": int(space.n)}}
    if isinstance(space, spaces.MultiDiscrete):
        if np.any(space.start != 0):
            raise ElmurError(f"{what}: expected choices from 0 on, got {space}; shift them with a wrapper of Gymnasium")
        return {"multi_discrete": {"sizes": np.ravel(space.nvec).tolist()}}
    if isinstance(space, spaces.MultiBinary):
        return {"multi_discrete": {"sizes": [2] * int(np.prod(space.shape))}}
    kinds = "Box, Discrete, MultiDiscrete or MultiBinary"
    if what.startswith("observation"):
        kinds += ", or a Dict or Tuple of them"
    raise ElmurError(f"{what}: expected {kinds}, got {space}")


def as_action(space: Any, action: Any) -> Any:
    """An action of a policy as a value of the action space of one environment."""
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return np.int64(np.asarray(action).reshape(()))
    action = np.asarray(action).reshape(space.shape)
    if isinstance(space, spaces.Box):
        if np.issubdtype(space.dtype, np.integer):
            action = np.rint(action)
        action = np.clip(action, space.low, space.high)
    return action.astype(space.dtype)


def as_actions(space: Any, batched: Any, actions: Any, rows: int) -> Any:
    """Actions of a policy for all rows as a value of the batched action space of a vector environment."""
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return np.asarray(actions).reshape(rows).astype(batched.dtype, copy=False)
    actions = np.asarray(actions).reshape((rows, *space.shape))
    if isinstance(space, spaces.Box):
        if np.issubdtype(space.dtype, np.integer):
            actions = np.rint(actions)
        actions = np.clip(actions, space.low, space.high)
    return actions.astype(batched.dtype, copy=False)
