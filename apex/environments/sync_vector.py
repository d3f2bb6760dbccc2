"""E Gymnasium environments side by side: spaces become frames and action numbers, faults a failure with a name."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import cv2
import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from apex.config import EnvironmentConfig
from apex.environments.fault_budget import BadAnswerError, FaultBudget
from apex.environments.scale_check import ScaleCheck
from apex.errors import ConfigError, require
from apex.types import Array, Step

CHANNELS = {1: None, 3: cv2.COLOR_RGB2GRAY, 4: cv2.COLOR_RGBA2GRAY}  # how an image of so many is grayed
DEFAULT_FPS = 30  # of an environment that does not say how fast it is to be shown
MAX_ACTIONS = 65_536  # what a record's uint16 can number
MAX_REWARD = 1e13  # of one step: the learner sets n-step returns beyond 1e15 aside, and n is at most 64
MAX_VALUE = float(np.finfo(np.float32).max)  # of a value of an observation
MAX_VALUES = 2**20  # of an observation that is a vector
MIN_IMAGE_SIZE = 16  # pixels; below that an image is a grid of cells, and resizing would blur them

log = logging.getLogger("apex")


class ObservationForm(NamedTuple):
    """How one environment's spaces become frames and action numbers."""

    shape: tuple[int, ...]
    dtype: Literal["uint8", "float32"]
    stack: int
    num_actions: int
    first_action: int  # what the environment calls action 0
    to_frame: Callable[[Any], Array]  # raises BadAnswerError for what the space does not declare
    change: str = ""  # what `to_frame` does to images, in one sentence; "": nothing


class SyncVectorEnvironment:
    """A VectorEnvironment over plain environments, stepped one after the other by the caller's thread.

    The episode of one that raises, or answers what no agent can learn from, is cut off before that step, which is
    `failed`; the environment is closed and made anew. The others go on.
    """

    def __init__(
        self, config: EnvironmentConfig, make: Callable[[int], gymnasium.Env[Any, Any]], seeds: Sequence[int]
    ) -> None:
        """`make(i)` makes environment i, at the start and after each of its faults."""
        self.num_envs = len(seeds)
        self._make = make
        self._envs = [make(i) for i in range(self.num_envs)]
        self.fps = float(self._envs[0].metadata.get("render_fps") or DEFAULT_FPS)
        self._seeds = list(seeds)
        self._has_begun = False
        self._form = read_spaces(self._envs[0], config)
        shape = (self.num_envs, self._form.stack, *self._form.shape)
        self._observation: Array = np.zeros(shape, self._form.dtype)
        self._resting: NDArray[np.bool_] = np.zeros(self.num_envs, np.bool_)
        self._patience = FaultBudget(config.id, self.num_envs)
        self._scale = ScaleCheck(config.id, clip_rewards=config.clip_rewards)

    def reset(self) -> Array:
        """See VectorEnvironment."""
        observation = np.empty_like(self._observation)
        for i, seed in enumerate(self._seeds):  # A second reset goes on with the environments' own random numbers.
            self._begin(i, observation, seed=None if self._has_begun else seed)
        self._has_begun = True
        self._resting[:] = False
        self._observation = observation
        return observation

    def step(self, actions: NDArray[np.int64]) -> Step:
        """See VectorEnvironment."""
        self._patience.step()
        observation = np.empty_like(self._observation)
        observation[:, :-1] = self._observation[:, 1:]
        reward = np.zeros(self.num_envs, np.float32)
        terminated, truncated, failed = np.zeros((3, self.num_envs), np.bool_)
        first_action, num_actions = self._form.first_action, self._form.num_actions
        for i, action in enumerate(actions.tolist()):
            if not 0 <= action < num_actions:
                raise ValueError(f"actions must be 0 ... {num_actions - 1}, got {actions.tolist()}")
            if self._resting[i]:
                observation[i] = self._observation[i]
                continue
            try:
                frame, reward[i], terminated[i], truncated[i] = self._ask(i, first_action + action)
                _write(frame, observation[i])
                if i == 0:
                    self._scale.look(frame, float(reward[0]))
            except (Exception, SystemExit) as error:
                self._patience.bear(i, error)
                terminated[i], truncated[i], failed[i] = False, False, True
        final_observation = observation
        ended = terminated | truncated
        if ended.any() or failed.any():
            final_observation = observation.copy()
            for i in np.flatnonzero(ended | failed).tolist():
                self._begin(i, observation, renew=bool(failed[i]))
        self._observation = observation
        life_lost = np.zeros(self.num_envs, np.bool_)
        return Step(
            observation, reward, terminated, truncated, life_lost, final_observation, failed if failed.any() else None
        )

    def rest(self, i: int) -> None:
        """See VectorEnvironment."""
        self._resting[i] = True

    def picture(self) -> NDArray[np.uint8]:
        """See VectorEnvironment."""
        if self._envs[0].render_mode != "rgb_array":
            raise RuntimeError("no picture: make the environment with pictures=True")
        try:
            picture: Any = self._envs[0].render()
        except Exception as error:
            raise self._patience.failure(0, error, "in its render") from error
        if not (isinstance(picture, np.ndarray) and picture.dtype == np.uint8 and picture.shape[2:] == (3,)):
            told = f"rendered {_tell(picture)}, where uint8[H, W, 3] was asked for"
            raise self._patience.failure(0, BadAnswerError(told))
        return picture

    def close(self) -> None:
        """See VectorEnvironment."""
        for i in range(self.num_envs):
            self._close(i)

    def _ask(self, i: int, action: int) -> tuple[Array, float, bool, bool]:
        """Steps environment i; frame, reward, terminated, truncated. Where both are true it is terminated."""
        answer: Any = self._envs[i].step(action)
        if not (isinstance(answer, tuple) and len(answer) == 5):
            what = "(observation, reward, terminated, truncated, info)"
            raise BadAnswerError(f"returned {_tell(answer)} from its step, where {what} was asked for")
        raw, reward, terminated, truncated, _ = answer
        has_terminated = _flag("terminated", terminated)
        has_truncated = _flag("truncated", truncated)
        return self._form.to_frame(raw), _number(reward), has_terminated, has_truncated and not has_terminated

    def _begin(self, i: int, observation: Array, seed: int | None = None, *, renew: bool = False) -> None:
        """Resets environment i, a new one where that is needed, and writes its stack into `observation`."""
        while True:
            try:
                if renew:
                    self._close(i)
                    self._envs[i] = self._make(i)
                    # Another game than the one that failed, and the same one in every run.
                    seed = int(np.random.SeedSequence([self._seeds[i], self._patience.faults[i]]).generate_state(1)[0])
                answer: Any = self._envs[i].reset(seed=None if seed is None else seed % 2**31)
                if not (isinstance(answer, tuple) and len(answer) == 2):
                    raise BadAnswerError(f"returned {_tell(answer)}, where (observation, info) was asked for")
                _write(self._form.to_frame(answer[0]), observation[i])
                observation[i, :-1] = 0
                return
            except (Exception, SystemExit) as error:
                self._patience.bear(i, error, "in its reset")
                renew = True

    def _close(self, i: int) -> None:
        try:
            self._envs[i].close()
        except Exception as error:
            log.warning("%s; nothing depends on it", self._patience.failure(i, error, "in its close"))


