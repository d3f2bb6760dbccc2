"""Converts the agent's actions, 0 ... A - 1 or K values in [-1, 1], to an environment's action space."""

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces

from apex.config import EnvironmentConfig
from apexreplay.errors import UsageError, require
from apexreplay.item_kinds import Array

MAX_ACTIONS = 65_536  # maximum actions of a Discrete space
MAX_COMBINATIONS = 1_024  # maximum actions of a MultiDiscrete or MultiBinary space: one for each combination
MAX_ACTION_VALUES = 1_024  # maximum K of a Box space
MAX_BOUND = 1e9  # maximum absolute bound of a Box space; some environments declare the largest float32 instead of inf


class ActionForm(NamedTuple):
    """Converts the agent's actions to those of one environment."""

    num_actions: int  # A; 0 for continuous actions
    size: int  # K; 0 for discrete actions
    convert: Callable[[Any], Any]  # converts an int below A, or float32[K] in [-1, 1], to the environment's action
    code: str  # `convert` of `a`, as an expression of exported code, in which `space` is the action space

    def check(self, actions: Array) -> None:
        """Raises ValueError unless `actions` are int[E], each below A, or float[E, K] within [-1, 1]."""
        if self.size:
            if actions.shape[1:] != (self.size,) or not (np.abs(actions) <= 1).all():
                raise ValueError(f"each action must be {self.size} values within [-1, 1], got {actions.tolist()}")
        elif actions.ndim != 1 or actions.min() < 0 or actions.max() >= self.num_actions:
            raise ValueError(f"actions must be 0 ... {self.num_actions - 1}, got {actions.tolist()}")


def read_actions(env: gymnasium.Env[Any, Any], config: EnvironmentConfig) -> ActionForm:
    """Returns the form of an environment's actions; raises UsageError if its action space is not supported."""
    space, subject = env.action_space, f"environment.id {config.id!r} has the action space {env.action_space}"
    if isinstance(space, spaces.Discrete):
        first = int(space.start)
        require(space.n <= MAX_ACTIONS, f"environment.id {config.id!r} has {space.n} actions; maximum is {MAX_ACTIONS}")
        return ActionForm(int(space.n), 0, lambda action: first + int(action), "int(space.start + a)")
    if isinstance(space, spaces.MultiDiscrete):
        code = "space.start + np.reshape(np.unravel_index(a, space.nvec.reshape(-1)), space.shape)"
        return _read_combinations(space, space.nvec, space.start, subject, code)
    if isinstance(space, spaces.MultiBinary):
        twos = np.full(space.shape, 2)
        code = f"np.reshape(np.unravel_index(a, {[2] * twos.size}), space.shape).astype(space.dtype)"
        return _read_combinations(space, twos, np.zeros_like(twos), subject, code)
    if isinstance(space, spaces.Box):
        return _read_box(space, subject)
    problem = f"{subject}: only Discrete, MultiDiscrete, MultiBinary and Box are supported"
    raise UsageError(problem, "wrap the environment in a gymnasium.ActionWrapper with one of these action spaces")


def _read_combinations(space: spaces.Space[Any], counts: Array, first: Array, subject: str, code: str) -> ActionForm:
    """Returns a form with one action for each combination of values; the last value changes fastest."""
    values = [int(count) for count in counts.flat]
    problem = f"{subject}: {prod(values):,} combinations of values, but at most {MAX_COMBINATIONS:,} are supported"
    require(prod(values) <= MAX_COMBINATIONS, problem, remedy="use fewer values, or a Box of continuous values")

    def convert(action: int) -> Array:
        combination = np.array(np.unravel_index(action, values)).reshape(counts.shape)
        return (first + combination).astype(space.dtype)

    return ActionForm(prod(values), 0, convert, code)


def _read_box(space: spaces.Box, subject: str) -> ActionForm:
    """Returns a form that scales each value from [-1, 1] to [low, high]."""
    size = prod(space.shape)
    require(1 <= size <= MAX_ACTION_VALUES, f"{subject}: {size:,} values; 1 ... {MAX_ACTION_VALUES:,} are supported")
    is_float = np.issubdtype(space.dtype, np.floating)
    require(is_float, f"{subject}: integers are not supported", remedy="declare a Box of float32, or a MultiDiscrete")
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    problem = f"{subject} with a bound that is infinite or beyond {MAX_BOUND:g}, but actions are scaled to low ... high"
    remedy = "set the real bounds with a wrapper (gymnasium.wrappers.TransformAction)"
    require(bool((np.abs([low, high]) <= MAX_BOUND).all()), problem, remedy=remedy)

    def convert(action: Array) -> Array:
        share = (action.reshape(space.shape).astype(np.float64) + 1) / 2
        return np.clip(low + share * (high - low), low, high).astype(space.dtype)

    scaled = "space.low + (a.reshape(space.shape) + 1) / 2 * (space.high - space.low)"
    code = f"np.clip({scaled}, space.low, space.high).astype(space.dtype)"
    return ActionForm(0, size, convert, code)
