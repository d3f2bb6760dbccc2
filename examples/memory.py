"""Two tasks that a policy without memory cannot solve.

    apex train --preset r2d2 --env examples.memory:make_cue
    apex train --preset r2d2 --env examples.memory:make_cartpole
"""

from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

DELAY = 11  # steps between the cue and the choice


class Cue(gym.Env[NDArray[np.float32], int]):
    """Shows a cue, -1 or 1, in the first observation only, and rewards the action at step `DELAY` that repeats it."""

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)  # cue, and 1 before the choice
        self.action_space = gym.spaces.Discrete(2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Begins an episode."""
        super().reset(seed=seed)
        self._cue = int(self.np_random.integers(2))
        self._step = 0
        return np.array([2 * self._cue - 1, 0], np.float32), {}

    def step(self, action: int) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Plays one step; the reward, 1 or -1, comes after the last one."""
        self._step += 1
        is_over = self._step > DELAY
        reward = (1.0 if action == self._cue else -1.0) if is_over else 0.0
        return np.array([0, self._step == DELAY], np.float32), reward, is_over, False, {}


def make_cue() -> gym.Env[Any, Any]:
    """Returns the cue task. Its score is 1 with memory, and 0 on average without."""
    return Cue()


def make_cartpole() -> gym.Env[Any, Any]:
    """Returns CartPole-v1 with positions only: cart and pole, without their velocities."""
    space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    return gym.wrappers.TransformObservation(gym.make("CartPole-v1"), lambda observation: observation[[0, 2]], space)