def read_spaces(env: gymnasium.Env[Any, Any], config: EnvironmentConfig) -> ObservationForm:
    """Raises ConfigError for spaces that are not supported, and names them."""
    actions, observations = env.action_space, env.observation_space
    if not isinstance(actions, spaces.Discrete):
        raise ConfigError(
            f"environment.id {config.id!r} has the action space {actions}: only discrete actions are supported for now"
        )
    require(actions.n <= MAX_ACTIONS, f"environment.id {config.id!r} has {actions.n} actions; at most {MAX_ACTIONS}")
    num_actions, first_action = int(actions.n), int(actions.start)
    require(
        0 not in (observations.shape or ()), f"environment.id {config.id!r} has observations {observations}: empty ones"
    )
    if isinstance(observations, spaces.Box) and observations.dtype == np.uint8 and len(observations.shape) in (2, 3):
        shape = (config.image_size, config.image_size)
        to_frame = _image_reader(observations, config)
        change = _describe_change(observations, config)
        return ObservationForm(shape, "uint8", config.frame_stack, num_actions, first_action, to_frame, change)
    num_values, to_frame = _vector_reader(observations, config)
    return ObservationForm((num_values,), "float32", 1, num_actions, first_action, to_frame)


def _image_reader(space: spaces.Box, config: EnvironmentConfig) -> Callable[[Any], Array]:
    """Images [H, W] or [H, W, C] to gray ones of image_size x image_size."""
    channels = space.shape[2] if len(space.shape) == 3 else 1
    require(
        channels in CHANNELS,
        f"environment.id {config.id!r} has images of shape {list(space.shape)}: "
        "they must be [height, width] or [height, width, 1, 3 or 4 channels]; transpose them in a wrapper",
    )
    require(
        min(space.shape[:2]) >= MIN_IMAGE_SIZE,
        f"environment.id {config.id!r} has images of {space.shape[0]} x {space.shape[1]} pixels, which would be "
        f"resized to {config.image_size} x {config.image_size}. To learn from the cells as they are, return a vector: "
        "wrap it in gymnasium.wrappers.FlattenObservation, or declare the Box as float32",
    )
    cv2.setNumThreads(1)  # These images are small, and the other cores have actors of their own.
    to_gray, size = CHANNELS[channels], (config.image_size, config.image_size)

    def to_frame(observation: Any) -> Array:
        image = np.ascontiguousarray(observation)
        if image.shape != space.shape or image.dtype != np.uint8:
            raise BadAnswerError(f"returned an observation {_tell(image)}, which does not belong to {space}")
        gray = image.reshape(image.shape[:2]) if to_gray is None else cv2.cvtColor(image, to_gray)
        return gray if gray.shape == size else cv2.resize(gray, size, interpolation=cv2.INTER_AREA)

    return to_frame


