"""An environment in which no two transitions are equal, in any process and at any time."""

import secrets
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from apexreplay.item_kinds import Array

ID = "chaos.environment:AuditEnvironment"
PACED_ID = "chaos.environment:PacedEnvironment"
LONGEST_EPISODE = 200  # steps
PACE_SECONDS = 0.002
_DIGITS = 2**24  # A float32 represents every multiple of 2^-24 below 1 exactly.


class AuditEnvironment(gymnasium.Env[Any, Any]):
    """Two actions, one of which is right. The observation identifies the right action, the object and the step.

    float32[4]: 48 random bits of this object in two numbers, its step counter, and the right action. The counter
    continues over episodes, so that all observations differ.
    """

    observation_space = spaces.Box(0.0, 1.0, (4,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self._name = secrets.randbelow(_DIGITS), secrets.randbelow(_DIGITS)
        self._num_steps = 0
        self._ends_at = 0
        self._right = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        """Begins an episode of 1 to LONGEST_EPISODE steps, drawn uniformly."""
        super().reset(seed=seed)
        self._ends_at = self._num_steps + int(self.np_random.integers(1, LONGEST_EPISODE + 1))
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        """Returns reward 1 for the right action. Half of the episodes terminate, the others are truncated."""
        reward = float(int(action) == self._right)
        ended = self._num_steps + 1 >= self._ends_at
        terminated = ended and self._ends_at % 2 == 0
        return self._observe(), reward, terminated, ended and not terminated, {}

    def _observe(self) -> Array:
        self._num_steps += 1
        self._right = int(self.np_random.integers(2))
        high, low = self._name
        count = self._num_steps % _DIGITS
        return np.array([high / _DIGITS, low / _DIGITS, count / _DIGITS, self._right], np.float32)


class PacedEnvironment(AuditEnvironment):
    """The same environment, whose steps take time but no core: its actors are not faster when other programs pause."""

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        """See AuditEnvironment."""
        time.sleep(PACE_SECONDS)
        return super().step(action)
