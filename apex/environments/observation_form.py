"""Converts an environment's observations to grayscale images or float32 vectors."""

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import cv2
import gymnasium
import numpy as np
from gymnasium import spaces

from apex.config import EnvironmentConfig
from apex.environments.answers import BadAnswerError, describe_type, shorten
from apexreplay.errors import UsageError, require
from apexreplay.item_kinds import Array

CHANNELS = {1: None, 3: cv2.COLOR_RGB2GRAY, 4: cv2.COLOR_RGBA2GRAY}  # number of channels -> conversion to grayscale
MAX_VALUES = 2**20  # maximum values of a vector observation
WRAPPERS = "gymnasium.wrappers.FilterObservation, or FlatObsWrapper and ImgObsWrapper of minigrid.wrappers"
REMEDY = "widen observation_space, or clip or convert the value with gymnasium.wrappers.TransformObservation"
SHAPE_REMEDY = "return what observation_space declares, or declare another space"
MIN_IMAGE_SIZE = 16  # pixels; a smaller image is probably a grid of cells, which resizing would blur


class ObservationForm(NamedTuple):
    """Converts the observations of one environment to frames."""

    shape: tuple[int, ...]
    dtype: Literal["uint8", "float32"]
    stack: int
    to_frame: Callable[[Any], Array]  # raises BadAnswerError for an observation outside of the declared space
    code: str  # `to_frame` of `x`, as an expression of exported code, in which `env` is the environment
    change: str = ""  # how `to_frame` changes images, in one sentence; "": unchanged


def read_observations(env: gymnasium.Env[Any, Any], config: EnvironmentConfig) -> ObservationForm:
    """Returns the form of an environment's observations; raises UsageError if the space is not supported."""
    observations = env.observation_space
    require(0 not in (observations.shape or ()), f"environment.id {config.id!r} has empty observations: {observations}")
    if isinstance(observations, spaces.Box) and observations.dtype == np.uint8 and len(observations.shape) in (2, 3):
        shape = (config.image_size, config.image_size)
        to_frame = _image_reader(observations, config)
        change = _describe_change(observations, config)
        return ObservationForm(shape, "uint8", config.frame_stack, to_frame, _image_code(observations, shape), change)
    num_values, to_frame = _vector_reader(observations, config)
    code = "spaces.flatten(env.observation_space, x).astype(np.float32)"
    return ObservationForm((num_values,), "float32", 1, to_frame, code)


def _image_reader(space: spaces.Box, config: EnvironmentConfig) -> Callable[[Any], Array]:
    """Returns a function that converts images [H, W] or [H, W, C] to grayscale, image_size x image_size."""
    channels = space.shape[2] if len(space.shape) == 3 else 1
    subject = f"environment.id {config.id!r} has images of shape {list(space.shape)}"
    problem = f"{subject}, expected [height, width] or [height, width, channels], with 1, 3 or 4 channels"
    require(channels in CHANNELS, problem, remedy="transpose them with a wrapper")
    problem = f"{subject}, which would be resized to {config.image_size} x {config.image_size}"
    remedy = "to learn from unchanged cells, use gymnasium.wrappers.FlattenObservation or declare the Box as float32"
    require(min(space.shape[:2]) >= MIN_IMAGE_SIZE, problem, remedy=remedy)
    cv2.setNumThreads(1)  # because images are small, and other processes use the other cores
    to_gray, size = CHANNELS[channels], (config.image_size, config.image_size)

    def to_frame(observation: Any) -> Array:
        image = np.ascontiguousarray(observation)
        if image.shape != space.shape or image.dtype != np.uint8:
            problem = f"returned an observation {describe_type(image)}, which does not belong to {space}"
            raise BadAnswerError(problem, SHAPE_REMEDY)
        gray = image.reshape(image.shape[:2]) if to_gray is None else cv2.cvtColor(image, to_gray)
        return gray if gray.shape == size else cv2.resize(gray, size, interpolation=cv2.INTER_AREA)

    return to_frame


def _image_code(space: spaces.Box, size: tuple[int, int]) -> str:
    """Returns the conversion of `_image_reader` as an expression of exported code."""
    conversion = {3: "RGB2GRAY", 4: "RGBA2GRAY"}.get(space.shape[-1] if len(space.shape) == 3 else 1)
    gray = f"cv2.cvtColor(x, cv2.COLOR_{conversion})" if conversion else f"x.reshape({space.shape[:2]})"
    return gray if space.shape[:2] == size else f"cv2.resize({gray}, {size}, interpolation=cv2.INTER_AREA)"


