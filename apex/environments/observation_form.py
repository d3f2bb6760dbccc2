"""Converts an environment's observations to frames: images, grids, vectors, or the bytes of several parts."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, NamedTuple

import cv2
import gymnasium
import numpy as np
from gymnasium import spaces

from apex.config import EnvironmentConfig
from apex.environments.answers import BadAnswerError, check_finite, describe_type, shorten
from apex.schema import MIN_IMAGE_SIZE, Part
from apexreplay.errors import require
from apexreplay.item_kinds import Array

CHANNELS = {1: None, 3: cv2.COLOR_RGB2GRAY, 4: cv2.COLOR_RGBA2GRAY}  # number of channels -> conversion to grayscale
MOST_CHANNELS = 256  # of a grid; more are a vector
MAX_VALUES = 2**20  # maximum values of a vector observation
MAX_BYTES = 2**22  # maximum bytes of a frame
MOST_JOINED = 64  # values of a vector that is stored as float32, even if its parts are integers
WRAPPERS = "gymnasium.wrappers.FilterObservation, or FlatObsWrapper and ImgObsWrapper of minigrid.wrappers"
REMEDY = "widen observation_space, or clip or convert the value with gymnasium.wrappers.TransformObservation"
SHAPE_REMEDY = "return what observation_space declares, or declare another space"


class ObservationForm(NamedTuple):
    """Converts the observations of one environment to frames."""

    shape: tuple[int, ...]
    dtype: Literal["uint8", "float32"]
    stack: int
    to_frame: Callable[[Any], Array]  # raises BadAnswerError for an observation outside of the declared space
    code: str  # `to_frame` of `x`, as an expression of exported code, in which `env` is the environment
    change: str = ""  # what `to_frame` changes or leaves out, in one sentence; "": nothing
    parts: tuple[Part, ...] = ()  # see `Schema.parts`; `code` is then a dictionary of them


class _Reader(NamedTuple):
    """Converts one part of an observation."""

    part: Part
    read: Callable[[Any], Array]  # the part's value -> dtype[*shape]; bools are not packed
    code: str  # `read` of `x`
    change: str = ""


def read_observations(env: gymnasium.Env[Any, Any], config: EnvironmentConfig) -> ObservationForm:
    """Returns the form of an environment's observations; raises UsageError if the space is not supported."""
    space, subject, stack = env.observation_space, f"environment.id {config.id!r}", config.frame_stack or 1
    require(0 not in (space.shape or ()), f"{subject} has empty observations: {space}")
    leaves = list(_leaves(space))
    texts = [keys for keys, leaf in leaves if _is_text(leaf)]
    leaves = [(keys, leaf) for keys, leaf in leaves if not _is_text(leaf)]
    for keys, leaf in leaves:
        problem = f"{subject} has observations whose {_name(keys) or 'value'} is a {type(leaf).__name__}"
        remedy = f"leave it out or convert it: {WRAPPERS}; then give module:function, which returns the wrapped game"
        require(_num_values(leaf) > 0, f"{problem}, which has no fixed number of values", remedy=remedy)
    require(bool(leaves), f"{subject} has observations without numbers: {space}", remedy="add a Box")
    ignored = [f"the text of {' and '.join(map(_name, texts))} is ignored"] if texts else []
    wide = [(keys, leaf) for keys, leaf in leaves if isinstance(leaf, spaces.Box) and not _is_small(leaf)]
    floats = [f"{_name(keys)} {_describe(leaf)}".strip() for keys, leaf in wide if _has_image_axes(leaf)]
    ignored += [f"images must be uint8, so a vector is made of {' and '.join(floats)}"] * bool(floats)
    num_values = sum(_num_values(leaf) for _, leaf in leaves)
    is_float = all(isinstance(leaf, spaces.Box) and not _is_small(leaf) for _, leaf in leaves)
    is_flat = all(len(leaf.shape or ()) < 2 or not _is_small(leaf) for _, leaf in leaves)
    if not texts and (is_float or (is_flat and num_values <= MOST_JOINED)):
        problem = f"{subject} has the observation space {space}: {num_values:,} values"
        remedy = "return fewer values, or images as uint8 [height, width] or [height, width, channels]"
        require(num_values <= MAX_VALUES, f"{problem}, but 1 ... {MAX_VALUES:,} are supported", remedy=remedy)
        code = "spaces.flatten(env.observation_space, x).astype(np.float32)"
        return ObservationForm((num_values,), "float32", stack, _vector_reader(space), code, "; ".join(ignored))
    readers = [_read_part(keys, leaf, config) for keys, leaf in leaves]
    parts = tuple(reader.part for reader in readers)
    change = "; ".join([*ignored, *(reader.change for reader in readers if reader.change)])
    num_bytes = sum(part.num_bytes for part in parts)
    problem = f"{subject} has observations of {num_bytes:,} bytes, but {MAX_BYTES:,} are supported"
    require(num_bytes <= MAX_BYTES, problem, remedy="set environment.image_size, or return fewer values")
    take = [partial(_take, keys=keys) for keys, _ in leaves]

    def check(observation: Any) -> None:
        if not space.contains(observation):
            raise BadAnswerError(f"returned {_find_violation(space, observation)}", REMEDY)

    def to_vector(observation: Any) -> Array:
        check(observation)
        return readers[0].read(observation)

    def to_frame(observation: Any) -> Array:
        check(observation)
        return np.concatenate(
            [_to_bytes(reader.read(get(observation)), reader.part) for get, reader in zip(take, readers, strict=True)]
        )

    if space is leaves[0][1] and parts[0].dtype == "uint8" and parts[0].most == 255:
        read = to_vector if len(parts[0].shape) == 1 else readers[0].read  # Readers of images check them.
        return ObservationForm(parts[0].shape, "uint8", stack, read, readers[0].code, change)

    code = ", ".join(
        f"{part.name!r}: (lambda x: {reader.code})(x{''.join(f'[{key!r}]' for key in keys)})"
        for (keys, _), part, reader in zip(leaves, parts, readers, strict=True)
    )
    return ObservationForm((num_bytes,), "uint8", stack, to_frame, f"{{{code}}}", change, parts)


