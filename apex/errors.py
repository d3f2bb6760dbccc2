"""The errors that programs report in one sentence, with their exit statuses.

    ApexError                     status 1: the program failed
    ├── UsageError                status 2: the input cannot be used; a restart does not help
    │   ├── ConfigError           a setting is unknown, out of range, or in conflict with another
    │   ├── DataError             a file or replay memory is missing, damaged, or of another format
    │   │   ├── CheckpointError
    │   │   ├── SnapshotError
    │   │   ├── DamagedMemoryError
    │   │   └── ForeignFileError  a file of another user
    │   ├── AddressError          an address that cannot be bound
    │   ├── RefusedError          the learner refuses this program
    │   └── ChildRefusedError     a child process ended with status 2
    ├── DivergedError             status 3: the program failed, and a restart does not help
    ├── EnvironmentFailure        the user's environment failed
    ├── StoppedError              status 0: a stop was requested before the run began
    ├── ChildDiedError            a child process ended unexpectedly
    ├── LostMemoryError           the file of a replay memory was removed while the replay server ran
    ├── ExportError               a network cannot be written as ONNX
    ├── TrainingError             `apex.train` raises this if a run fails
    └── AwsError                  AWS refused a request or did not respond

Errors that a caller always handles (a message that breaks the protocol, a frame that cannot be decompressed) are
plain ValueErrors and RuntimeErrors, defined beside the code that raises them.
"""

import os
import sysconfig
import traceback
from pathlib import Path

from apexreplay.errors import FINISHED, HOPELESS, ApexError, DataError, UsageError

_NOT_OWN = ("<", *(f"{path}/" for path in (Path(__file__).parent, *map(sysconfig.get_path, ("stdlib", "purelib")))))


class ConfigError(UsageError):
    """A setting does not exist, is out of range, or is in conflict with another setting."""


class CheckpointError(DataError):
    """A checkpoint of the learner cannot be loaded."""


class AddressError(UsageError):
    """An address cannot be bound."""


class RefusedError(UsageError):
    """The learner refuses this program; the message gives the reason."""


class ChildRefusedError(UsageError):
    """A child process refused its input and has logged the reason; restarting the role does not help."""


class ChildDiedError(ApexError, RuntimeError):
    """A child process ended unexpectedly. The role ends too and is started again with all its processes."""


class DivergedError(ApexError, RuntimeError):
    """Training can make no more progress: losses, gradients or parameters are not finite."""

    exit_status = HOPELESS


class EnvironmentFailure(ApexError):  # noqa: N818  EnvironmentError is Python's old name of OSError.
    """An environment raised an exception or returned values that cannot be learned from. The message names the
    environment, the value and the step."""


class StoppedError(ApexError):
    """The user requested a stop before the run began."""

    exit_status = FINISHED


class ExportError(ApexError, RuntimeError):
    """The network cannot be written as ONNX, or the ONNX file computes other values than the network."""


class TrainingError(ApexError, RuntimeError):
    """A run ended with an error. The message describes the error that occurred first."""

    def __init__(self, problem: str, folder: Path | None) -> None:
        """`folder`: folder with the logs and checkpoints; None if the run had not started."""
        super().__init__(problem)
        self.folder = folder


class AwsError(ApexError, RuntimeError):
    """AWS refused a request or did not respond. `code` is the error's name in AWS or botocore."""

    def __init__(self, problem: str, code: str = "") -> None:
        super().__init__(problem)
        self.code = code


def describe_exception(error: BaseException) -> str:
    """Returns the type and the text of an exception, whose `__str__` may itself raise, and the line of the user's code.

    The line is the innermost one that belongs neither to this package nor to an installed one.
    """
    where = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        path = frame.f_code.co_filename
        where = where if path.startswith(_NOT_OWN) else f" ({os.path.basename(path)}, line {line})"
    try:
        return f"{type(error).__name__}: {error}{where}"
    except Exception:
        return f"{type(error).__name__} (its text cannot be read){where}"
