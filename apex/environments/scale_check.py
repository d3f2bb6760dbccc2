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
        self._told_observation = self._told_reward = False

    def look(self, frame: Array, reward: float) -> None:
        """Takes one step's frame [*F] (only vectors are looked at) and its raw reward."""
        if not self._steps_left:
            return
        self._steps_left -= 1
        largest = float(np.abs(frame).max()) if frame.dtype != np.uint8 else 0.0
        if largest > LARGE_OBSERVATION and not self._told_observation:
            self._told_observation = True
            log.warning(
                "%s: an observation has the value %.3g; values of about 1 are learned faster. Scale them, for example "
                "with gymnasium.wrappers.TransformObservation",
                self._name,
                largest,
            )
        if abs(reward) > LARGE_REWARD and not self._clip_rewards and not self._told_reward:
            self._told_reward = True
            log.warning(
                "%s: a reward is %.3g; rewards of about 1 are learned faster. Scale them, for example with "
                "gymnasium.wrappers.TransformReward, or set --environment.clip-rewards",
                self._name,
                reward,
            )