def _has_image_axes(space: spaces.Space[Any]) -> bool:
    """Returns whether a part has two axes that are long enough for an image."""
    return sorted(space.shape or ())[-2:-1] >= [MIN_IMAGE_SIZE]


def _describe(space: spaces.Box) -> str:
    return f"{space.dtype}{list(space.shape)}"


def _leaves(
    space: spaces.Space[Any], keys: tuple[Any, ...] = ()
) -> Iterator[tuple[tuple[Any, ...], spaces.Space[Any]]]:
    """Yields the keys and the spaces of all parts that have no parts themselves."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        for key, part in space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces):
            yield from _leaves(part, (*keys, key))
    else:
        yield keys, space


def _is_text(space: spaces.Space[Any]) -> bool:
    """Whether the values are texts: of `spaces.Text`, or of a space of the user, such as MiniGrid's missions."""
    return space.dtype is not None and space.dtype.kind == "U"


def _name(keys: tuple[Any, ...]) -> str:
    return ".".join(map(str, keys))


def _take(observation: Any, keys: tuple[Any, ...]) -> Any:
    for key in keys:
        observation = observation[key]
    return observation


def _num_values(space: spaces.Space[Any]) -> int:
    """Returns the length of the flattened space; 0 if it has none."""
    try:
        return spaces.flatdim(space)
    except (ValueError, NotImplementedError):
        return 0


def _is_small(space: spaces.Space[Any]) -> bool:
    """Whether the values take one byte, as they come."""
    return isinstance(space, spaces.Box) and space.dtype in (np.uint8, np.bool_)


def _to_bytes(array: Array, part: Part) -> Array:
    """Returns the array as `Part` describes it, uint8[num_bytes]."""
    if part.dtype == "bool":
        return np.packbits(array, bitorder="little")
    return np.ascontiguousarray(array, part.dtype).reshape(-1).view(np.uint8)


def _read_part(keys: tuple[Any, ...], space: spaces.Space[Any], config: EnvironmentConfig) -> _Reader:
    name, num_values = _name(keys) or "observation", _num_values(space)
    if _is_small(space) and 2 <= len(space.shape or ()) <= 3:
        assert isinstance(space, spaces.Box)
        if len(space.shape) == 2 or _channels(space) <= MOST_CHANNELS:
            return _image_reader(name, space, config)
    if isinstance(space, spaces.Box) and _is_small(space):
        is_stack = len(space.shape) == 4 and _has_image_axes(space) and {*space.shape} & {*CHANNELS}
        problem = f"{name} has several images: {_describe(space)}"
        remedy = "leave out the wrapper that stacks frames, and set environment.frame_stack"
        require(not is_stack, problem, remedy=remedy)
        is_bool = space.dtype == np.bool_
        part = Part(name, "bool" if is_bool else "uint8", (num_values,), max(1, int(space.high.max())))
        return _Reader(part, lambda value: np.reshape(value, -1), "np.reshape(x, -1)")
    if isinstance(space, spaces.MultiBinary):
        part = Part(name, "bool", (num_values,), 1)
        return _Reader(part, lambda value: np.reshape(value, -1) > 0, "np.reshape(x, -1) > 0")
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        sizes = np.reshape(getattr(space, "nvec", num_values), -1)
        first = np.cumsum(sizes) - sizes - np.reshape(space.start, -1)  # All categories of a part are counted together.
        part = Part(name, "int32", (len(sizes),), num_values - 1)
        read = lambda value: (np.reshape(value, -1) + first).astype(np.int32)  # noqa: E731
        return _Reader(part, read, f"(np.reshape(x, -1) + {first.tolist()}).astype(np.int32)")

    def flatten(value: Any) -> Array:
        frame: Array = np.asarray(spaces.flatten(space, value), np.float32)
        check_finite(frame)
        return frame

    code = "np.reshape(x, -1).astype(np.float32)"
    return _Reader(Part(name, "float32", (num_values,)), flatten, code)


