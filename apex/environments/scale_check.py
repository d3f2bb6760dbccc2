"""Warns once when observations or rewards are too large to learn from as they are."""

from __future__ import annotations

import logging

import numpy as np

from apex.types import Array

NUM_STEPS = 1_000  # of the first environment that are looked at
LARGE_OBSERVATION = 100.0  # networks for vectors expect values of about 1
LARGE_REWARD = 100.0  # Q-values of thousands take long to learn, and the gradient is clipped at every update

log = logging.getLogger("apex")


class ScaleCheck:
    """Looks at the first steps of one environment and logs at most one warning about each of its figures."""

    def __init__(self, name: str, *, clip_rewards: bool) -> None:
        """`name`: of the environment. Clipped rewards cannot be too large."""
        self._name = name
        self._clip_rewards = clip_rewards
        self._steps_left = NUM_STEPS
        self._told: set[str] = set()

    def look(self, frame: Array, reward: float) -> None:
        """Takes one step's frame [*F] (only vectors are looked at) and its raw reward."""
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
            text = "%s: %s %.3g; %s of about 1 are learned faster. Scale them, for example with gymnasium.wrappers.%s"
            log.warning(text, self._name, figure, value, noun, remedy)
