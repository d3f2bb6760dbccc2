"""The errors that a program reports in one sentence, with their exit statuses."""

import os
import sysconfig
import traceback
from operator import index
from pathlib import Path
from typing import Any

FINISHED, FAILED, REFUSED, NEIGHBOUR_GONE = 0, 1, 2, 75  # exit statuses; 75 (EX_TEMPFAIL): try again
HOPELESS = 3  # exit status of a role that failed and that a restart does not help; the run ends with it too


# Beginnings of the file names of code that is not the user's; "<" is that of code without a file.
_not_own = ["<", *(f"{path}/" for path in (Path(__file__).parent, *map(sysconfig.get_path, ("stdlib", "purelib"))))]


class ApexError(Exception):
    """A program reports this error in one sentence and ends with `exit_status`."""

    exit_status = FAILED

    def __init__(self, problem: str = "", remedy: str = "") -> None:
        """`problem`: what is wrong, with the name and the value. `remedy`: what the user can do, in the imperative."""
        super().__init__(problem, remedy)
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.problem}; {self.remedy}" if self.remedy else self.problem


class UsageError(ApexError, ValueError):
    """The input of a program cannot be used: an option, a setting, a file, an address."""

    exit_status = REFUSED


class DataError(UsageError):
    """A file is missing, damaged or of another format. The message names the file and the reason."""


class SnapshotError(DataError):
    """A snapshot of the replay memory cannot be restored."""


class DamagedMemoryError(DataError):
    """The file of a replay memory cannot be used with any configuration."""


class ForeignFileError(DataError):
    """Another user created a file, or can read or change it."""


class LostMemoryError(ApexError, RuntimeError):
    """The file of a replay memory was removed or replaced while the replay server ran; the server is started again."""


class UnsavedMemoryError(ApexError, RuntimeError):
    """A server that was stopped could not save its memory in a last snapshot, and has kept it."""


class AddressError(UsageError):
    """An address cannot be bound."""


class ChildRefusedError(UsageError):
    """A child process refused its input and has logged the reason; restarting the role does not help."""


class ChildDiedError(ApexError, RuntimeError):
    """A child process ended unexpectedly. The role ends too and is started again with all its processes."""


def require(condition: bool, problem: str, error: type[UsageError] = UsageError, *, remedy: str = "") -> None:
    """Raises `error` with `problem` and `remedy` unless `condition` holds."""
    if not condition:
        raise error(problem, remedy)


def require_integer(name: str, value: Any, lowest: int, highest: int) -> int:
    """Returns `value` as an int. Raises UsageError unless it is an integer, perhaps of NumPy, from `lowest` on."""
    try:
        number = lowest - 1 if isinstance(value, bool) else index(value)
    except TypeError:
        number = lowest - 1
    require(lowest <= number <= highest, f"{name} must be an integer from {lowest} to {highest}, got {value!r}")
    return number


def count_as_own(folder: Path) -> None:
    """Makes `describe_exception` skip the code in this folder, because it is not the user's."""
    _not_own.append(f"{folder}/")


def describe_exception(error: BaseException) -> str:
    """Returns the type and the text of an exception, whose `__str__` may itself raise, and the line of the user's code.

    The line is the innermost one that belongs neither to these programs nor to an installed package.
    """
    where = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        path = frame.f_code.co_filename
        where = where if path.startswith(tuple(_not_own)) else f" ({os.path.basename(path)}, line {line})"
    try:
        return f"{type(error).__name__}: {error}{where}"
    except Exception:
        return f"{type(error).__name__} (its text cannot be read){where}"
