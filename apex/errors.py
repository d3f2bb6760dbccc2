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
    ├── UnsavedMemoryError        a server could not save its memory at its end
    ├── MirrorError               the mirror of a run cannot be read or written
    ├── FencedError               status 2: another host has continued this run
    ├── ExportError               a network cannot be written as ONNX
    ├── TrainingError             `apex.train` raises this if a run fails
    └── AwsError                  AWS refused a request or did not respond

Errors that a caller always handles (a message that breaks the protocol, a frame that cannot be decompressed) are
plain ValueErrors and RuntimeErrors, defined beside the code that raises them.
"""

from pathlib import Path

from apexreplay.errors import FINISHED, HOPELESS, REFUSED, ApexError, DataError, UsageError, count_as_own

count_as_own(Path(__file__).parent)


class ConfigError(UsageError):
    """A setting does not exist, is out of range, or is in conflict with another setting."""


class CheckpointError(DataError):
    """A checkpoint of the learner cannot be loaded."""


class RefusedError(UsageError):
    """The learner refuses this program; the message gives the reason."""


class DivergedError(ApexError, RuntimeError):
    """Training can make no more progress: losses, gradients or parameters are not finite."""

    exit_status = HOPELESS


class EnvironmentFailure(ApexError):  # noqa: N818  EnvironmentError is Python's old name of OSError.
    """An environment raised an exception or returned values that cannot be learned from. The message names the
    environment, the value and the step."""


class StoppedError(ApexError):
    """The user requested a stop before the run began."""

    exit_status = FINISHED


class MirrorError(ApexError, RuntimeError):
    """The mirror of a run cannot be read or written."""


class FencedError(ApexError, RuntimeError):
    """Another host has continued this run: this host must neither train it nor write its mirror."""

    exit_status = REFUSED


class ExportError(ApexError, RuntimeError):
    """The network cannot be written as ONNX, or the ONNX file computes other values than the network."""


class TrainingError(ApexError, RuntimeError):
    """A run ended with an error. The message describes the error that occurred first."""

    def __init__(self, problem: str, folder: Path | None) -> None:
        """`folder`: folder with the logs and checkpoints; None if the run had not started."""
        super().__init__(problem)
        self.folder = folder


class AwsError(ApexError, RuntimeError):
    """AWS refused a request or did not respond."""
