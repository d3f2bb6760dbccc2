"""Who runs a run while it goes on: one launcher, or one learner that was started by hand."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from apex.errors import ConfigError
from apex.runtime.file_lock import LOCK_ATTEMPTS, FileLock, is_owned

LOCK = "run.lock"  # in the run folder: the lock is on this file, its text only says whose it is


@contextmanager
def hold(folder: Path, *, or_parent: bool = False) -> Iterator[None]:
    """Within it nobody else may run what is in `folder`, whatever has become of the run's other programs.

    The lock ends with this process, in whatever way that ends, and no child has it. Raises ConfigError if another
    process holds it, unless `or_parent` and it is the one that has started this one; or if the file cannot be written.
    """
    path = folder / LOCK
    ownership: FileLock | None = None
    try:
        path.touch()
        ownership = FileLock(path, LOCK_ATTEMPTS)
        path.write_text(_name(os.getpid()))
    except ConfigError as error:
        holder = path.read_text(errors="replace") or "it has only just begun"
        if not or_parent or holder != _name(os.getppid()):
            raise ConfigError(f"{folder}: this run is still going; stop it first ({holder})") from error
    except OSError as error:
        if ownership is not None:
            ownership.release()
        raise ConfigError(f"cannot hold the run by {path}: {error.strerror}; make room, or move the run") from error
    try:
        yield
    finally:
        if ownership is not None:
            ownership.release()


def is_held(folder: Path) -> bool:
    """Whether somebody on this host runs what is in `folder` now, as far as this user may know."""
    try:
        return is_owned(folder / LOCK)
    except OSError:
        return False


def _name(pid: int) -> str:
    return f"process {pid} on {platform.node()}"
