"""Where a replay memory's file lies, who owns it, and who may remove it."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from apex.errors import ConfigError
from apex.runtime.file_lock import FileLock, is_owned
from apex.runtime.run_claim import is_claimed

MEMORY = Path("/dev/shm")  # tmpfs on every Linux


def store_path(run_id: int, shard: int = 0) -> Path:
    """Where a shard of a run's memory lies, on whichever host its replay server runs."""
    return MEMORY / f"apex-{run_id:016x}-{shard}.replay"


def beside(path: Path) -> Path:
    """Where the store of that path lies while it is made."""
    return path.with_name(f"{path.stem}-partial{path.suffix}")


def in_use(path: Path) -> str:
    """The error message when another process owns the store at `path`."""
    return f"the replay memory {path} is in use: stop its replay server first"


def is_same_run(store: Path, other: Path) -> bool:
    """Whether both stores are shards of one run, by their names."""
    return store.name.split("-")[:2] == other.name.split("-")[:2]


def counters_path(store: Path) -> Path:
    """Where the counters of those who draw lie, beside the store; see `sampler_counters.SamplerCounters`."""
    return store.with_suffix(".board")


def memory_id(memory: Path = MEMORY) -> str:
    """Names this host's tmpfs: two programs that get the same one see the same stores."""
    facts = os.stat(memory)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{facts.st_dev}:{facts.st_ino}"


def has_owner(path: Path) -> bool:
    """Whether a writer has the store at `path` at present, or makes it."""
    return is_owned(beside(path)) or is_owned(path)  # In this order one that is renamed in between is seen.


def is_wanted(path: Path) -> bool:
    """Whether its run goes on, or somebody draws from it: its writer may be away, and about to come back."""
    with suppress(IndexError, ValueError):  # A name that is not one of ours.
        if is_claimed(int(path.name.split("-")[1], 16)):
            return True
    try:
        descriptor = os.open(counters_path(path), os.O_RDWR)
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
    """Removes a store, or what is left of one or of its making, unless it has an owner. Returns whether any was.

    Raises ConfigError for one that has, and for another user's.
    """
    found = False
    for file in (beside(path), path):
        try:
            if file.lstat().st_uid != os.geteuid():
                raise ConfigError(f"cannot remove the replay memory {file}: it belongs to another user")
            ownership = FileLock(file, in_use=in_use(file))
        except FileNotFoundError:
            continue
        except OSError as error:
            raise ConfigError(f"cannot remove the replay memory {file}: {error.strerror}") from error
        counters_path(file).unlink(missing_ok=True)
        file.unlink(missing_ok=True)
        ownership.release()
        found = True
    return found
