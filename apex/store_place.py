"""Where a replay memory's file lies, who owns it, and who may remove it."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from apex.config import ConfigError

MEMORY = Path("/dev/shm")  # tmpfs on every Linux
OWNER_ATTEMPTS = 20  # of a writer to own its file ...
ATTEMPT_SECONDS = 0.01  # ... and between two of them


class Ownership:
    """Marks a file as owned by this process until `release`, or until the process ends in whatever way.

    The lock belongs to an open file, not to the process: it lasts while any descriptor of that open file lasts.
    So it is not the one that is mapped, and a forked child closes its copy at once.
    """

    _descriptors: set[int] = set()  # noqa: RUF012 - one per process, and a class attribute means just that

    def __init__(self, path: Path, attempts: int = 1) -> None:
        """Raises ConfigError if the file has an owner, at every one of the attempts.

        Whoever asks `has_owner` holds the lock for an instant: who means to keep it must not give up because of that.
        """
        self._descriptor = os.open(path, os.O_RDWR)
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                attempts -= 1
                if not attempts:
                    os.close(self._descriptor)
                    raise ConfigError(f"the replay memory {path} is in use: stop its replay server first") from error
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


os.register_at_fork(after_in_child=Ownership.forget)


def store_path(run_id: int, shard: int = 0) -> Path:
    """Where a shard of a run's memory lies, on whichever host its replay server runs."""
    return MEMORY / f"apex-{run_id:016x}-{shard}.replay"


def beside(path: Path) -> Path:
    """Where the store of that path lies while it is made."""
    return path.with_name(f"{path.stem}-partial{path.suffix}")


def is_same_run(store: Path, other: Path) -> bool:
    """Whether both stores are shards of one run, by their names."""
    return store.name.split("-")[:2] == other.name.split("-")[:2]


def board_path(store: Path) -> Path:
    """Where the counters of those who draw lie, beside the store; see `sampler.SamplerBoard`."""
    return store.with_suffix(".board")


def memory_id() -> str:
    """Names this host's tmpfs: two programs that get the same one see the same stores."""
    facts = os.stat(MEMORY)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{facts.st_dev}:{facts.st_ino}"


def has_owner(path: Path) -> bool:
    """Whether a writer has the store at `path` at present, or makes it."""
    return _is_owned(beside(path)) or _is_owned(path)  # In this order one that is renamed in between is seen.


def _is_owned(path: Path) -> bool:
    try:
        Ownership(path).release()
    except ConfigError:
        return True
    except FileNotFoundError:
        return False
    return False


def is_wanted(path: Path) -> bool:
    """Whether anybody lives who draws from the store at `path`: its writer may be away, and about to come back."""
    try:
        descriptor = os.open(board_path(path), os.O_RDWR)
    except FileNotFoundError:
        return False
    except PermissionError:  # Another user's, whose business it is.
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def remove(path: Path) -> bool:
    """Removes a store, or what is left of one or of its making, unless it has an owner. Returns whether any was."""
    found = False
    for file in (beside(path), path):
        try:
            ownership = Ownership(file)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise ConfigError(f"cannot remove the replay memory {file}: {error.strerror}") from error
        board_path(file).unlink(missing_ok=True)
        file.unlink(missing_ok=True)
        ownership.release()
        found = True
    return found
