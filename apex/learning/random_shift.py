"""Shifts the images of each batch by random numbers of pixels (DrQ; Yarats et al. 2021, section 3.1)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from apex.config import Config
from apex.schema import Part
from apexreplay.item_kinds import Array


class RandomShift:
    """Shifts each state of a batch by up to `pixels` in both directions. All images of one stack move together."""

    def __init__(self, pixels: int, rng: np.random.Generator, parts: Sequence[Part] = ()) -> None:
        """`pixels`: 0 leaves the states as they are. `parts`: of the schema, if frames have parts."""
        self._pixels = pixels
        self._parts = parts
        self._rng = rng

    @classmethod
    def configured(cls, config: Config, loader: int, parts: Sequence[Part] = ()) -> RandomShift:
        """Creates the shift of one loader."""
        seed = (config.seed, loader, 0, 1)  # Draws use seeds of two or three numbers, which NumPy extends with zeros.
        return cls(config.learner.random_shift, np.random.default_rng(seed), parts)

    def apply(self, stacks: Array) -> None:
        """Shifts the images in `stacks`, frame_dtype[2, B, S, *F], in place; pixels of the border are repeated."""
        if not self._pixels:
            return
        if not self._parts:
            self._shift(stacks)
        stop = 0
        for part in self._parts:
            start, stop = stop, stop + part.num_bytes
            if part.is_image:  # Dividing the last axis gives a view.
                self._shift(stacks[..., start:stop].reshape(*stacks.shape[:3], *part.shape))

    def _shift(self, images: Array) -> None:
        """Shifts images, uint8[2, B, S, H, W] or [2, B, S, H, W, C], in place."""
        height, width = images.shape[3:5]
        states = [state for view in images for state in view]
        border = (self._pixels, self._pixels)
        edges = [(0, 0), (0, 0), border, border, (0, 0)][: images.ndim - 1]
        padded = np.pad(images.reshape(-1, *images.shape[2:]), edges, "edge")
        offsets = self._rng.integers(0, 2 * self._pixels, (len(states), 2), endpoint=True)
        for state, source, (y, x) in zip(states, padded, offsets.tolist(), strict=True):
            state[...] = source[:, y : y + height, x : x + width]
