"""Locks a run folder, so that only one launcher, or one learner that was started by hand, runs it at a time.

Also refuses folders whose files lead elsewhere: the programs of a run write to them without looking at each again.
"""

import os
import platform
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from apexreplay.errors import ForeignFileError, UsageError, require
from apexreplay.files.file_lock import LOCK_ATTEMPTS, FileLock, is_owned

LOCK = "run.lock"  # file in the run folder that is locked; its text names the process that holds the lock


@contextmanager
def hold(folder: Path, *, or_parent: bool = False) -> Iterator[None]:
    """Locks the run in `folder` for the duration of the context.

    The kernel releases the lock when this process ends, even if it is killed. Child processes do not hold the lock.
    Raises UsageError if the lock file cannot be written, or if another process holds the lock. With `or_parent`, the
    parent of this process may hold the lock. Raises ForeignFileError as `require_no_links` does.
    """
    require_no_links(folder)
    path = folder / LOCK
    with ExitStack() as held:
        try:
            path.touch(mode=0o600)  # 0600, because any user who can open the file can also lock it.
            held.callback(FileLock(path, LOCK_ATTEMPTS).release)
            path.write_text(_name(os.getpid()))
        except UsageError as error:
            holder = path.read_text(errors="replace") or "started a moment ago"
            if not or_parent or holder != _name(os.getppid()):
                raise UsageError(f"{folder}: this run is still running ({holder})", "stop it first") from error
        except OSError as error:
            remedy = "free disk space, or move the run to another disk"
            raise UsageError(f"cannot lock the run with {path}: {error.strerror}", remedy) from error
        yield


def require_no_links(folder: Path) -> None:
    """Raises ForeignFileError if a link in `folder` leads out of it, or if it has a pipe, on which a reader waits."""
    root = os.path.realpath(folder)
    for top, folders, files in os.walk(folder):
        for path in (Path(top, name) for name in (*folders, *files)):
            leads_out = path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(root)
            problem = f"{path} is a link out of the run folder, or a pipe: another user may have planted it"
            remedy = "remove it, or put what it leads to in its place"
            require(not leads_out and not path.is_fifo(), problem, ForeignFileError, remedy=remedy)


def is_held(folder: Path) -> bool:
    """Returns whether a process on this host runs the run in `folder`; False if this user may not read the lock."""
    return is_owned(folder / LOCK)


def _name(pid: int) -> str:
    return f"process {pid} on {platform.node()}"
