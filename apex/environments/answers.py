"""Checks and converts the values that an environment returns: observations, rewards, flags and action masks."""

import logging
import math
from collections.abc import Mapping
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apex.metric_tags import MAX_METRICS, SUCCESS
from apexreplay.item_kinds import Array

# Maximum |reward| of a step. With n <= 64, returns stay below 1e15, beyond which the learner skips them.
MAX_REWARD = 1e13
MAX_VALUE = float(np.finfo(np.float32).max)  # maximum |value| in an observation
MASK = "action_mask"  # key in `info`, as in Gymnasium's own environments
# Entries of `info` with metrics of an episode; a vector environment adds which of its environments have them.
METRICS = ("is_success", "metrics", "_is_success", "_metrics")
MAX_NAME = 64  # maximum characters in the name of a metric

NUM_CHECKED_STEPS = 1_000  # number of steps of the first environment whose scale is checked
LARGE_OBSERVATION = 100.0  # networks for vectors expect values of about 1
LARGE_REWARD = 200.0  # Q-values in the thousands are learned slowly, because every gradient is clipped

log = logging.getLogger("apex")


class BadAnswerError(ValueError):
    """An environment returned a bad value. The text continues the sentence "environment 3 of 16 ..."."""

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(problem)
        self.remedy = remedy


def describe_type(value: Any) -> str:
    """Returns a short description of the type and size of a value, for messages."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)}"
    name = type(value).__name__
    return f"{name} of {len(value)}" if isinstance(value, tuple | list | dict) else name


def write_frame(frame: Array, stack: Array) -> None:
    """Writes a frame to the last place of a stack. Raises BadAnswerError unless all values are finite as float32."""
    if stack.dtype != np.uint8:
        check_finite(frame)
    stack[-1] = frame


def check_finite(frame: Array) -> None:
    """Raises BadAnswerError unless all values are finite as float32."""
    if not all(map(math.isfinite, frame.tolist() if frame.size <= 64 else [float(np.abs(frame).max())])):
        raise BadAnswerError(f"returned the observation {shorten(frame.tolist())}, which is not finite")
    if frame.dtype != np.float32 and np.abs(frame).max() > MAX_VALUE:
        raise BadAnswerError(f"returned the observation {shorten(frame.tolist())}, which is too large for float32")


def read_reward(reward: Any) -> float:
    """Returns the reward of one step as a float; raises BadAnswerError unless it is a finite number or array of one."""
    if not isinstance(reward, float | int):
        array = np.asarray(reward)
        if array.size != 1 or array.dtype.kind not in "biuf":
            raise BadAnswerError(f"returned the reward {shorten(reward)}, which is not a number")
        reward = array.reshape(-1)[0]
    value = float(reward)
    if not abs(value) <= MAX_REWARD:
        reason = f"not within +-{MAX_REWARD:g}" if np.isfinite(value) else "not finite"
        raise BadAnswerError(f"returned the reward {value:g}, which is {reason}")
    return value


def read_flag(name: str, value: Any) -> bool:
    """Returns the flag `terminated` or `truncated`; raises BadAnswerError unless it is a bool or an integer."""
    if not isinstance(value, bool | np.bool_ | int | np.integer):
        raise BadAnswerError(f"returned {name} {shorten(value)}, expected True or False")
    return bool(value)


def shorten(value: Any) -> str:
    """Returns the repr of a value, at most 80 characters of it."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def read_picture(picture: Any) -> NDArray[np.uint8]:
    """Returns a rendered picture; raises BadAnswerError unless it is uint8[H, W, 3]."""
    if not (isinstance(picture, np.ndarray) and picture.dtype == np.uint8 and picture.shape[2:] == (3,)):
        raise BadAnswerError(f"rendered {describe_type(picture)}, expected uint8[H, W, 3]")
    return picture


def has_mask(info: Any) -> bool:
    """Returns whether `info` has an action mask."""
    return isinstance(info, Mapping) and MASK in info


def read_mask(info: Any, num_actions: int) -> NDArray[np.bool_]:
    """Returns the allowed actions, bool[A]; raises BadAnswerError for a bad mask or one that allows no action.

    A mask is an array, list or tuple of A zeros and ones. For a MultiDiscrete space it may also be a tuple with one
    array for each part of the space, as Gymnasium's `MultiDiscrete.sample` expects it.
    """
    if not has_mask(info):
        raise BadAnswerError(f"returned an info without {MASK!r}, although an earlier info had one")
    given = info[MASK]
    mask = join_masks(given)
    if mask.size != num_actions or mask.dtype.kind not in "biuf" or not ((mask == 0) | (mask == 1)).all():
        raise BadAnswerError(f"returned the {MASK} {shorten(given)}, expected {num_actions} zeros and ones")
    if not mask.any():
        raise BadAnswerError(f"returned an {MASK} that allows no action, although the episode has not ended")
    return mask.astype(np.bool_)


def join_masks(given: Any) -> NDArray[Any]:
    """Returns a mask as one row: of a tuple with an array for each part of a space, one value for each combination."""
    is_product = isinstance(given, tuple) and any(np.ndim(part) for part in given)
    parts = [np.asarray(part) for part in (given if is_product else (given,))]
    return reduce(np.multiply.outer, parts).reshape(-1)


def read_metrics(info: Any) -> dict[str, float]:
    """Returns the metrics of an episode from the `info` of its last step: "is_success", and the numbers in "metrics".

    Ignores values that are not finite numbers, long and unprintable names, and metrics above MAX_METRICS.
    """
    info = info if isinstance(info, Mapping) else {}
    more = info.get("metrics")
    found: dict[str, float] = {}
    for name, value in {SUCCESS: info.get("is_success"), **(more if isinstance(more, Mapping) else {})}.items():
        number = value.item() if isinstance(value, np.ndarray | np.generic) and value.size == 1 else value
        is_name = isinstance(name, str) and 0 < len(name) <= MAX_NAME and name.isascii() and name.isprintable()
        if is_name and isinstance(number, int | float) and abs(number) <= MAX_REWARD and len(found) < MAX_METRICS:
            found[name] = float(number)
    return found


class ScaleCheck:
    """Checks the first steps of one environment; logs at most one warning each for observations and rewards."""

    def __init__(self, name: str, *, clip_rewards: bool) -> None:
        """`name`: id of the environment. Clipped rewards are not checked."""
        self._name = name
        self._steps_left = NUM_CHECKED_STEPS
        self._limits = {"observations": LARGE_OBSERVATION, "rewards": math.inf if clip_rewards else LARGE_REWARD}

    def check(self, frame: Array, reward: float) -> None:
        """Checks the frame [*F] of one step, if it is a vector, and its raw reward."""
        if self._steps_left:
            self._steps_left -= 1
            largest = float(np.abs(frame).max()) if frame.dtype != np.uint8 else 0.0
            self._check("observations", largest, "TransformObservation")
            self._check("rewards", reward, "TransformReward, or set --environment.clip-rewards")

    def _check(self, kind: str, value: float, remedy: str) -> None:
        if abs(value) > self._limits[kind]:
            self._limits[kind] = math.inf  # Warn once.
            text = "%s: %s reach %.3g; values of about 1 are learned faster. Scale them with gymnasium.wrappers.%s"
            log.warning(text, self._name, kind, value, remedy)
