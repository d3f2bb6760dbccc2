"""A lock on a file. The kernel releases the lock when the process that holds it ends."""

import fcntl
import os
import time
from pathlib import Path

from apexreplay.errors import UsageError

LOCK_ATTEMPTS = 20  # number of times that a process tries to lock its own file
ATTEMPT_SECONDS = 0.01  # time between two attempts


class FileLock:
    """Marks a file as owned by this process until `release`, or until the process ends, even if it is killed.

    The lock lasts while any copy of the descriptor is open. So a forked child (`start_child`) closes its copy at once.
    """

    _descriptors: set[int] = set()  # noqa: RUF012 - shared on purpose: one set per process

    def __init__(self, path: Path, attempts: int = 1, in_use: UsageError | None = None, shared: bool = False) -> None:
        """Locks the file at `path`; raises `in_use`, a UsageError, if each attempt finds another owner.

        Several attempts are needed if another process calls `is_owned`, which holds the lock for a moment. A `shared`
        lock can have several owners.
        """
        self._descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        while True:
            try:
                fcntl.flock(self._descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                attempts -= 1
                if not attempts:
                    os.close(self._descriptor)
                    raise (in_use or UsageError(f"{path} is in use by another process")) from error
                time.sleep(ATTEMPT_SECONDS)
        self._descriptors.add(self._descriptor)

    def is_at(self, path: Path) -> bool:
        """Returns whether `path` still names the locked file: False if the file was removed or replaced."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), path.stat(follow_symlinks=False))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Releases the lock. A second call does nothing, and neither does a call in a forked child."""
        if self._descriptor in self._descriptors:
            self._descriptors.remove(self._descriptor)
            os.close(self._descriptor)

    @classmethod
    def forget(cls) -> None:
        """Closes the descriptors that a forked child has inherited. The parent keeps the locks."""
        for descriptor in cls._descriptors:
            os.close(descriptor)
        cls._descriptors.clear()


def is_owned(path: Path) -> bool:
    """Returns whether a process owns the file now; False if there is no such file or it belongs to another user."""
    try:
        FileLock(path).release()
    except UsageError:
        return True
    except OSError:
        return False
    return False
