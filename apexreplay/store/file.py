"""Creates and opens the file of the replay memory."""

import mmap
import os
import platform
from pathlib import Path

import numpy as np

from apexreplay.errors import DamagedMemoryError, DataError, require
from apexreplay.files.file_lock import LOCK_ATTEMPTS, FileLock
from apexreplay.store.layout import STORE_HEADER, Regions, Sizes, StoreSettings
from apexreplay.store.location import beside, in_use, remove
from apexreplay.tables import Table

MAGIC = int.from_bytes(b"ApeXrepl", "little")
FORMAT = 4  # format of the file; increases when its regions or records change


def create_file(path: Path, table: Table, settings: StoreSettings, store_incarnation: int) -> tuple[Regions, FileLock]:
    """Creates a fully allocated file at `beside(path)`; returns its regions and the lock of its owner, this process.

    The caller renames the file to `path` once it is filled. Raises UsageError for bad settings, and DataError if the
    file cannot be created.
    """
    require_processor(platform.machine())
    sizes = settings.sizes
    require(sizes.capacity >= 1, f"the capacity must be at least 1, got {sizes.capacity}")
    require(sizes.num_streams >= 1, f"num_streams must be at least 1, got {sizes.num_streams}")
    require(sizes.max_bytes >= 8, f"max_bytes must be at least 8, got {sizes.max_bytes}")
    partial = beside(path)
    if partial.exists():
        remove(partial)  # left by a killed process
    try:
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise DataError(f"cannot create the replay memory {path}: {error.strerror}") from error
    try:
        # Checked after creating `partial`, so that no other process can create `path` between check and rename.
        remedy = "resume its run, or remove the file"
        require(not path.exists(), f"the replay memory {path} already exists", remedy=remedy)
        ownership = FileLock(partial, LOCK_ATTEMPTS, in_use(partial))
        try:
            num_bytes = sizes.file_bytes(table)
            _allocate(descriptor, path, num_bytes)
            regions = Regions(mmap.mmap(descriptor, num_bytes), sizes, table)
        except BaseException:
            ownership.release()
            raise
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    header = regions.header
    for name, value in settings.written().items():
        header[name] = value
    header["format"], header["schema"] = FORMAT, table.fingerprint
    header["store_incarnation"] = store_incarnation
    regions.streams["commit"][:, 1] = -1
    regions.row_checksums[:] = regions.checksum_rows(regions.streams)
    header["magic"] = MAGIC  # Written last: a file without it is incomplete.
    return regions, ownership


def open_file(path: Path, table: Table, *, writable: bool) -> Regions:
    """Maps an existing file; raises UsageError unless it is a store of this format and schema.

    Raises DamagedMemoryError if the file is unusable with any configuration.
    """
    require_processor(platform.machine())
    try:
        descriptor = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise DataError(f"cannot open the replay memory {path}: {error.strerror}") from error
    try:
        num_bytes = os.fstat(descriptor).st_size
        if num_bytes < mmap.PAGESIZE:
            raise DamagedMemoryError(f"{path} is not a replay memory: it has {num_bytes} bytes")
        header = np.frombuffer(os.pread(descriptor, STORE_HEADER.itemsize, 0), STORE_HEADER)[0]
        if header["magic"] != MAGIC:
            raise DamagedMemoryError(f"{path} is not a replay memory, or its creation was interrupted")
        mismatch = f"{path} has format {header['format']}, but this version uses format {FORMAT}"
        require(header["format"] == FORMAT, mismatch, remedy="remove the file")
        found, expected = f"schema {header['schema']:08x}", f"schema {table.fingerprint:08x}"
        mismatch = f"{path} has {found}, but the table has {expected}"
        remedy = "declare the table as before, or remove the file"
        require(header["schema"] == table.fingerprint, mismatch, remedy=remedy)
        sizes = Sizes(*(int(header[name]) for name in Sizes._fields))
        if min(sizes) < 1 or sizes.file_bytes(table) != num_bytes:
            raise DamagedMemoryError(f"{path} is damaged: its size of {num_bytes} bytes does not match its header")
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        return Regions(mmap.mmap(descriptor, num_bytes, access=access), sizes, table)
    finally:
        os.close(descriptor)


def is_whole(path: Path) -> bool:
    """Returns whether the file at `path` was completed. True if it is unreadable, so that opening it reports why."""
    try:
        with path.open("rb") as file:
            return file.read(8) == MAGIC.to_bytes(8, "little")
    except OSError:
        return True


def require_processor(machine: str) -> None:
    """Raises UsageError unless the CPU makes writes visible in order, which reading without locks requires."""
    require(
        machine.lower() in ("x86_64", "amd64"),
        f"the replay server needs an x86-64 CPU, but this host has {machine or 'an unknown one'}: samplers read "
        "without locks, which requires that writes become visible in order",
        remedy="run the replay server on an x86-64 host",
    )


def _allocate(descriptor: int, path: Path, num_bytes: int) -> None:
    """Allocates every byte now, because writing to a page that tmpfs cannot provide would kill the process (SIGBUS)."""
    file_system = os.fstatvfs(descriptor)
    available = file_system.f_bavail * file_system.f_frsize
    problem = f"the replay memory {path} needs {num_bytes} bytes, but only {available} are available"
    remedy = "lower capacity or max_bytes, or free some space"
    require(num_bytes <= available, problem, remedy=remedy)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        raise DataError(f"{problem} ({error.strerror})", remedy) from error
