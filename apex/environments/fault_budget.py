"""Limits the faults of the environments in a process: tolerates rare faults, and fails on frequent ones."""

import logging

from apex.environments.answers import BadAnswerError
from apex.errors import EnvironmentFailure
from apexreplay.errors import UsageError, describe_exception

MAX_FAULTS = 10  # highest tolerated level of FaultBudget; a fault beyond it ends the process
FORGIVEN_STEPS = 1_000  # environment steps in which the level of FaultBudget falls by one fault

log = logging.getLogger("apex")


class FaultBudget:
    """A leaky bucket: each fault adds 1, each step removes a little. Steps are reproducible, but seconds are not."""

    def __init__(self, name: str, num_envs: int, *, is_trial: bool = False) -> None:
        """`name`: the id of the environment, as the user wrote it. `is_trial`: no fault is tolerated."""
        self.num_faults = 0
        self.faults = [0] * num_envs  # number of faults of each environment
        self._name = name
        self._num_envs = num_envs
        self._is_trial = is_trial
        self._num_steps = 0
        self._level = 0.0
        self._first = ""  # description of the first fault since the bucket was empty

    def step(self) -> None:
        """Records that every environment is about to be stepped once."""
        self._num_steps += 1
        self._level = max(0.0, self._level - self._num_envs / FORGIVEN_STEPS)

    def record(self, i: int, error: BaseException, where: str = "") -> None:
        """Records and logs a fault of environment i; raises EnvironmentFailure if the level exceeds MAX_FAULTS.

        In a trial, raises UsageError.
        """
        failure = self.failure(i, error, where)
        if self._is_trial:
            problem = f"environment.id {self._name!r} {self._describe(error, where)}"
            raise UsageError(problem, failure.remedy or "repair the environment") from error
        if self._level == 0:
            self._first = failure.problem
        self.num_faults += 1
        self.faults[i] += 1
        self._level += 1
        if self._level > MAX_FAULTS:
            more = f"more than {MAX_FAULTS} faults within a short time. First fault: {self._first}"
            raise EnvironmentFailure(f"{failure.problem}: {more}", failure.remedy) from error
        if self.num_faults.bit_count() == 1:  # Only the 1st, 2nd, 4th, 8th ...: there may be very many.
            message = "%s. Ending its episode and creating the environment again (fault %d in this process)"
            log.warning(message, failure, self.num_faults, exc_info=error)

    def failure(self, i: int | None, error: BaseException, where: str = "") -> EnvironmentFailure:
        """Returns an EnvironmentFailure that describes the fault of environment i; None: of all in a batch."""
        who = f"environment {i} of {self._num_envs}" if i is not None else f"the batch of {self._num_envs} environments"
        subject = f"{self._name}: {who}"
        remedy = error.remedy if isinstance(error, BadAnswerError) else ""
        return EnvironmentFailure(f"{subject} {self._describe(error, where)}", remedy)

    def _describe(self, error: BaseException, where: str) -> str:
        fault = str(error) if isinstance(error, BadAnswerError) else f"raised {describe_exception(error)}"
        return f"{fault}{f' ({where})' if where else ''}, at step {self._num_steps}"
