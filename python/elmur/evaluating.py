"""How well a policy does in an environment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from elmur._elmur import ElmurError, Policy
from elmur.progress import Bar
from elmur.spaces import as_action, as_actions
from elmur.stream import Stream, quotas

EVALUATION_SEED = 2**31
"""Default seed of evaluations, far from those that demonstrations are collected with."""


@dataclass(frozen=True)
class Evaluation:
    """The episodes of an evaluation: by row, and in the order in which each row played them."""

    returns: np.ndarray
    """Sum of rewards of each episode."""
    lengths: np.ndarray
    """Number of steps of each episode."""
    successes: np.ndarray | None
    """Whether each episode solved the task, where the environment says so (``is_success`` or ``success`` in its info)."""

    @property
    def mean_return(self) -> float:
        """Mean sum of rewards."""
        return float(self.returns.mean())

    @property
    def success_rate(self) -> float | None:
        """Share of episodes that solved the task, where the environment says so."""
        return None if self.successes is None else float(self.successes.mean())

    @property
    def sem(self) -> float:
        """Standard error of the mean return."""
        return float(self.returns.std(ddof=1) / np.sqrt(len(self.returns))) if len(self.returns) > 1 else 0.0

    def __repr__(self) -> str:
        rate = "" if self.successes is None else f", success_rate={self.success_rate:.3f}"
        return f"Evaluation(episodes={len(self.returns)}, mean_return={self.mean_return:.4g} ± {self.sem:.2g}{rate})"


def evaluate(
    policy: Policy,
    env: Any,
    episodes: int = 100,
    seed: int | None = EVALUATION_SEED,
    *,
    deterministic: bool = True,
    target_return: float | None = None,
    progress: bool | None = None,
    **options: Any,
) -> Evaluation:
    """Lets a policy act in episodes of an environment. The policy's own rows are left as they are.

    env: an environment of Gymnasium, single or vector, in any autoreset mode; an id, with its `options`; or a function that
        makes an environment.
    episodes: how many count. In a vector every row plays its share of them, so that short ones are not preferred.
    seed: the environment is reset with it once, and the policy's rows too.
    deterministic: take the likeliest actions instead of drawing them.
    target_return: what policies with return tokens are asked for; None: what they were asked for in training.
    """
    if episodes < 1:
        raise ElmurError(f"episodes: expected at least 1, got {episodes}")
    stream = Stream(env, min(episodes, 64), "env", **options)
    try:
        return _evaluate(policy, stream, episodes, seed, deterministic, target_return, progress)
    finally:
        stream.close()


def _evaluate(
    policy: Policy,
    stream: Stream,
    episodes: int,
    seed: int | None,
    deterministic: bool,
    target_return: float | None,
    progress: bool | None,
) -> Evaluation:
    rows = stream.rows
    policy = policy.with_rows(rows)
    target = policy.target_return if target_return is None else target_return
    if policy.reads_returns and target is None:
        raise ElmurError("target_return: expected the return to ask this policy for, got None")
    wanted = np.full(rows, 0.0 if target is None else target, np.float64)
    if seed is not None:
        policy.reset(seeds=seed)
    left = quotas(episodes, rows)
    results: list[list[tuple[float, int, Any]]] = [[] for _ in range(rows)]
    returns, lengths = np.zeros(rows), np.zeros(rows, int)
    bar = Bar(progress, "evaluating", episodes)
    first = seed is not None
    try:
        stream.begin(seed)
        while left.any():
            asked = wanted if policy.reads_returns else None
            # With a seed the rows were begun above.
            start = None if first else stream.start
            first = False
            actions = policy.act(stream.observation, start, returns=asked, deterministic=deterministic)
            if stream.vector:
                actions = as_actions(stream.action_space, stream.env.action_space, actions, rows)
            else:
                actions = as_action(stream.action_space, actions)
            stepped, rewards, terminated, truncated, _, told = stream.step(actions)
            done = stepped & (terminated | truncated)
            returns += np.where(stepped, rewards, 0.0)
            wanted -= np.where(stepped, rewards, 0.0)
            lengths += stepped
            for row in np.flatnonzero(done):
                if left[row] > 0:
                    info = told(row)
                    results[row].append((returns[row], lengths[row], info.get("is_success", info.get("success"))))
                    left[row] -= 1
            returns[done], lengths[done] = 0.0, 0
            wanted[done] = 0.0 if target is None else target
            bar.to(episodes - int(left.sum()))
    finally:
        bar.close()
    played = [result for row in results for result in row]
    successes = [success for _, _, success in played]
    known = any(success is not None for success in successes)
    return Evaluation(
        returns=np.array([total for total, _, _ in played]),
        lengths=np.array([steps for _, steps, _ in played]),
        successes=np.array([bool(success) for success in successes]) if known else None,
    )
