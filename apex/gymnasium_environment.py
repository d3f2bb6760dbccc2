"""E Gymnasium environments side by side: spaces become frames and action numbers, faults a failure with a name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import cv2
import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from apex.config import ConfigError, EnvironmentConfig, require
from apex.types import Array, Step

CHANNELS = {1: None, 3: cv2.COLOR_RGB2GRAY, 4: cv2.COLOR_RGBA2GRAY}  # how an image of so many is grayed
MAX_ACTIONS = 65_536  # what a record's uint16 can number


class EnvironmentFailure(Exception):  # noqa: N818  EnvironmentError is Python's old name of OSError.
    """An environment raised, or answered what no agent can learn from. The text names it, the value and the step."""


class Form(NamedTuple):
    """How one environment's spaces become frames and action numbers."""

    shape: tuple[int, ...]
    dtype: Literal["uint8", "float32"]
    stack: int
    num_actions: int
    first_action: int  # what the environment calls action 0
    to_frame: Callable[[Any], Array]  # raises ValueError for what the space does not declare


class GymnasiumEnvironment:
    """A VectorEnvironment over plain environments, stepped one after the other by the caller's thread."""

    def __init__(
        self, config: EnvironmentConfig, envs: Sequence[gymnasium.Env[Any, Any]], seeds: Sequence[int]
    ) -> None:
        self.num_envs = len(envs)
        self._id = config.id
        self._envs = envs
        self._seeds = list(seeds)
        self._form = read_spaces(self._envs[0], config)
        shape = (self.num_envs, self._form.stack, *self._form.shape)
        self._observation: Array = np.zeros(shape, self._form.dtype)
        self._num_steps = 0

    def reset(self) -> Array:
        """See VectorEnvironment."""
        observation = np.empty_like(self._observation)
        for i in range(self.num_envs):
            self._begin(i, observation, seed=self._seeds[i] if self._seeds else None)
        self._seeds = []  # A second reset goes on with the environments' own random numbers.
        self._check_finite("observation", observation[:, -1])
        self._observation = observation
        return observation

    def step(self, actions: NDArray[np.int64]) -> Step:
        """See VectorEnvironment."""
        self._num_steps += 1
        observation = np.empty_like(self._observation)
        observation[:, :-1] = self._observation[:, 1:]
        reward = np.empty(self.num_envs, np.float32)
        terminated, truncated = np.zeros((2, self.num_envs), np.bool_)
        any_ended = False
        first_action, num_actions, to_frame = self._form.first_action, self._form.num_actions, self._form.to_frame
        for i, (env, action) in enumerate(zip(self._envs, actions.tolist(), strict=True)):
            if not 0 <= action < num_actions:
                raise ValueError(f"actions must be 0 ... {num_actions - 1}, got {actions.tolist()}")
            try:
                raw, reward[i], has_terminated, has_truncated, _ = env.step(first_action + action)
                observation[i, -1] = to_frame(raw)
            except Exception as error:
                raise self._failure(i, f"raised {type(error).__name__}: {error}") from error
            if has_terminated or has_truncated:
                any_ended = True
                terminated[i], truncated[i] = has_terminated, not has_terminated
        self._check_finite("reward", reward)
        self._check_finite("observation", observation[:, -1])
        final_observation = observation
        if any_ended:
            final_observation = observation.copy()
            for ended in np.flatnonzero(terminated | truncated).tolist():
                self._begin(ended, observation)
            self._check_finite("observation", observation[:, -1])
        self._observation = observation
        life_lost = np.zeros(self.num_envs, np.bool_)
        return Step(observation, reward, terminated, truncated, life_lost, final_observation)

    def picture(self) -> NDArray[np.uint8]:
        """See VectorEnvironment."""
        if self._envs[0].render_mode != "rgb_array":
            raise RuntimeError("no picture: make the environment with pictures=True")
        picture: Any = self._envs[0].render()
        if not (isinstance(picture, np.ndarray) and picture.dtype == np.uint8 and picture.shape[2:] == (3,)):
            raise self._failure(0, f"rendered {_tell(picture)}, where uint8[H, W, 3] was asked for")
        return picture

    def close(self) -> None:
        """See VectorEnvironment."""
        for env in self._envs:
            env.close()

    def _begin(self, i: int, observation: Array, seed: int | None = None) -> None:
        """Resets environment i and writes its stack into `observation`."""
        try:
            raw, _ = self._envs[i].reset(seed=seed)
            observation[i, -1] = self._form.to_frame(raw)
        except Exception as error:
            raise self._failure(i, f"raised {type(error).__name__}: {error} (in its reset)") from error
        observation[i, :-1] = 0

    def _check_finite(self, what: str, values: Array) -> None:
        """Values [E, ...]: one of each environment."""
        if values.dtype == np.float32 and not np.isfinite(values).all():
            i = next(i for i, value in enumerate(values) if not np.isfinite(value).all())
            raise self._failure(i, f"returned the {what} {values[i].tolist()}, which is not finite")

    def _failure(self, i: int, what: str) -> EnvironmentFailure:
        return EnvironmentFailure(f"{self._id}: environment {i} of {self.num_envs} {what}, at step {self._num_steps}")


