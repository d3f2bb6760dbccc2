"""A Gymnasium environment with the same observations, actions and preprocessing as in training."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from apex.config import EnvironmentConfig
from apex.environments.factory import make_environment
from apex.environments.interface import VectorEnvironment
from apex.schema import Schema
from apexreplay.errors import require
from apexreplay.item_kinds import Array


class AgentEnvironment(gymnasium.Env[Array, Any]):
    """Observations are frame_dtype[S, *F] for images and float32[D] for vectors; rewards are raw.

    Actions are 0 ... A - 1, or float32[K] in [-1, 1], which is scaled to the game's own bounds. If the game expects
    several integers, each combination is one action. If the game has action masks, `info["action_mask"]` is bool[A].

    The same seed starts the same game. `info["life_lost"]` is whether a life was lost in the step, `info["failed"]`
    whether the environment failed, for example raised an exception. A failed episode is `truncated`; the next `reset`
    starts a new one. With `environment.fire_after_life_loss`, FIRE replaces the action after a lost life.
    """

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012  Gymnasium's own type

    def __init__(self, config: EnvironmentConfig, schema: Schema, *, render_mode: str | None = None) -> None:
        """Raises UsageError for a render mode other than None and "rgb_array"."""
        require(render_mode in (None, "rgb_array"), f"render_mode must be None or 'rgb_array', got {render_mode!r}")
        self.render_mode = render_mode
        self._shape = schema.observation_shape if schema.stack > 1 else schema.frame_shape
        low, high = (0, 255) if schema.frame_dtype == "uint8" else (-np.inf, np.inf)
        self.observation_space = spaces.Box(low, high, self._shape, np.dtype(schema.frame_dtype).type)
        self.action_space: spaces.Space[Any] = (
            spaces.Box(-1, 1, schema.action_shape) if schema.action_size else spaces.Discrete(schema.num_actions)
        )
        self._action_dtype = schema.action_dtype
        self._config = config
        self._games: VectorEnvironment | None = None
        # First observation and info of an episode that has started automatically after the previous one.
        self._next: tuple[Array, dict[str, Any]] | None = None
        self._is_over = True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        """Starts an episode, with `seed` the first of this seed; returns (observation, info). Ignores `options`."""
        super().reset(seed=seed)
        if seed is not None or self._games is None:
            self.close()
            first = int(self.np_random.integers(2**31)) if seed is None else seed
            pictures = self.render_mode is not None
            self._games = make_environment(self._config, 1, seed=first, pictures=pictures)
            self.metadata = {**self.metadata, "render_fps": self._games.fps}
        begun, self._next = self._next, None
        self._is_over = False
        return begun or (self._games.reset()[0].reshape(self._shape), _mask_info(self._games.action_mask))

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        """Returns (observation, reward, terminated, truncated, info). Raises ResetNeeded if the episode is over."""
        if self._games is None or self._is_over:
            raise gymnasium.error.ResetNeeded("the episode is over, or none has begun: call reset first")
        step = self._games.step(np.array([action], self._action_dtype))
        failed = step.failed is not None and bool(step.failed[0])
        terminated, truncated = bool(step.terminated[0]), bool(step.truncated[0]) or failed
        self._is_over = terminated or truncated
        shown, mask = step.observation, step.action_mask
        if self._is_over:
            self._next = shown[0].reshape(self._shape), _mask_info(mask)
            shown, mask = step.final_observation, step.final_mask
        info = {"life_lost": bool(step.life_lost[0]), "failed": failed, **_mask_info(mask)}
        return shown[0].reshape(self._shape), float(step.reward[0]), terminated, truncated, info

    def render(self) -> NDArray[np.uint8]:
        """Returns uint8[H, W, 3], RGB; raises RuntimeError before the first reset or if render_mode is None."""
        if self._games is None:
            raise RuntimeError("no picture before the first reset: call reset first")
        return self._games.picture()

    def close(self) -> None:
        """Closes the game. May be called twice."""
        if self._games is not None:
            self._games.close()
        self._games = self._next = None
        self._is_over = True


def _mask_info(mask: NDArray[np.bool_] | None) -> dict[str, Any]:
    return {} if mask is None else {"action_mask": mask[0]}