def _describe_change(space: spaces.Box, config: EnvironmentConfig) -> str:
    """Returns in words how images are changed for the agent; "" if they are not."""
    height, width, *channels = space.shape
    size = config.image_size
    changes = []
    if channels not in ([], [1]):
        changes.append("converted to grayscale")
    if (height, width) != (size, size):
        changes.append(f"resized to {size} x {size}")
    if not changes:
        return ""
    kind = "RGBA " if channels == [4] else "RGB " if channels == [3] else ""
    return f"{kind}images of {height} x {width} are {' and '.join(changes)} (--environment.image-size)"


def _parts_without_size(space: spaces.Space[Any], name: str = "") -> Iterator[tuple[str, spaces.Space[Any]]]:
    """Yields the keys, such as "goal.text", and spaces of the parts that cannot be flattened."""
    if isinstance(space, spaces.Text):  # Gymnasium flattens it to the indices of its characters, which mean nothing.
        yield name, space
        return
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        for key, part in parts:
            yield from _parts_without_size(part, f"{name}.{key}".lstrip("."))
        return
    try:
        spaces.flatdim(space)
    except (ValueError, NotImplementedError):
        yield name, space


def _find_violation(space: spaces.Space[Any], value: Any, name: str = "the observation") -> str:
    """Returns the first part of `value` that does not belong to its part of `space`, and the reason, in words."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts: Any = space.spaces if isinstance(space, spaces.Dict) else dict(enumerate(space.spaces))
        is_sequence = isinstance(space, spaces.Tuple) and isinstance(value, tuple | list | np.ndarray)
        given = dict(enumerate(value)) if is_sequence else value
        if not isinstance(given, dict) or given.keys() != parts.keys():
            return f"{name} {shorten(value)}, expected the parts {shorten([*parts])}"
        key = next(key for key, part in parts.items() if not part.contains(given[key]))
        return _find_violation(parts[key], given[key], f"{name}[{key!r}]")
    if isinstance(space, spaces.Box) and np.shape(value) == space.shape:
        array = np.asarray(value)
        outside = np.argwhere(~((array >= space.low) & (array <= space.high)))
        if not len(outside):
            return f"{name} {describe_type(array)}, expected values of {space.dtype}"
        place = tuple(outside[0])
        where = "".join(f"[{index}]" for index in place)
        return f"{name}{where} {array[place]:g}, which is outside of {space.low[place]:g} ... {space.high[place]:g}"
    return f"{name} {shorten(value)}, which does not belong to {shorten(space)}"


def _vector_reader(space: spaces.Space[Any], config: EnvironmentConfig) -> tuple[int, Callable[[Any], Array]]:
    """Returns the length of the vector for a space, and a function that converts observations to such vectors.

    A Box is flattened, a Discrete is one-hot encoded, and the parts of a Dict or Tuple are joined.
    """
    subject = f"environment.id {config.id!r} has the observation space {space}"
    for name, part in _parts_without_size(space):
        problem = f"environment.id {config.id!r} has observations whose {name or 'value'} is a {type(part).__name__}"
        remedy = f"leave it out or convert it: {WRAPPERS}; then give module:function, which returns the wrapped game"
        raise UsageError(f"{problem}, which has no fixed number of values", remedy)
    num_values = spaces.flatdim(space)
    problem = f"{subject}: {num_values:,} values, but 1 ... {MAX_VALUES:,} are supported"
    remedy = "return fewer values, or images as uint8 [height, width] or [height, width, channels]"
    require(1 <= num_values <= MAX_VALUES, problem, remedy=remedy)

    def from_box(observation: Any) -> Array:
        array = np.asarray(observation)
        if array.shape != space.shape:
            problem = f"returned an observation {describe_type(array)}, which does not belong to {space}"
            raise BadAnswerError(problem, SHAPE_REMEDY)
        return array.reshape(-1)

    def from_other(observation: Any) -> Array:
        if not space.contains(observation):  # In a one-hot vector, a negative index would wrap around.
            raise BadAnswerError(f"returned {_find_violation(space, observation)}", REMEDY)
        return np.asarray(spaces.flatten(space, observation))

    return num_values, from_box if isinstance(space, spaces.Box) else from_other
