"""A lock on a file, which the kernel releases when the process that holds it ends."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from apex.errors import ConfigError

LOCK_ATTEMPTS = 20  # of a process to lock its own file ...
ATTEMPT_SECONDS = 0.01  # ... and between two of them


class FileLock:
    """Marks a file as owned by this process until `release`, or until the process ends in whatever way.

    The lock lasts while any descriptor of the open file lasts: a forked child (`start_child`) closes its copy at once.
    """

    _descriptors: set[int] = set()  # noqa: RUF012 - one per process, and a class attribute means just that

    def __init__(self, path: Path, attempts: int = 1, in_use: str = "") -> None:
        """Raises ConfigError with the message `in_use` if the file has an owner at each attempt.

        Several attempts: `is_owned` in another process holds the lock for an instant.
        """
        self._descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                attempts -= 1
                if not attempts:
                    os.close(self._descriptor)
                    raise ConfigError(in_use or f"{path} is in use by another process") from error
                time.sleep(ATTEMPT_SECONDS)
        self._descriptors.add(self._descriptor)

    def release(self) -> None:
        """Gives the file free. May be called again, and in a forked child, where it does nothing."""
        if self._descriptor in self._descriptors:
            self._descriptors.remove(self._descriptor)
            os.close(self._descriptor)

    @classmethod
    def forget(cls) -> None:
        """Closes the copies that a forked child has. The parent remains the owner."""
        for descriptor in cls._descriptors:
            os.close(descriptor)
        cls._descriptors.clear()


def is_owned(path: Path) -> bool:
    """Whether a process owns the file now; False if there is no such file, or if it is another user's."""
    try:
        FileLock(path).release()
    except ConfigError:
        return True
    except OSError:
        return False
    return False
