"""Shifts the images of each batch by random numbers of pixels (DrQ; Yarats et al. 2021, section 3.1)."""

from __future__ import annotations

import numpy as np

from apex.config import Config
from apexreplay.item_kinds import Array


class RandomShift:
    """Shifts each state of a batch by up to `pixels` in both directions. All images of one stack move together."""

    def __init__(self, pixels: int, rng: np.random.Generator) -> None:
        """`pixels`: 0 leaves the states as they are."""
        self._pixels = pixels
        self._rng = rng

    @classmethod
    def configured(cls, config: Config, loader: int) -> RandomShift:
        """Creates the shift of one loader."""
        seed = (config.seed, loader, 0, 1)  # Draws use seeds of two or three numbers, which NumPy extends with zeros.
        return cls(config.learner.random_shift, np.random.default_rng(seed))

    def apply(self, stacks: Array) -> None:
        """Shifts the states in `stacks`, frame_dtype[2, B, S, H, W], in place; pixels of the border are repeated."""
        if not self._pixels:
            return
        height, width = stacks.shape[-2:]
        states = stacks.reshape(-1, *stacks.shape[2:])
        border = (self._pixels, self._pixels)
        padded = np.pad(states, ((0, 0), (0, 0), border, border), "edge")
        offsets = self._rng.integers(0, 2 * self._pixels, (len(states), 2), endpoint=True)
        for state, source, (y, x) in zip(states, padded, offsets.tolist(), strict=True):
            state[...] = source[:, y : y + height, x : x + width]
