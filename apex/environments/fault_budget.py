"""How many faults of its environments a process bears: a few at once, and a rare one for ever."""

from __future__ import annotations

import logging

from apex.errors import ApexError

MAX_FAULTS = 10  # in a row; the one after that ends the process
FORGIVEN_STEPS = 1_000  # steps of one environment in which one fault is forgiven

log = logging.getLogger("apex")


class EnvironmentFailure(ApexError):  # noqa: N818  EnvironmentError is Python's old name of OSError.
    """An environment raised, or answered what no agent can learn from. The text names it, the value and the step."""


class BadAnswerError(ValueError):
    """An environment answered what no agent can learn from; the text goes on after "environment 3 of 16"."""


class FaultBudget:
    """A bucket that leaks: each fault pours into it, each step drains it. Steps, unlike seconds, are reproducible."""

    def __init__(self, name: str, num_envs: int) -> None:
        """`name` of the environment, as the user wrote it."""
        self.num_faults = 0
        self.faults = [0] * num_envs  # of each: what befalls one says nothing of another
        self._name = name
        self._num_envs = num_envs
        self._num_steps = 0
        self._level = 0.0
        self._first = ""  # fault since the bucket was empty

    def step(self) -> None:
        """Notes that every environment is about to be stepped once."""
        self._num_steps += 1
        self._level = max(0.0, self._level - self._num_envs / FORGIVEN_STEPS)

    def bear(self, i: int, error: BaseException, where: str = "") -> None:
        """Notes a fault of environment i, and logs it; raises EnvironmentFailure if it is one too many."""
        failure = self.failure(i, error, where)
        if self._level == 0:
            self._first = str(failure)
        self.num_faults += 1
        self.faults[i] += 1
        self._level += 1
        if self._level > MAX_FAULTS:
            raise EnvironmentFailure(
                f"{failure}: more than {MAX_FAULTS} faults in a row end it; the first: {self._first}"
            ) from error
        if self.num_faults.bit_count() == 1:  # The 1st, 2nd, 4th, 8th ...: a log has an end.
            words = "%s; its episode is cut off, and it is made anew (fault %d here)"
            log.warning(words, failure, self.num_faults, exc_info=error)

    def failure(self, i: int, error: BaseException, where: str = "") -> EnvironmentFailure:
        """The fault in words."""
        what = str(error) if isinstance(error, BadAnswerError) else f"raised {type(error).__name__}: {error}"
        told = f"{what} ({where})" if where else what
        return EnvironmentFailure(
            f"{self._name}: environment {i} of {self._num_envs} {told}, at step {self._num_steps}"
        )