def read_spaces(env: gymnasium.Env[Any, Any], config: EnvironmentConfig) -> Form:
    """Raises ConfigError for spaces that are not supported, and names them."""
    actions, observations = env.action_space, env.observation_space
    if not isinstance(actions, spaces.Discrete):
        raise ConfigError(
            f"environment.id {config.id!r} has the action space {actions}: only discrete actions are supported for now"
        )
    require(actions.n <= MAX_ACTIONS, f"environment.id {config.id!r} has {actions.n} actions; at most {MAX_ACTIONS}")
    num_actions, first_action = int(actions.n), int(actions.start)
    if isinstance(observations, spaces.Box) and observations.dtype == np.uint8 and len(observations.shape) in (2, 3):
        shape = (config.image_size, config.image_size)
        to_frame = _image_reader(observations, config)
        return Form(shape, "uint8", config.frame_stack, num_actions, first_action, to_frame)
    num_values, to_frame = _vector_reader(observations, config)
    return Form((num_values,), "float32", 1, num_actions, first_action, to_frame)


def _image_reader(space: spaces.Box, config: EnvironmentConfig) -> Callable[[Any], Array]:
    """Images [H, W] or [H, W, C] to gray ones of image_size x image_size."""
    channels = space.shape[2] if len(space.shape) == 3 else 1
    require(
        channels in CHANNELS,
        f"environment.id {config.id!r} has images of shape {list(space.shape)}: "
        "they must be [height, width] or [height, width, 1, 3 or 4 channels]; transpose them in a wrapper",
    )
    cv2.setNumThreads(1)  # These images are small, and the other cores have actors of their own.
    to_gray, size = CHANNELS[channels], (config.image_size, config.image_size)

    def to_frame(observation: Any) -> Array:
        image = np.ascontiguousarray(observation)
        if image.shape != space.shape or image.dtype != np.uint8:
            raise ValueError(f"an observation {_tell(image)} does not belong to {space}")
        gray = image.reshape(image.shape[:2]) if to_gray is None else cv2.cvtColor(image, to_gray)
        return gray if gray.shape == size else cv2.resize(gray, size, interpolation=cv2.INTER_AREA)

    return to_frame


def _vector_reader(space: spaces.Space[Any], config: EnvironmentConfig) -> tuple[int, Callable[[Any], Array]]:
    """All else to a vector, and its length: a Box is unrolled, a Discrete becomes one-hot, a Dict or Tuple both."""
    try:
        num_values = spaces.flatdim(space)
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(f"environment.id {config.id!r} has the observation space {space}: {error}") from error
    require(num_values >= 1, f"environment.id {config.id!r} has the observation space {space}, which is empty")

    def from_box(observation: Any) -> Array:
        array = np.asarray(observation)
        if array.shape != space.shape:
            raise ValueError(f"an observation {_tell(array)} does not belong to {space}")
        return array.reshape(-1)

    def from_other(observation: Any) -> Array:
        if not space.contains(observation):  # Out of range, a one-hot would wrap round.
            raise ValueError(f"the observation {observation!r} does not belong to {space}")
        return np.asarray(spaces.flatten(space, observation))

    return num_values, from_box if isinstance(space, spaces.Box) else from_other


def _tell(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
