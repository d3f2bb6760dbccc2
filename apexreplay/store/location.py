"""Paths of the replay memory's files, which runs use them, and their removal.

All files of a user are in one folder of tmpfs that no other user can access: `memory_folder`. They are
`apex-RUNID-SHARD.replay` (a store), `.counters` beside each store, and `apex-RUNID.run`: the record of the run's
folder, locked while a program of the run is active. This lock also holds between containers that share /dev/shm.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from apexreplay.errors import DataError, UsageError
from apexreplay.files.file_lock import LOCK_ATTEMPTS, FileLock, is_owned
from apexreplay.files.private_file import private_folder

MEMORY = Path("/dev/shm")  # tmpfs on every Linux
PARTIAL = "-partial"  # end of the stem of a store that is not complete
CLAIM_ATTEMPTS = 50 * LOCK_ATTEMPTS  # 10 s, in which another run may remove the memory of this one
OLD_SUFFIXES = (".replay", ".counters", ".board")  # files that earlier versions created directly in `MEMORY`


def memory_folder() -> Path:
    """Returns this user's folder in tmpfs; creates it if needed. Raises DataError if that is not possible."""
    return private_folder(MEMORY, f"apex-{os.geteuid()}")


def store_path(run_id: int, shard: int = 0) -> Path:
    """Returns the path of a shard's memory, on the host of its replay server."""
    return memory_folder() / f"apex-{run_id:016x}-{shard}.replay"


def beside(path: Path) -> Path:
    """Returns the path that a store has until it is complete."""
    return path.with_name(f"{path.stem}{PARTIAL}{path.suffix}")


def in_use(path: Path) -> UsageError:
    """Returns the error for a store at `path` that another process owns."""
    return UsageError(f"the replay memory {path} is in use", "stop its replay server first")


def is_same_run(store: Path, other: Path) -> bool:
    """Returns whether both stores belong to the same run, judged by their file names."""
    return claim_path(store) == claim_path(other)


def claim_path(store: Path) -> Path:
    """Returns the path of the file that the programs of the store's run lock, and that names the run folder."""
    return store.with_name("-".join(store.name.split("-")[:2]) + ".run")


def counters_path(store: Path) -> Path:
    """Returns the path of the samplers' counters beside the store; see `sampler_counters.SamplerCounters`."""
    return store.with_suffix(".counters")


def memory_id(memory: Path | None = None) -> str:
    """Returns an id of this user's folder in this host's tmpfs: two programs with the same id see the same stores."""
    facts = os.stat(memory or memory_folder())
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{facts.st_dev}:{facts.st_ino}"


def has_owner(path: Path) -> bool:
    """Returns whether a process writes to the store at `path`, or creates it."""
    return is_owned(beside(path)) or is_owned(path)  # This order does not miss a rename in between.


def is_wanted(store: Path) -> bool:
    """Returns whether a program of the store's run is active: the run is claimed, or the store is written or read."""
    return is_owned(claim_path(store)) or has_owner(store) or is_owned(counters_path(store))


def find_stores(folder: Path) -> list[Path]:
    """Returns the paths of all stores, also of removed ones whose counters are left; the run started first is first."""
    files = [*folder.glob("apex-*.replay"), *folder.glob("apex-*.counters")]
    return sorted({path.with_suffix(".replay") for path in files}, key=_last_start)


def find_old_files() -> list[Path]:
    """Returns unused files of this user that earlier versions of this package have left directly in tmpfs."""
    found = []
    for path in MEMORY.glob("apex-*"):
        with suppress(OSError):  # It has just been removed.
            facts = path.lstat()
            own = path.suffix in OLD_SUFFIXES and stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid()
            if own and not any(is_owned(path.with_suffix(suffix)) for suffix in OLD_SUFFIXES):
                found.append(path)
    return found


# --- the run of a store -----------------------------------------------------------------------------------------------


