"""Exploration: every actor keeps its own epsilon for ever, and together they cover the range."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from apex.errors import require
from apex.types import Array


def epsilon_ladder(num_actors: int, base: float, exponent: float) -> NDArray[np.float64]:
    """Returns epsilon_i = base^(1 + exponent i / (N - 1)) for i = 0 ... N-1 [section 4.1].

    A single actor, for whom the formula divides by zero, gets the middle of the ladder, base^(1 + exponent / 2):
    0.016 with the paper's values.
    """
    require(num_actors >= 1, f"actor.num_actors must be >= 1 to have epsilons, got {num_actors}")
    rungs = np.arange(num_actors) / (num_actors - 1) if num_actors > 1 else np.array([0.5])
    return np.asarray(base ** (1.0 + exponent * rungs), np.float64)


def epsilon_greedy(
    q: Array,  # float32[E, A]
    epsilon: NDArray[np.float64],  # [E]
    rng: np.random.Generator,
) -> NDArray[np.int64]:
    """Returns int64[E] actions: uniform among all A with probability epsilon, else greedy (the lowest of equals).

    The number of draws from `rng` depends on the shape of `q` alone, so a seed gives the same explorations whatever
    the network says.
    """
    num_streams, num_actions = q.shape
    explores = rng.random(num_streams) < epsilon
    random_action = rng.integers(num_actions, size=num_streams)
    return np.where(explores, random_action, q.argmax(1))