def _channels(space: spaces.Box) -> int:
    return space.shape[0 if _is_channels_first(space) else 2]


def _is_channels_first(space: spaces.Box) -> bool:
    """Whether an array with three axes is [C, H, W]: axes of equal size, or both of the size of images, are [H, W]."""
    first, middle, last = space.shape
    if middle in (first, last):
        return middle == last != first
    return last not in CHANNELS and (first in CHANNELS or first < MIN_IMAGE_SIZE <= min(middle, last))


def _image_reader(name: str, space: spaces.Box, config: EnvironmentConfig) -> _Reader:
    """Returns the reader of an image or a grid, which becomes [H, W] or [H, W, C]. Only images can be changed."""
    shape: tuple[int, ...] = space.shape
    steps: list[tuple[Callable[[Array], Any], str]] = []  # conversions, and their code
    if len(shape) == 3 and _is_channels_first(space):
        steps.append((lambda x: np.moveaxis(x, 0, -1), "np.moveaxis({}, 0, -1)"))
        shape = (*shape[1:], shape[0])
    part = Part(name, "bool" if space.dtype == np.bool_ else "uint8", shape)
    changes = []
    if part.is_image:
        channels = shape[2] if len(shape) == 3 else 1
        problem = f"environment.id {config.id!r} has images of shape {list(space.shape)}"
        problem += ", expected [height, width] or [height, width, channels], with 1, 3 or 4 channels"
        require(channels in CHANNELS, problem, remedy="transpose them with a wrapper")
        if config.image_crop:
            top, bottom, left, right = map(int, config.image_crop.replace(",", ":").split(":"))
            problem = f"environment.image_crop {config.image_crop} does not lie in images of {shape[0]} x {shape[1]}"
            require(top < bottom <= shape[0] and left < right <= shape[1], problem)
            steps.append((lambda x: x[top:bottom, left:right], f"{{}}[{top}:{bottom}, {left}:{right}]"))
            shape = (bottom - top, right - left, *shape[2:])
            changes.append(f"cropped to {shape[0]} x {shape[1]}")
        most = max(1, int(space.high.max()))
        if (factor := 255 // most) > 1:  # Networks divide images by 255.
            steps.append((lambda x: np.minimum(x, most) * factor, f"(np.minimum({{}}, {most}) * {factor})"))
            changes.append(f"multiplied by {factor}")
        to_gray = CHANNELS[channels]
        if config.grayscale and to_gray is not None:
            code = f"cv2.cvtColor(np.ascontiguousarray({{}}), cv2.COLOR_RGB{'A' * (channels == 4)}2GRAY)"
            steps.append((lambda x: cv2.cvtColor(np.ascontiguousarray(x), to_gray), code))
            shape = shape[:2]
            changes.append("converted to grayscale")
        side = config.image_size
        if side is not None and shape[:2] != (side, side):
            size = (side, side)
            code = f"cv2.resize(np.ascontiguousarray({{}}), {size}, interpolation=cv2.INTER_AREA)"
            steps.append((lambda x: cv2.resize(np.ascontiguousarray(x), size, interpolation=cv2.INTER_AREA), code))
            shape = (*size, *shape[2:])
            changes.append(f"resized to {side} x {side}")
        cv2.setNumThreads(1)  # because images are small, and other processes use the other cores
    if shape[2:] == (1,):
        shape = shape[:2]
        steps.append((lambda x: np.reshape(x, shape), f"np.reshape({{}}, {shape})"))
    code = "x"
    for _, template in steps:
        code = template.format(code)

    def read(value: Any) -> Array:
        image = np.asarray(value)
        if image.shape != space.shape or image.dtype != space.dtype:
            problem = f"returned an observation {describe_type(image)}, which does not belong to {space}"
            raise BadAnswerError(problem, SHAPE_REMEDY)
        for convert, _ in steps:
            image = convert(image)
        return image

    return _Reader(part._replace(shape=shape), read, code, _describe_changes(name, part, changes))


def _describe_changes(name: str, part: Part, changes: list[str]) -> str:
    if not changes:
        return ""
    height, width, *channels = part.shape
    kind = "RGBA " if channels == [4] else "RGB " if channels == [3] else ""
    whose = f" in {name!r}" if name != "observation" else ""
    return f"{kind}images of {height} x {width}{whose} are {' and '.join(changes)}"


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


def _vector_reader(space: spaces.Space[Any]) -> Callable[[Any], Array]:
    """Returns a function that converts observations to vectors. A Discrete becomes one-hot, and parts are joined."""

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

    return from_box if isinstance(space, spaces.Box) else from_other
