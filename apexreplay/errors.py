"""The errors that a program reports in one sentence, with their exit statuses."""

FINISHED, FAILED, REFUSED, NEIGHBOUR_GONE = 0, 1, 2, 75  # exit statuses; 75 (EX_TEMPFAIL): try again
HOPELESS = 3  # exit status of a role that failed and that a restart does not help; the run ends with FAILED


# Beginnings of the file names of code that is not the user's; "<" is that of code without a file.
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


def require(condition: bool, problem: str, error: type[UsageError] = UsageError, *, remedy: str = "") -> None:
    """Raises `error` with `problem` and `remedy` unless `condition` holds."""
    if not condition:
        raise error(problem, remedy)
