"""Exploration: Gaussian noise on the policy's action, with a separate standard deviation for each actor."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from apex.errors import require


def noise_ladder(num_actors: int, noise: float, share: float) -> NDArray[np.float64]:
    """Returns sigma_i = noise * share^(i / (N - 1)), float64[N]. With share 1, as in the paper, all are equal.

    A single actor gets the middle of the ladder.
    """
    require(num_actors >= 1, f"actor.num_actors must be >= 1 to have noise, got {num_actors}")
    rungs = np.arange(num_actors) / (num_actors - 1) if num_actors > 1 else np.array([0.5])
    return np.asarray(noise * share**rungs, np.float64)


def add_noise(
    action: NDArray[np.float32],  # [E, K]
    deviation: NDArray[np.float64],  # [E]  standard deviation of the noise
    rng: np.random.Generator,
) -> NDArray[np.float32]:
    """Returns the actions plus independent normal noise, clipped to -1 ... 1, float32[E, K]. Draws E * K numbers."""
    noise = rng.standard_normal(action.shape, np.float32) * deviation[:, None].astype(np.float32)
    noisy: NDArray[np.float32] = np.clip(action + noise, np.float32(-1), np.float32(1))
    return noisy
