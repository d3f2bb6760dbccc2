"""The replay memory's file: its regions, who owns it, and when it is refused.

    header | stream rows | records | tree | arena

The file lies in tmpfs and is mapped by one writer and any number of readers. It is the only copy: after a
crash the next writer goes on with it. All numbers are little-endian.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import platform
import time
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from apex.config import ConfigError, require
from apex.sum_tree import SumTree
from apex.types import Schema

MAGIC = int.from_bytes(b"ApeXrepl", "little")
FORMAT = 1
MEMORY = Path("/dev/shm")  # tmpfs on every Linux
OWNER_ATTEMPTS = 20  # of a writer to own its file ...
ATTEMPT_SECONDS = 0.01  # ... and between two of them

# Written once, `magic` last. What follows must be equal wherever the file is opened again.
HEADER = np.dtype(
    [
        ("magic", "<u8"),
        ("format", "<u4"),
        ("schema", "<u4"),  # Schema.fingerprint
        ("store_incarnation", "<u8"),
        ("capacity", "<i8"),
        ("max_bytes", "<i8"),
        ("num_streams", "<i8"),
        ("priority_exponent", "<f8"),
    ]
)

# The live cells, int64 each and alone in their cache line. Keys below COMMIT were stored; of these the keys from
# FIRST_KEY on, with the bytes from FIRST_BYTE on, are live. END_BYTE is where the next image may begin.
COMMIT, FIRST_KEY, FIRST_BYTE, END_BYTE = range(4)
CELLS_OFFSET = 512

# What replay has of one stream. There are two versions of each row, written in turn: `commit` is the commit number
# with which a version begins to hold, so the newest one that is not above COMMIT holds, and a crash between the
# two writes changes nothing. A version that never came to hold has -1.
STREAM_ROW = np.dtype([("commit", "<i8"), ("incarnation", "<u8"), ("contiguous", "<u8"), ("bitmap", "<u8")])

# One transition, at slot key % capacity. `segment` is the byte number of the segment's image: byte numbers grow
# with the keys and are never reused, and the image lies at byte number % arena size.
STORED_RECORD = np.dtype(
    [
        ("key", "<i8"),
        ("segment", "<i8"),
        ("n_step_return", "<f4"),
        ("discount", "<f4"),
        ("priority", "<f4"),  # the initial one: recovery makes a missing leaf from it
        ("version", "<u4"),
        ("action", "<u2"),
        ("frame", "<u2"),  # this and the rest as in types.RECORD
        ("next_frame", "<u2"),
        ("depth", "u1"),
        ("next_depth", "u1"),
    ]
)


class Sizes(NamedTuple):
    """What the file is made for."""

    capacity: int  # transitions
    max_bytes: int  # bytes of images
    num_streams: int

    @property
    def arena_bytes(self) -> int:
        """`max_bytes`, rounded down so that every image begins at a multiple of 8."""
        return self.max_bytes // 8 * 8

    @property
    def offsets(self) -> list[int]:
        """Where each region begins, on a page each; then the length of the file."""
        lengths = [
            mmap.PAGESIZE,
            2 * self.num_streams * STREAM_ROW.itemsize,
            self.capacity * STORED_RECORD.itemsize,
            8 * SumTree.num_nodes(self.capacity),
            self.arena_bytes,
        ]
        return list(accumulate((-(-n // mmap.PAGESIZE) * mmap.PAGESIZE for n in lengths), initial=0))

    @property
    def file_bytes(self) -> int:
        """Length of the file: all the memory that the store takes."""
        return self.offsets[-1]


class Regions:
    """Arrays over the mapped file. It stays mapped as long as they live."""

    def __init__(self, buffer: mmap.mmap, sizes: Sizes) -> None:
        header, streams, records, nodes, arena, _ = sizes.offsets
        num_nodes = SumTree.num_nodes(sizes.capacity)
        self.sizes = sizes
        self.header = np.frombuffer(buffer, HEADER, 1, header)
        self.cells = np.frombuffer(buffer, np.int64, 4, header + CELLS_OFFSET)
        self.streams = np.frombuffer(buffer, STREAM_ROW, 2 * sizes.num_streams, streams).reshape(-1, 2)
        self.records = np.frombuffer(buffer, STORED_RECORD, sizes.capacity, records)
        self.tree = SumTree(np.frombuffer(buffer, np.float64, num_nodes, nodes), sizes.capacity)
        self.arena = memoryview(buffer)[arena : arena + sizes.arena_bytes]


class Store:
    """What the writer and the readers of a store tell of it alike."""

    def __init__(self, regions: Regions) -> None:
        self._regions = regions
        self._cells = regions.cells

    @property
    def store_incarnation(self) -> int:
        """Keys and receipts are meaningful within this only."""
        return int(self._regions.header["store_incarnation"][0])

    @property
    def capacity(self) -> int:
        """The most transitions that are kept."""
        return self._regions.sizes.capacity

    @property
    def max_bytes(self) -> int:
        """The most bytes of images that are kept."""
        return self._regions.sizes.max_bytes

    @property
    def priority_exponent(self) -> float:
        """What priorities are raised to; 0 draws uniformly."""
        return float(self._regions.header["priority_exponent"][0])

    @property
    def num_inserted(self) -> int:
        """Transitions stored since the store was made: the next key."""
        return int(self._cells[COMMIT])

    @property
    def first_key(self) -> int:
        """The oldest live key."""
        return int(self._cells[FIRST_KEY])

    @property
    def size(self) -> int:
        """Transitions that are live."""
        return self.num_inserted - self.first_key

    @property
    def bytes_used(self) -> int:
        """Bytes of the arena from the oldest live image to the end of the newest."""
        return int(self._cells[END_BYTE] - self._cells[FIRST_BYTE])

    def weights(self, keys: NDArray[np.int64]) -> NDArray[np.float64]:
        """priority ** exponent of live keys; 0 where one is just being stored or overwritten."""
        return self._regions.tree.weights(keys % self.capacity)


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
        for attempt in range(1, attempts + 1):
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if attempt == attempts:
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


def go_on(step: str) -> None:
    """Does not pause: takes the next step at once."""


def require_processor(machine: str) -> None:
    """Raises ConfigError unless the processor keeps the order of stores, which reading without locks relies on."""
    require(
        machine.lower() in ("x86_64", "amd64"),
        f"the replay server needs an x86-64 processor, this is {machine or 'an unknown one'}: its samplers read "
        "without locks, and others may show them a writer's stores in another order. Run replay on an x86-64 host",
    )


def create_file(
    path: Path, schema: Schema, sizes: Sizes, *, priority_exponent: float, store_incarnation: int
) -> tuple[Regions, Ownership]:
    """Makes a new file at `beside(path)`, all of it allocated. Raises ConfigError, and leaves none, if that cannot be.

    It takes minutes for a large one, so it is to be renamed when all is in it: what is at `path` is always whole.
    """
    require_processor(platform.machine())
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
        ownership = Ownership(partial, OWNER_ATTEMPTS)
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
    for name, value in sizes._asdict().items():
        header[name] = value
    header["format"], header["schema"] = FORMAT, schema.fingerprint
    header["store_incarnation"], header["priority_exponent"] = store_incarnation, priority_exponent
    header["magic"] = MAGIC  # Last: a file whose making was cut short is told by it, whatever its name.
    return regions, ownership


def open_file(path: Path, schema: Schema, *, writable: bool) -> Regions:
    """Maps an existing file; raises ConfigError unless it is a store of this format and schema."""
    require_processor(platform.machine())
    try:
        descriptor = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"cannot open the replay memory {path}: {error.strerror}") from error
    try:
        num_bytes = os.fstat(descriptor).st_size
        require(num_bytes >= mmap.PAGESIZE, f"{path} is not a replay memory: it has {num_bytes} bytes. Remove it")
        header = np.frombuffer(os.pread(descriptor, HEADER.itemsize, 0), HEADER)[0]
        require(header["magic"] == MAGIC, f"{path} is not a replay memory, or its making was cut short: remove it")
        require(header["format"] == FORMAT, f"{path} has format {header['format']}, but this is {FORMAT}: remove it")
        require(
            header["schema"] == schema.fingerprint,
            f"{path} holds transitions of another kind (schema {header['schema']:08x}, "
            f"but this is {schema.fingerprint:08x}): use the same environment, or remove it",
        )
        sizes = Sizes(*(int(header[name]) for name in Sizes._fields))
        require(
            min(sizes) >= 1 and sizes.file_bytes == num_bytes,
            f"{path} is damaged: it has {num_bytes} bytes, which is not what its header says. Remove it",
        )
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        return Regions(mmap.mmap(descriptor, num_bytes, access=access), sizes)
    finally:
        os.close(descriptor)


def store_path(run_id: int, shard: int = 0) -> Path:
    """Where a shard of a run's memory lies, on whichever host its replay server runs."""
    return MEMORY / f"apex-{run_id:016x}-{shard}.replay"


def beside(path: Path) -> Path:
    """Where the store of that path lies while it is made."""
    return path.with_name(f"{path.stem}-partial{path.suffix}")


def is_whole(path: Path) -> bool:
    """Whether the file at `path` was made to its end. True of one that cannot be read: who opens it says why."""
    try:
        with path.open("rb") as file:
            return file.read(8) == MAGIC.to_bytes(8, "little")
    except OSError:
        return True


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
