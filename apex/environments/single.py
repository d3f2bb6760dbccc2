"""One environment as the agent sees it: Gymnasium's interface to what training played, pixels and stacks included."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from apex.config import EnvironmentConfig
from apex.environments.factory import make_environment
from apex.environments.interface import VectorEnvironment
from apex.errors import require
from apex.types import Array, Schema


class AgentEnvironment(gymnasium.Env[Array, np.int64]):
    """Observations are frame_dtype[S, *F], of vectors float32[D]; actions are 0 ... A - 1; rewards are raw.

    The same seed begins the same game. `info` says whether a life was lost in the step, and whether the environment
    failed in it: it raised, say. Such an episode is over (`truncated`), and the next `reset` begins a new one. With
    `environment.fire_after_life_loss`, FIRE is played in the place of the one action after a lost life.
    """

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012  Gymnasium's own type

    def __init__(self, config: EnvironmentConfig, schema: Schema, *, render_mode: str | None = None) -> None:
        """Raises ConfigError for a render mode other than None and "rgb_array"."""
        require(render_mode in (None, "rgb_array"), f"render_mode must be None or 'rgb_array', got {render_mode!r}")
        self.render_mode = render_mode
        shape = schema.observation_shape if schema.stack > 1 else schema.frame_shape
        low, high = (0, 255) if schema.frame_dtype == "uint8" else (-np.inf, np.inf)
        self.observation_space = spaces.Box(low, high, shape, np.dtype(schema.frame_dtype).type)
        self.action_space = spaces.Discrete(schema.num_actions)
        self._config = config
        self._games: VectorEnvironment | None = None
        self._next: Array | None = None  # the first observation of an episode that has begun by itself
        self._is_over = True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        """Begins an episode; observation and info. With a `seed`, that seed's first one. `options` are not used."""
        super().reset(seed=seed)
        if seed is not None or self._games is None:
            self.close()
            first = int(self.np_random.integers(2**31)) if seed is None else seed
            pictures = self.render_mode is not None
            self._games = make_environment(self._config, 1, seed=first, num_threads=1, pictures=pictures)
            self.metadata = {**self.metadata, "render_fps": self._games.fps}
        observation, self._next = self._next, None
        self._is_over = False
        return self._games.reset()[0].reshape(self._shape) if observation is None else observation, {}

    def step(self, action: int | np.integer[Any]) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        """observation, reward, terminated, truncated, info. An episode that has ended must be `reset` first."""
        if self._games is None or self._is_over:
            raise gymnasium.error.ResetNeeded("the episode is over, or none has begun: call reset first")
        step = self._games.step(np.array([action], np.int64))
        failed = step.failed is not None and bool(step.failed[0])
        terminated, truncated = bool(step.terminated[0]), bool(step.truncated[0]) or failed
        self._is_over = terminated or truncated
        shown = step.observation
        if self._is_over:
            self._next, shown = step.observation[0].reshape(self._shape), step.final_observation
        info = {"life_lost": bool(step.life_lost[0]), "failed": failed}
        return shown[0].reshape(self._shape), float(step.reward[0]), terminated, truncated, info

    def render(self) -> NDArray[np.uint8]:
        """uint8[H, W, 3], RGB; raises RuntimeError unless it was made with render_mode "rgb_array" and has begun."""
        if self._games is None:
            raise RuntimeError("no picture before the first reset")
        return self._games.picture()

    def close(self) -> None:
        """Ends the game. May be called twice."""
        if self._games is not None:
            self._games.close()
        self._games = self._next = None
        self._is_over = True

    @property
    def _shape(self) -> tuple[int, ...]:
        return self.observation_space.shape or ()
