"""Demonstrations: an expert plays, its episodes are recorded."""

from __future__ import annotations

import inspect
import json
import os
from typing import Any

import numpy as np

from elmur._elmur import Dataset, ElmurError, Policy, Recorder, collect_player
from elmur.progress import Bar
from elmur.spaces import action_space, as_action, as_actions, observation_keys, observation_space
from elmur.stream import Stream, copied, quotas, stack


def collect(
    env: Any,
    expert: Any = None,
    episodes: int = 100,
    seed: int | None = 0,
    out: str | os.PathLike[str] | None = None,
    *,
    batched: bool = False,
    noise: float = 0.0,
    overwrite: bool = False,
    progress: bool | None = None,
    **options: Any,
) -> Dataset:
    """Lets an expert play episodes in an environment and records them.

    env: an environment of Gymnasium, single or vector, in any autoreset mode; an id, with its `options`; or a function that
        makes an environment.
    expert: called as ``expert(observation, info)`` for one row, it returns that row's action. An object with a ``reset()``
        is told when an episode begins; of a class, every row gets an object of its own. With `batched` it is called once for
        all rows of a vector environment and returns all actions. A `Policy` plays by itself. None: the scripted player of
        one of the library's environments.
    episodes: how many are recorded. In a vector every row plays its share of them, so that short ones are not preferred.
    seed: the environment is reset with it once.
    out: an ``.elmur`` file to record to; None keeps the episodes in memory.
    noise: probability of a random action in place of the expert's; it is recorded as not to be imitated.
    """
    if episodes < 1:
        raise ElmurError(f"episodes: expected at least 1, got {episodes}")
    if expert is None:
        return _demonstrate(env, episodes, seed, out, noise, overwrite, progress, options)
    stream = Stream(env, 1, "env", **options)
    try:
        return _record(stream, expert, episodes, seed, out, batched, noise, overwrite, progress)
    finally:
        stream.close()


def _demonstrate(
    env: Any, episodes: int, seed: int | None, out: Any, noise: float, overwrite: bool, progress: bool | None, options: Any
) -> Dataset:
    """Demonstrations by the scripted player of one of our environments."""
    import gymnasium

    made = gymnasium.make(env, **options) if isinstance(env, str) else env
    spec = getattr(made.unwrapped, "native_spec", None)
    if spec is None:
        raise ElmurError("expert: expected a function, an object or a policy: only the library's own environments have a player")
    if made.observation_space != made.unwrapped.observation_space or made.action_space != made.unwrapped.action_space:
        raise ElmurError("expert: expected a function, an object or a policy: the player does not know Gymnasium's wrappers")
    bar = Bar(progress, "collecting", episodes)

    def notify(what: str, news: str) -> None:
        told = json.loads(news)
        if what == "note":
            bar.say(f"note: {told['note']}")
        else:
            bar.to(told["episodes"])

    try:
        return collect_player(spec, episodes, seed or 0, noise, out, overwrite, notify)
    finally:
        bar.close()


def _record(
    stream: Stream,
    expert: Any,
    episodes: int,
    seed: int | None,
    out: Any,
    batched: bool,
    noise: float,
    overwrite: bool,
    progress: bool | None,
) -> Dataset:
    spaces = observation_space(stream.observation_space), action_space(stream.action_space)
    base = stream.env.unwrapped
    spec = getattr(base, "spec", None)
    notes = {"env": getattr(base, "name", None) or (spec.id if spec else type(base).__name__)}
    notes["expert"] = getattr(expert, "__name__", type(expert).__name__)
    if keys := observation_keys(stream.observation_space):
        notes["observation_keys"] = json.dumps(keys)
    if seed is not None:
        notes["seed"] = str(seed)
    if noise:
        notes["noise"] = str(noise)
    play = _player(stream, expert, batched)
    rng = np.random.default_rng(seed)
    stream.action_space.seed(seed)
    left = quotas(episodes, stream.rows)
    records: list[_Record] = [_Record() for _ in range(stream.rows)]
    recorder = Recorder(json.dumps(spaces[0]), json.dumps(spaces[1]), notes, out, overwrite)
    bar = Bar(progress, "collecting", episodes)
    try:
        stream.begin(seed)
        while left.any():
            actions = play()
            astray = rng.random(stream.rows) < noise
            for row in map(int, np.flatnonzero(astray)):
                actions[row] = stream.action_space.sample()
            seen = [copied(stream.row(row)) for row in range(stream.rows)]
            stepped, rewards, terminated, truncated, last, _ = stream.step(_joined(stream, actions))
            for row in map(int, np.flatnonzero(stepped & (left > 0))):
                record = records[row]
                record.add(seen[row], actions[row], rewards[row], not astray[row])
                if terminated[row] or truncated[row]:
                    record.push(recorder, copied(last(row)), bool(terminated[row]), bool(truncated[row]), bool(noise))
                    records[row] = _Record()
                    left[row] -= 1
                    bar.to(episodes - int(left.sum()))
        return recorder.finish()
    except BaseException:
        recorder.discard()
        raise
    finally:
        bar.close()


class _Record:
    """An episode that is being recorded."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.actions: list[Any] = []
        self.rewards: list[float] = []
        self.imitate: list[bool] = []

    def add(self, seen: Any, action: Any, reward: float, imitate: bool) -> None:
        self.seen.append(seen)
        self.actions.append(action)
        self.rewards.append(float(reward))
        self.imitate.append(imitate)

    def push(self, recorder: Recorder, last: Any, terminated: bool, truncated: bool, marked: bool) -> None:
        self.seen.append(last)
        recorder.push(
            stack(self.seen),
            stack(self.actions),
            np.asarray(self.rewards),
            terminated,
            truncated,
            seen=len(self.seen),
            imitate=np.asarray(self.imitate) if marked else None,
        )


def _joined(stream: Stream, actions: list[Any]) -> Any:
    """The actions of all rows as the environment takes them."""
    if not stream.vector:
        return actions[0]
    return as_actions(stream.action_space, stream.env.action_space, stack(actions), stream.rows)


def _player(stream: Stream, expert: Any, batched: bool) -> Any:
    """A function that gives the expert's actions for the newest observations, one per row."""
    space, rows = stream.action_space, stream.rows
    if isinstance(expert, Policy):
        policy = expert.with_rows(rows)

        def by_policy() -> list[Any]:
            actions = policy.act(stream.observation, episode_start=stream.start)
            return [as_action(space, actions[row] if stream.vector else actions) for row in range(rows)]

        return by_policy
    if batched:
        if not stream.vector:
            raise ElmurError("batched: expected a vector environment, got a single one")

        def by_batch() -> list[Any]:
            actions = np.asarray(expert(stream.observation, stream.info))
            if len(actions) != rows:
                raise ElmurError(f"expert: expected {rows} actions, one per row, got {len(actions)}")
            return [as_action(space, actions[row]) for row in range(rows)]

        return by_batch
    experts: list[Any] = [expert() for _ in range(rows)] if inspect.isclass(expert) else [expert] * rows
    if rows > 1 and not inspect.isclass(expert) and hasattr(expert, "reset"):
        raise ElmurError("expert: expected a class, of which every row gets an object, got one object with a memory for all rows")

    def by_row() -> list[Any]:
        actions = []
        for row, one in enumerate(experts):
            if stream.start[row] and hasattr(one, "reset"):
                one.reset()
            actions.append(as_action(space, one(stream.row(row), stream.info_of(row))))
        return actions

    return by_row
