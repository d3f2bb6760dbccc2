"""Warns once when observations or rewards are too large to learn from as they are."""

from __future__ import annotations

import logging

import numpy as np

from apex.types import Array

NUM_STEPS = 1_000  # number of steps of the first environment that are checked
LARGE_OBSERVATION = 100.0  # networks for vectors expect values of about 1
LARGE_REWARD = 200.0  # Q-values in the thousands are learned slowly, because every gradient is clipped

log = logging.getLogger("apex")


class ScaleCheck:
    """Checks the first steps of one environment; logs at most one warning each for observations and rewards."""

    def __init__(self, name: str, *, clip_rewards: bool) -> None:
        """`name`: id of the environment. Clipped rewards are not checked."""
        self._name = name
        self._clip_rewards = clip_rewards
        self._steps_left = NUM_STEPS
        self._told: set[str] = set()

    def look(self, frame: Array, reward: float) -> None:
        """Checks the frame [*F] of one step, if it is a vector, and its raw reward."""
        if not self._steps_left:
            return
        self._steps_left -= 1
        largest = float(np.abs(frame).max()) if frame.dtype != np.uint8 else 0.0
        if largest > LARGE_OBSERVATION:
            self._warn("an observation has the value", largest, "values", "TransformObservation")
        if abs(reward) > LARGE_REWARD and not self._clip_rewards:
            self._warn("a reward is", reward, "rewards", "TransformReward, or set --environment.clip-rewards")

    def _warn(self, figure: str, value: float, noun: str, remedy: str) -> None:
        if figure not in self._told:
            self._told.add(figure)
            text = "%s: %s %.3g; %s of about 1 are learned faster: scale them, for example with gymnasium.wrappers.%s"
            log.warning(text, self._name, figure, value, noun, remedy)
