"""Paths of the replay memory's files, their owners, and their removal."""

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from apex.errors import UsageError
from apex.runtime.file_lock import FileLock, is_owned

MEMORY = Path("/dev/shm")  # tmpfs on every Linux
CLAIM = "\0apex-run-{:016x}"  # name of an abstract socket, which has no file and disappears when its process ends


def store_path(run_id: int, shard: int = 0) -> Path:
    """Returns the path of a shard's memory, on the host of its replay server."""
    return MEMORY / f"apex-{run_id:016x}-{shard}.replay"


def beside(path: Path) -> Path:
    """Returns the path that a store has until it is complete."""
    return path.with_name(f"{path.stem}-partial{path.suffix}")


def in_use(path: Path) -> UsageError:
    """Returns the error for a store at `path` that another process owns."""
    return UsageError(f"the replay memory {path} is in use", "stop its replay server first")


def is_same_run(store: Path, other: Path) -> bool:
    """Returns whether both stores belong to the same run, judged by their file names."""
    return store.name.split("-")[:2] == other.name.split("-")[:2]


def counters_path(store: Path) -> Path:
    """Returns the path of the samplers' counters beside the store; see `sampler_counters.SamplerCounters`."""
    return store.with_suffix(".counters")


def memory_id(memory: Path = MEMORY) -> str:
    """Returns an id of this host's tmpfs: two programs with the same id see the same stores."""
    facts = os.stat(memory)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{facts.st_dev}:{facts.st_ino}"


def has_owner(path: Path) -> bool:
    """Returns whether a process writes to the store at `path`, or creates it."""
    return is_owned(beside(path)) or is_owned(path)  # This order does not miss a rename in between.


def is_wanted(path: Path) -> bool:
    """Returns whether the run of the store at `path` continues, or a process draws from the store."""
    with suppress(IndexError, ValueError):  # `path` is not the name of a store.
        if is_claimed(int(path.name.split("-")[1], 16)):
            return True
    try:
        descriptor = os.open(counters_path(path), os.O_RDWR)
    except FileNotFoundError:
        return False
    except PermissionError:  # The file belongs to another user.
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def remove(path: Path) -> bool:
    """Removes the store at `path` and an incomplete one at `beside(path)`; returns whether any existed.

    Raises UsageError if a process owns the store, or if it belongs to another user.
    """
    found = False
    for file in (beside(path), path):
        try:
            if file.lstat().st_uid != os.geteuid():
                raise UsageError(f"cannot remove the replay memory {file}: it belongs to another user")
            ownership = FileLock(file, in_use=in_use(file))
        except FileNotFoundError:
            continue
        except OSError as error:
            raise UsageError(f"cannot remove the replay memory {file}: {error.strerror}") from error
        counters_path(file).unlink(missing_ok=True)
        file.unlink(missing_ok=True)
        ownership.release()
        found = True
    return found


@contextmanager
def claim_run(run_id: int) -> Iterator[None]:
    """Makes `is_claimed` true during the context, so that the run's replay memory is not removed during restarts."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as claim:
        with suppress(OSError):  # Another process has already claimed the run.
            claim.bind(CLAIM.format(run_id))
        yield


def is_claimed(run_id: int) -> bool:
    """Returns whether a process on this host, in this network namespace, claims the run."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind(CLAIM.format(run_id))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False
