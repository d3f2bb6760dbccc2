"""Exploration: epsilon-greedy actions or Gaussian noise. Each actor has a fixed amount; together they cover a range."""

import numpy as np
from numpy.typing import NDArray

from apexreplay.errors import require
from apexreplay.item_kinds import Array


def epsilon_ladder(num_actors: int, base: float, exponent: float) -> NDArray[np.float64]:
    """Returns epsilon_i = base^(1 + exponent * i / (N - 1)) for i = 0 ... N-1 [section 4.1].

    A single actor gets the middle of the ladder, base^(1 + exponent / 2): 0.016 with the paper's values.
    """
    return np.asarray(base ** (1.0 + exponent * _rungs(num_actors)), np.float64)


def noise_ladder(num_actors: int, noise: float, share: float) -> NDArray[np.float64]:
    """Returns sigma_i = noise * share^(i / (N - 1)), float64[N]. With share 1, as in the paper, all are equal.

    A single actor gets the middle of the ladder.
    """
    return np.asarray(noise * share ** _rungs(num_actors), np.float64)


def _rungs(num_actors: int) -> NDArray[np.float64]:
    """Returns i / (N - 1) for i = 0 ... N-1; 1/2 for a single actor, for which the formula would divide by zero."""
    require(num_actors >= 1, f"actor.num_actors must be >= 1, got {num_actors}")
    return np.arange(num_actors) / (num_actors - 1) if num_actors > 1 else np.array([0.5])


def epsilon_greedy(
    q: Array,  # float32[E, A]
    epsilon: NDArray[np.float64],  # [E]
    rng: np.random.Generator,
    mask: NDArray[np.bool_] | None = None,  # [E, A]  allowed actions, at least one per stream; None: all
) -> NDArray[np.int64]:
    """Returns actions, int64[E]: a random allowed action with probability epsilon, else the greedy one.

    Among equal Q-values, the action with the lowest number is greedy. The number of draws from `rng` depends only on
    the shape of `q`, so with a given seed the agent explores at the same steps whatever the Q-values are.
    """
    num_streams, num_actions = q.shape
    explores = rng.random(num_streams) < epsilon
    if mask is None:
        return np.where(explores, rng.integers(num_actions, size=num_streams), q.argmax(1))
    chosen = np.floor(rng.random(num_streams) * mask.sum(1))  # rank among the allowed actions
    random_action = (mask.cumsum(1) > chosen[:, None]).argmax(1)
    action: NDArray[np.int64] = np.where(explores, random_action, allowed(q, mask).argmax(1))
    return action


def allowed(q: Array, mask: NDArray[np.bool_] | None) -> Array:
    """Returns the Q-values, [E, A], but -inf for actions that are not allowed, even if their value is NaN."""
    return q if mask is None else np.where(mask, q, np.float32(-np.inf))


def add_noise(
    action: NDArray[np.float32],  # [E, K]
    deviation: NDArray[np.float64],  # [E]  standard deviation of the noise
    rng: np.random.Generator,
) -> NDArray[np.float32]:
    """Returns the actions plus independent normal noise, clipped to -1 ... 1, float32[E, K]. Draws E * K numbers."""
    noise = rng.standard_normal(action.shape, np.float32) * deviation[:, None].astype(np.float32)
    noisy: NDArray[np.float32] = np.clip(action + noise, np.float32(-1), np.float32(1))
    return noisy
