"""The interface of all vector environments, for any library."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from apex.types import Step
from apexreplay.item_kinds import Array


class VectorEnvironment(Protocol):
    """E environment streams in one process. If a step ends an episode, `step` also begins the next episode.

    After a reset, an observation consists of S - 1 zero frames and the first frame. Every call returns new arrays that
    never change afterwards, so that callers may keep them. If no episode ended, `final_observation` may be the same
    array as `observation`.
    """

    @property
    def num_envs(self) -> int:
        """E, the number of environments."""

    @property
    def fps(self) -> float:
        """Steps per second at the speed at which a person would play."""

    @property
    def action_mask(self) -> NDArray[np.bool_] | None:
        """Allowed actions in the newest observation, bool[E, A]; None: no masks. Valid after `reset`."""

    def reset(self) -> Array:
        """Starts an episode in every environment; returns frame_dtype[E, S, *F]. The first call also sets the seeds."""

    def step(self, actions: Array) -> Step:
        """Plays the actions, int64[E] below A or float32[E, K] in [-1, 1]. Does not check action masks.

        Raises EnvironmentFailure after too many faults in a row.
        """

    def rest(self, i: int) -> None:
        """Allows environment i to pause until the next reset. A paused environment returns reward 0."""

    def picture(self) -> NDArray[np.uint8]:
        """Returns a picture of environment 0, uint8[H, W, 3], RGB. Needs an environment created with pictures=True."""

    def close(self) -> None:
        """Closes the environments. May be called twice."""