@contextmanager
def claim_run(run_id: int, folder: Path | None) -> Iterator[None]:
    """Marks the run as active during the context, and records its folder. None: the run cannot be resumed.

    Several programs of the run can claim it. Raises DataError if tmpfs refuses the file.
    """
    path = claim_path(store_path(run_id))
    claim: FileLock | None = None
    try:
        while claim is None or not claim.is_at(path):  # Another run may remove the file at the same time.
            with suppress(FileNotFoundError):
                path.touch(mode=0o600)
                claim = FileLock(path, CLAIM_ATTEMPTS, shared=True)
    except OSError as error:
        raise DataError(f"cannot create {path}: {error.strerror}", "free some space there") from error
    with suppress(OSError):  # If tmpfs is full, the folder stays unknown, and the memory is kept.
        disk = folder.stat().st_dev if folder else 0
        path.write_bytes(b"%s:%d:%s" % (_root_id(), disk, os.fsencode(folder.absolute() if folder else "")))
    try:
        yield
    finally:
        claim.release()
        forget_run(path)


def read_run_folder(store: Path) -> str:
    """Returns the run folder of a store; "" if it is not known here: the learner is on another host."""
    with suppress(OSError, ValueError):
        return _read_record(store)[2]
    return ""


def is_abandoned(store: Path) -> bool:
    """Returns whether no run can use the store any more: its run folder is gone, or it was never completed.

    The folder of a run in another container, which has another root directory, counts as existing, and so does one on
    a disk that is not mounted now.
    """
    if store.stem.endswith(PARTIAL) or not store.exists():
        return True
    with suppress(OSError, ValueError):  # Nothing is known, or a network file system does not answer.
        root, disk, folder = _read_record(store)
        try:
            os.stat(folder if root == _root_id() else "/")
        except (FileNotFoundError, NotADirectoryError):
            disks = (path.stat().st_dev for path in Path(folder).parents if path.exists())
            return next(disks, disk) == disk
    return False


def _read_record(store: Path) -> tuple[bytes, int, str]:
    """Returns the root directory's identity, the device of the run folder, and its path; "" if there is none."""
    root, disk, folder = claim_path(store).read_bytes().split(b":", 2)
    return root, int(disk), os.fsdecode(folder)


def _root_id() -> bytes:
    facts = os.stat("/")
    return b"%d-%d" % (facts.st_dev, facts.st_ino)


def _last_start(store: Path) -> float:
    for path in (claim_path(store), store):
        with suppress(OSError):
            return path.stat().st_mtime
    return 0.0


# --- removal ----------------------------------------------------------------------------------------------------------


def remove(path: Path) -> bool:
    """Removes the store at `path` and an incomplete one at `beside(path)`; returns whether any existed.

    Raises UsageError if a process owns the store.
    """
    found = False
    for file in (beside(path), path):
        try:
            ownership = FileLock(file, in_use=in_use(file))
        except FileNotFoundError:
            continue
        except OSError as error:
            raise UsageError(f"cannot remove the replay memory {file}: {error.strerror}") from error
        file.unlink(missing_ok=True)
        ownership.release()
        found = True
    counters_path(path).unlink(missing_ok=True)
    forget_run(claim_path(path))
    return found


def discard(store: Path) -> bool:
    """Removes a store if no program of its run is active; returns whether it existed."""
    claim: FileLock | None = None
    try:
        with suppress(FileNotFoundError):
            claim = FileLock(claim_path(store))  # The run cannot be resumed while its memory is removed.
        return not is_owned(counters_path(store)) and remove(store)
    except (OSError, UsageError):  # The run is active, or the files have just been removed.
        return False
    finally:
        if claim is not None:
            claim.release()
            forget_run(claim_path(store))


def forget_run(claim: Path) -> None:
    """Removes the record of a run that has no memory, unless a process claims the run."""
    with suppress(OSError, UsageError):
        ownership = FileLock(claim)
        if not any(claim.parent.glob(f"{claim.stem}-*")):
            claim.unlink()
        ownership.release()