def _describe_change(space: spaces.Box, config: EnvironmentConfig) -> str:
    """What becomes of an image before the agent sees it; "" where it stays as it is."""
    height, width, *channels = space.shape
    size = config.image_size
    changes = ["converted to grayscale"] * (channels not in ([], [1]))
    changes += [f"resized to {size} x {size}"] * ((height, width) != (size, size))
    if not changes:
        return ""
    kind = "RGBA " if channels == [4] else "RGB " if channels == [3] else ""
    return f"{kind}images of {height} x {width} are {' and '.join(changes)} (--environment.image-size)"


def _vector_reader(space: spaces.Space[Any], config: EnvironmentConfig) -> tuple[int, Callable[[Any], Array]]:
    """All else to a vector, and its length: a Box is unrolled, a Discrete becomes one-hot, a Dict or Tuple both."""
    try:
        num_values = spaces.flatdim(space)
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(f"environment.id {config.id!r} has the observation space {space}: {error}") from error
    require(
        1 <= num_values <= MAX_VALUES,
        f"environment.id {config.id!r} has the observation space {space}: {num_values:,} values, where 1 ... "
        f"{MAX_VALUES:,} can be learned from; images must be uint8 [height, width] or [height, width, channels]",
    )

    def from_box(observation: Any) -> Array:
        array = np.asarray(observation)
        if array.shape != space.shape:
            raise BadAnswerError(f"returned an observation {_tell(array)}, which does not belong to {space}")
        return array.reshape(-1)

    def from_other(observation: Any) -> Array:
        if not space.contains(observation):  # Out of range, a one-hot would wrap round.
            raise BadAnswerError(f"returned the observation {_shorten(observation)}, which does not belong to {space}")
        return np.asarray(spaces.flatten(space, observation))

    return num_values, from_box if isinstance(space, spaces.Box) else from_other


def _tell(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)}"
    name = type(value).__name__
    return f"{name} of {len(value)}" if isinstance(value, tuple | list | dict) else name


def _write(frame: Array, stack: Array) -> None:
    """Writes a frame into its place in a stack, float32 or uint8; raises BadAnswerError where it is not finite."""
    if stack.dtype == np.uint8:
        stack[-1] = frame
        return
    if not all(map(math.isfinite, frame.tolist() if frame.size <= 64 else [float(np.abs(frame).max())])):
        raise BadAnswerError(f"returned the observation {_shorten(frame.tolist())}, which is not finite")
    if frame.dtype != np.float32 and np.abs(frame).max() > MAX_VALUE:
        raise BadAnswerError(f"returned the observation {_shorten(frame.tolist())}, beyond what float32 can hold")
    stack[-1] = frame


def _number(reward: Any) -> float:
    """The reward of one step: a number, or an array of one."""
    if not isinstance(reward, float | int):
        array = np.asarray(reward)
        if array.size != 1 or array.dtype.kind not in "biuf":
            raise BadAnswerError(f"returned the reward {_shorten(reward)}, which is no number")
        reward = array.reshape(-1)[0]
    value = float(reward)
    if not abs(value) <= MAX_REWARD:
        told = f"not within +-{MAX_REWARD:g}" if np.isfinite(value) else "not finite"
        raise BadAnswerError(f"returned the reward {value:g}, which is {told}")
    return value


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_ | int | np.integer):
        raise BadAnswerError(f"returned {name} {_shorten(value)}, where True or False was asked for")
    return bool(value)


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
