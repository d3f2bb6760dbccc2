"""The replay memory's file: how it is made, all of it, and when one that is there is refused."""

from __future__ import annotations

import mmap
import os
import platform
from pathlib import Path

import numpy as np

from apex.errors import ConfigError, require
from apex.replay_memory.store.layout import COMMIT, FIRST_KEY, STORE_HEADER, Regions, Sizes, StoreSettings
from apex.replay_memory.store.location import beside, in_use, remove
from apex.runtime.file_lock import LOCK_ATTEMPTS, FileLock
from apex.runtime.private_file import open_private
from apex.types import Schema

MAGIC = int.from_bytes(b"ApeXrepl", "little")
FORMAT = 1


class DamagedMemoryError(ConfigError):
    """What is at a replay memory's place cannot be gone on with, whatever the configuration."""


def create_file(
    path: Path, schema: Schema, settings: StoreSettings, store_incarnation: int
) -> tuple[Regions, FileLock]:
    """Makes a new file at `beside(path)`, all of it allocated, to be renamed when all is in it. Raises ConfigError."""
    require_processor(platform.machine())
    sizes = settings.sizes
    require(sizes.capacity >= 1, f"replay.capacity must be >= 1, got {sizes.capacity}")
    require(sizes.num_streams >= 1, f"actor.num_actors must be >= 1, got {sizes.num_streams}")
    require(sizes.max_bytes >= 8, f"replay.max_bytes must be >= 8, got {sizes.max_bytes}")
    partial = beside(path)
    if partial.exists():
        remove(partial)  # Whoever made it was killed.
    try:
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot create the replay memory {path}: {error.strerror}") from error
    try:
        # Asked when nobody else can be making one: what came to be meanwhile is not replaced.
        require(not path.exists(), f"the replay memory {path} exists already: resume with it, or remove it")
        ownership = FileLock(partial, LOCK_ATTEMPTS, in_use(partial))
        try:
            _allocate(descriptor, path, sizes.file_bytes)
            regions = Regions(mmap.mmap(descriptor, sizes.file_bytes), sizes)
        except BaseException:
            ownership.release()
            raise
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    regions.streams["commit"][:, 1] = -1
    header = regions.header
    for name, value in settings.written().items():
        header[name] = value
    header["format"], header["schema"] = FORMAT, schema.fingerprint
    header["store_incarnation"] = store_incarnation
    header["magic"] = MAGIC  # Last: a file whose making was cut short is told by it, whatever its name.
    return regions, ownership


def open_file(path: Path, schema: Schema, *, writable: bool) -> Regions:
    """Maps an existing file; raises ConfigError unless it is a store of this format and schema.

    That is a DamagedMemoryError where no configuration would fit, and a ForeignFileError for another user's file.
    """
    require_processor(platform.machine())
    try:
        descriptor = open_private(path, os.O_RDWR if writable else os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"cannot open the replay memory {path}: {error.strerror}") from error
    try:
        num_bytes = os.fstat(descriptor).st_size
        if num_bytes < mmap.PAGESIZE:
            raise DamagedMemoryError(f"{path} is not a replay memory: it has {num_bytes} bytes")
        header = np.frombuffer(os.pread(descriptor, STORE_HEADER.itemsize, 0), STORE_HEADER)[0]
        if header["magic"] != MAGIC:
            raise DamagedMemoryError(f"{path} is not a replay memory, or its making was cut short")
        require(header["format"] == FORMAT, f"{path} has format {header['format']}, but this is {FORMAT}: remove it")
        require(
            header["schema"] == schema.fingerprint,
            f"{path} holds transitions of another kind (schema {header['schema']:08x}, "
            f"but this is {schema.fingerprint:08x}): use the same environment, or remove it",
        )
        sizes = Sizes(*(int(header[name]) for name in Sizes._fields))
        if min(sizes) < 1 or sizes.file_bytes != num_bytes:
            raise DamagedMemoryError(f"{path} is damaged: it has {num_bytes} bytes, which is not what its header says")
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        return Regions(mmap.mmap(descriptor, num_bytes, access=access), sizes)
    finally:
        os.close(descriptor)


def require_sound(path: Path, regions: Regions) -> None:
    """Raises DamagedMemoryError unless every slot that should be live holds its key. Nobody may write meanwhile."""
    first_key, commit, capacity = int(regions.cells[FIRST_KEY]), int(regions.cells[COMMIT]), regions.sizes.capacity
    if not max(0, commit - capacity) <= first_key <= commit:
        raise DamagedMemoryError(f"{path} is damaged: keys {first_key} ... {commit - 1} cannot be live")
    keys = np.arange(first_key, commit)
    num_wrong = int((regions.records["key"][keys % capacity] != keys).sum())
    if num_wrong:
        raise DamagedMemoryError(f"{path} is damaged: of {len(keys)} transitions {num_wrong} are not in their place")


def is_whole(path: Path) -> bool:
    """Whether the file at `path` was made to its end. True of one that cannot be read: who opens it says why."""
    try:
        with path.open("rb") as file:
            return file.read(8) == MAGIC.to_bytes(8, "little")
    except OSError:
        return True


def require_processor(machine: str) -> None:
    """Raises ConfigError unless the processor keeps the order of stores, which reading without locks relies on."""
    require(
        machine.lower() in ("x86_64", "amd64"),
        f"the replay server needs an x86-64 processor, this is {machine or 'an unknown one'}: its samplers read "
        "without locks, and others may show them a writer's stores in another order. Run replay on an x86-64 host",
    )


def _allocate(descriptor: int, path: Path, num_bytes: int) -> None:
    """Allocates every byte now: a write into a page that tmpfs cannot provide would kill the process (SIGBUS)."""
    file_system = os.fstatvfs(descriptor)
    available = file_system.f_bavail * file_system.f_frsize
    message = (
        f"the replay memory {path} needs {num_bytes} bytes, {available} are available there: "
        "lower replay.capacity or replay.max_bytes, or make room"
    )
    require(num_bytes <= available, message)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        raise ConfigError(f"{message} ({error.strerror})") from error
