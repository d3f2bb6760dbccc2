"""n-step returns: which rewards a transition sums, and what multiplies its bootstrap."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from apex.types import Array


class NStep(NamedTuple):
    """What follows each start t = 0 ... T-1, axes [T, E]. Where `complete` is False the rest may still change."""

    n_step_return: NDArray[np.float32]  # r_{t+1} + ... + gamma^(m-1) r_{t+m}
    discount: NDArray[np.float32]  # gamma^m, or 0 if s_{t+m} is terminal
    length: NDArray[np.int64]  # m
    complete: NDArray[np.bool_]  # the window is closed: no later step can change it


def n_step_returns(
    rewards: Array,  # [T, E]  r_{t+1}, the answer to a_t
    terminated: NDArray[np.bool_],  # [T, E]  s_{t+1} is terminal for learning: worth nothing
    truncated: NDArray[np.bool_],  # [T, E]  a limit cut the episode after r_{t+1}: s_{t+1} is still worth Q(s_{t+1})
    n: int,
    gamma: float,
) -> NStep:
    """Sums the rewards of each window: n steps, or fewer up to and including the first end.

    An end of either kind closes a window, so none reaches into the next episode; where both come at once,
    `terminated` wins. A window that is still open when the T steps run out has m < n and is not complete.
    Sums are taken in float64, in the order of time.
    """
    num_steps = len(rewards)
    ended = terminated | truncated
    powers = np.array([gamma**k for k in range(n + 1)])
    total = np.zeros(rewards.shape)
    length = np.zeros(rewards.shape, np.int64)
    still_open = np.ones(rewards.shape, np.bool_)
    for k in range(min(n, num_steps)):
        starts = slice(0, num_steps - k)  # Those that have a k-th step.
        counts = still_open[starts]
        total[starts] += np.where(counts, powers[k] * rewards[k:], 0.0)
        length[starts] += counts
        still_open[starts] &= ~ended[k:]
    last = np.arange(num_steps)[:, None] + length - 1
    discount = np.where(np.take_along_axis(terminated, last, axis=0), 0.0, powers[length])
    complete = ~still_open | (length == n)
    return NStep(total.astype(np.float32), discount.astype(np.float32), length, complete)
