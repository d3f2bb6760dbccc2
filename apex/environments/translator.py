"""Translates between an environment's own observations and actions, and those of the agent."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, iterate
from numpy.typing import NDArray

from apex.config import EnvironmentConfig
from apex.environments.answers import BadAnswerError, describe_type, write_frame
from apex.environments.factory import read_forms
from apexreplay.errors import UsageError
from apexreplay.item_kinds import Array


class Translator:
    """Translates for one environment, or for the batches of a vector environment.

    Of images, the agent sees the last S frames. The translator keeps them until `reset`.
    """

    def __init__(self, config: EnvironmentConfig) -> None:
        """Creates the environment once, to read its spaces; raises UsageError if it cannot be created."""
        self._id = config.id
        self._space, self._form, self._actions = read_forms(config)
        self._batch_space = batch_space(self._space)
        self._stacks: Array | None = None

    @property
    def num_environments(self) -> int | None:
        """Number of environments whose frames are kept; None before the first call."""
        return None if self._stacks is None else len(self._stacks)

    def reset(self, ended: NDArray[np.bool_] | None = None) -> None:
        """Forgets the frames of earlier calls, in the environments `ended`, bool[B]; None: in all."""
        if ended is None:
            self._stacks = None
        elif self._stacks is not None:
            self._stacks[ended] = 0

    def prepare(self, observation: Any) -> tuple[Array, bool]:
        """Returns the agent's observations, frame_dtype[B, S, *F], and whether `observation` is a single one.

        Raises UsageError if `observation` is neither an element of the observation space nor a batch of elements.
        """
        form = self._form
        try:
            is_one = self._is_one(observation)
            rows = [observation] if is_one else list(iterate(self._batch_space, observation))
            if self._stacks is None or len(self._stacks) != len(rows):
                self._stacks = np.zeros((len(rows), form.stack, *form.shape), form.dtype)
            stacks = np.roll(self._stacks, -1, axis=1)  # `write_frame` overwrites the oldest frame.
            for stack, row in zip(stacks, rows, strict=True):
                write_frame(form.to_frame(row), stack)
        except (BadAnswerError, LookupError, TypeError, ValueError) as error:
            problem = f"{describe_type(observation)} is not an observation of {self._id}, whose space is {self._space}"
            remedy = "pass what env.reset or env.step returned; Policy.act takes prepared observations"
            if isinstance(observation, tuple) and len(observation) == 2 and isinstance(observation[1], Mapping):
                remedy = "env.reset returns the observation and an info: pass the first of them"
            raise UsageError(f"{problem}: {error}", remedy) from error
        self._stacks = stacks
        return stacks.copy(), is_one

    def convert(self, actions: Array, *, is_one: bool) -> Any:
        """Converts the agent's actions, int64[B] or float32[B, K], to the action or the batch for `env.step`."""
        converted = [self._actions.convert(action) for action in actions]
        return converted[0] if is_one else np.stack(converted)

    def _is_one(self, observation: Any) -> bool:
        """Returns whether the first part of `observation` has as many axes as the space."""
        space, part = self._space, observation
        while isinstance(space, spaces.Dict | spaces.Tuple):
            key: Any = next(iter(space)) if isinstance(space, spaces.Dict) else 0
            if isinstance(space, spaces.Dict) and not isinstance(part, Mapping):
                raise TypeError("it is not a dict")
            space, part = space[key], part[key]
        return np.ndim(part) == len(space.shape or ())
