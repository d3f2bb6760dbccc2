"""Targets of Q-values: n-step returns, the bootstrap value, and the value rescaling h for unclipped rewards."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from apexreplay.item_kinds import Array

RESCALING_EPSILON = 1e-3  # makes h invertible with bounded slope; the value of R2D2 (Kapturowski et al. 2019)


class NStep(NamedTuple):
    """The n-step windows that start at t = 0 ... T-1, axes [T, E]. Later steps change incomplete windows."""

    n_step_return: NDArray[np.float32]  # r_{t+1} + ... + gamma^(m-1) * r_{t+m}
    discount: NDArray[np.float32]  # gamma^m, or 0 if s_{t+m} is terminal
    length: NDArray[np.int64]  # m, the number of steps in the window
    complete: NDArray[np.bool_]  # whether the window is complete: later steps do not change it


def n_step_target(n_step_return: Any, discount: Any, bootstrap: Any) -> Any:
    """Returns the target of Q(s_t, a_t). `bootstrap`: value of s_{t+m}. Takes three arrays or three tensors.

    Actors (for initial priorities) and the learner use this formula: TD error = target - Q(s_t, a_t).
    """
    return n_step_return + discount * bootstrap


def n_step_returns(
    rewards: Array,  # [T, E]  r_{t+1}, the reward for a_t
    terminated: NDArray[np.bool_],  # [T, E]  s_{t+1} is terminal for learning: its value is 0
    truncated: NDArray[np.bool_],  # [T, E]  a limit ended the episode after r_{t+1}: s_{t+1} still has a value
    n: int,
    gamma: float,
) -> NStep:
    """Sums the rewards of each window: n steps, or fewer if the episode ends within the window.

    No window extends into the next episode. If both flags are set at one step, `terminated` takes precedence. A window
    that extends beyond the T steps has m < n and is not complete. Sums are computed in float64, in order of time.
    """
    num_steps = len(rewards)
    ended = terminated | truncated
    powers = np.array([gamma**k for k in range(n + 1)])
    total = np.zeros(rewards.shape)
    length = np.zeros(rewards.shape, np.int64)
    still_open = np.ones(rewards.shape, np.bool_)
    for k in range(min(n, num_steps)):
        starts = slice(0, num_steps - k)  # windows that have a k-th step
        counts = still_open[starts]
        total[starts] += np.where(counts, powers[k] * rewards[k:], 0.0)
        length[starts] += counts
        still_open[starts] &= ~ended[k:]
    last = np.arange(num_steps)[:, None] + length - 1
    discount = np.where(np.take_along_axis(terminated, last, axis=0), 0.0, powers[length])
    complete = ~still_open | (length == n)
    return NStep(total.astype(np.float32), discount.astype(np.float32), length, complete)


def rescale(value: Any) -> Any:
    """Returns h(x) = sign(x) (sqrt(|x| + 1) - 1) + epsilon x for each x (Pohlen et al. 2018, section 3.2).

    A network that outputs h(Q) instead of Q learns from large and small returns alike. Takes an array or a tensor. The
    first term is computed as x / (sqrt(|x| + 1) + 1), which does not subtract nearly equal numbers.
    """
    return value / ((abs(value) + 1) ** 0.5 + 1) + RESCALING_EPSILON * value


def restore(rescaled: Any) -> Any:
    """Returns x for each h(x).

    v = sqrt(|x| + 1) - 1 is the positive root of epsilon v^2 + (1 + 2 epsilon) v = |h(x)|, and |x| = v (v + 2). It is
    computed as 2 |h| / (b + sqrt(b^2 + 4 epsilon |h|)) with b = 1 + 2 epsilon.
    """
    b = 1 + 2 * RESCALING_EPSILON
    factor = 2 / (b + (b * b + 4 * RESCALING_EPSILON * abs(rescaled)) ** 0.5)
    return rescaled * factor * (abs(rescaled) * factor + 2)
