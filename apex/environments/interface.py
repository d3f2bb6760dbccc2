"""What every vector environment of ours offers, whichever library plays the game."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from apex.types import Array, Step


class VectorEnvironment(Protocol):
    """E environment streams of one process. What ends in a step has begun its next episode when `step` returns.

    Observations after a reset are S - 1 zero frames and the first frame. Every call returns new arrays, which are
    never written to again: an observation may be kept for as long as it is of use. One exception: where nothing
    ended, `final_observation` may be `observation` itself.
    """

    @property
    def num_envs(self) -> int:
        """E."""

    @property
    def fps(self) -> float:
        """Steps per second of a game at its true speed, as a person would play it."""

    def reset(self) -> Array:
        """Begins an episode everywhere; frame_dtype[E, S, *F]. The first time it also seeds."""

    def step(self, actions: NDArray[np.int64]) -> Step:
        """Takes actions [E], 0 ... A - 1; raises EnvironmentFailure where faults are no exception any more."""

    def rest(self, i: int) -> None:
        """Says that environment i is of no use before the next reset: it may stand still, and gives no reward then."""

    def picture(self) -> NDArray[np.uint8]:
        """uint8[H, W, 3], RGB: what environment 0 looks like now. Only if made with pictures=True."""

    def close(self) -> None:
        """Ends the environments. May be called twice."""
