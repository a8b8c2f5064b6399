"""Datasets from arrays and files."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from elmur._elmur import Dataset, ElmurError, Recorder
from elmur.spaces import action_space, observation_keys, observation_space


def from_numpy(
    observations: Any,
    actions: Any,
    rewards: Any = None,
    episode_ends: Any = None,
    spaces: tuple[Any, Any] | None = None,
    terminated: Any = None,
    metadata: Mapping[str, str] | None = None,
) -> Dataset:
    """A dataset from arrays.

    Steps of all episodes one after the other: `observations` [N, ...], `actions` [N, ...] and `rewards` [N], with
    `episode_ends`: booleans [N] that are True at the last step of every episode, or the numbers of steps up to the end of
    every episode, increasing to N. Or lists of such arrays with one entry per episode and no `episode_ends`; observations may
    then have one step more than actions, the one after the last.

    Several kinds of observations are a dictionary or a tuple of arrays. Pictures are uint8, [..., channels, height, width] or
    [..., height, width, channels]. Rewards are 0 if there are none. `spaces` is the pair of Gymnasium spaces of observations
    and actions; without it they follow from the arrays: integers are choices from 0 to the largest, bytes are pictures.
    `terminated`: whether each episode ended by itself (True without it) or was cut off.
    """
    if episode_ends is None:
        if not isinstance(actions, (list, tuple)):
            raise ElmurError("episode_ends: expected where episodes end, or lists with one array per episode, got None")
        episodes = _listed(observations, actions, rewards)
    else:
        episodes = _cut(observations, actions, rewards, episode_ends)
    if not episodes:
        raise ElmurError("actions: expected at least one episode, got none")
    if spaces is None:
        spaces = _infer([seen for seen, _, _ in episodes], "observations"), _infer([a for _, a, _ in episodes], "actions")
    kinds = observation_space(spaces[0]), action_space(spaces[1])
    notes = {"source": "arrays", **(metadata or {})}
    if keys := observation_keys(spaces[0]):
        notes["observation_keys"] = json.dumps(keys)
    ended = np.ones(len(episodes), bool) if terminated is None else np.asarray(terminated, bool)
    if ended.shape != (len(episodes),):
        raise ElmurError(f"terminated: expected {len(episodes)} booleans, one per episode, got shape {ended.shape}")
    recorder = Recorder(json.dumps(kinds[0]), json.dumps(kinds[1]), notes)
    for (seen, acted, rewarded), end in zip(episodes, ended, strict=True):
        recorder.push(seen, acted, rewarded, bool(end), not end, seen=_steps(seen))
    return recorder.finish()


def _map(tree: Any, change: Any) -> Any:
    if isinstance(tree, Mapping):
        return {key: _map(part, change) for key, part in tree.items()}
    return tuple(_map(part, change) for part in tree) if isinstance(tree, tuple) else change(tree)


def _leaves(tree: Any) -> list[np.ndarray]:
    if isinstance(tree, Mapping):
        return [leaf for key in sorted(tree) for leaf in _leaves(tree[key])]
    return [leaf for part in tree for leaf in _leaves(part)] if isinstance(tree, tuple) else [tree]


def _steps(tree: Any) -> int:
    return len(_leaves(tree)[0])


Episode = tuple[Any, Any, np.ndarray]


def _listed(observations: Any, actions: Sequence[Any], rewards: Any) -> list[Episode]:
    """Episodes from lists with one entry each. A dictionary of lists is taken apart."""

    def of(tree: Any, episode: int) -> Any:
        if isinstance(tree, Mapping):
            return {key: of(part, episode) for key, part in tree.items()}
        return tuple(of(part, episode) for part in tree) if isinstance(tree, tuple) else np.asarray(tree[episode])

    episodes = []
    for i, acted in enumerate(actions):
        acted = np.asarray(acted)
        rewarded = np.zeros(len(acted), np.float32) if rewards is None else np.asarray(rewards[i])
        episodes.append((of(observations, i), acted, rewarded))
    return episodes


def _cut(observations: Any, actions: Any, rewards: Any, episode_ends: Any) -> list[Episode]:
    """Episodes from the steps of all of them."""
    observations, actions = _map(observations, np.asarray), np.asarray(actions)
    steps = len(actions)
    rewards = np.zeros(steps, np.float32) if rewards is None else np.asarray(rewards)
    for name, arrays in (("observations", _leaves(observations)), ("rewards", [rewards])):
        for array in arrays:
            if len(array) != steps:
                raise ElmurError(f"{name}: expected {steps} steps, as there are actions, got {len(array)}")
    ends = np.asarray(episode_ends)
    if ends.dtype == np.bool_:
        if ends.shape != (steps,):
            raise ElmurError(f"episode_ends: expected {steps} booleans, one per step, got shape {ends.shape}")
        ends = np.flatnonzero(ends) + 1
    counts = ends.dtype.kind in "iu" and ends.ndim == 1 and ends.size > 0
    if not counts or np.any(np.diff(ends.astype(np.int64), prepend=0) <= 0) or ends[-1] != steps:
        raise ElmurError(
            f"episode_ends: expected booleans, or increasing numbers of steps up to {steps}, the number of all; got {ends}"
        )
    parts = [slice(begin, end) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
    return [(_map(observations, lambda array, part=part: array[part]), actions[part], rewards[part]) for part in parts]


def _infer(trees: list[Any], what: str) -> Any:
    """The Gymnasium space that values of all episodes are from."""
    from gymnasium import spaces

    def of(arrays: list[np.ndarray]) -> Any:
        first, shape = arrays[0], arrays[0].shape[1:]
        if any(array.shape[1:] != shape for array in arrays):
            raise ElmurError(f"{what}: expected the same axes in all episodes, got {sorted({a.shape[1:] for a in arrays})}")
        if first.dtype == np.uint8 and what == "observations":
            return spaces.Box(0, 255, shape, np.uint8)
        if first.dtype.kind in "iub":
            sizes = np.max([array.max(axis=0) for array in arrays], axis=0).astype(np.int64) + 1
            if np.min([array.min() for array in arrays]) < 0:
                raise ElmurError(f"{what}: expected integers from 0 on, or floats, got negative integers")
            return spaces.Discrete(int(sizes)) if shape == () else spaces.MultiDiscrete(np.ravel(sizes))
        return spaces.Box(-np.inf, np.inf, shape, np.float32)

    def space(trees: list[Any]) -> Any:
        if isinstance(trees[0], Mapping):
            return spaces.Dict({key: space([tree[key] for tree in trees]) for key in trees[0]})
        if isinstance(trees[0], tuple):
            return spaces.Tuple([space([tree[i] for tree in trees]) for i in range(len(trees[0]))])
        return of(trees)

    return space(trees)


def from_npz(files: Any) -> Dataset:
    """A dataset from one ``.npz`` file per episode, in this order, or from a folder of them."""
    if isinstance(files, (str, os.PathLike)):
        return Dataset.open(files)
    with tempfile.TemporaryDirectory() as folder:
        for i, file in enumerate(files):
            os.symlink(os.path.abspath(file), Path(folder) / f"train_data_{i}.npz")
        return Dataset.from_bytes(to_bytes(Dataset.open(folder)))


def reopen(path: str, keys: list[str], action_key: str | None, mask: str | None) -> Dataset:
    """Opens the data of a pickled dataset again."""
    return Dataset.open(path, keys, action_key=action_key, mask=mask)


def to_bytes(dataset: Dataset) -> bytes:
    """A dataset as the bytes of an ``.elmur`` file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data.elmur"
        dataset.save(path)
        return path.read_bytes()
