"""Draws batches from a table of a server: from its memory on the same host, else by messages."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from apexreplay.client.connection import BEAT_SECONDS, Connection, Lease
from apexreplay.client.waiting import Waiting, block
from apexreplay.errors import DataError, UsageError, require
from apexreplay.frames.encoder import make_targets, name_arrays
from apexreplay.frames.stack_decoder import StackDecoder
from apexreplay.item_kinds import Array
from apexreplay.process.lifecycle import POLL_SECONDS
from apexreplay.rate_limiter import RateLimiter
from apexreplay.sampling.batch_drawer import BatchDrawer, DrawSettings
from apexreplay.sampling.sampler_counters import SamplerCounters
from apexreplay.store.location import counters_path, store_path
from apexreplay.store.reader import MAX_ATTEMPTS, StoreReader
from apexreplay.tables import Table
from apexreplay.transport.endpoints import BatchRequester, PrioritySender
from apexreplay.transport.sockets import open_context
from apexreplay.types import BatchMessage, PriorityUpdate
from apexreplay.wire.codec import MAX_PRIORITIES, Codec
from apexreplay.wire.control import Hello, Welcome

IDLE_SECONDS = 0.001
MAX_UNANSWERED = 30  # heartbeats; then the memory counts as abandoned
SET_ASIDE_SECONDS = 0.1  # time in which the server has lowered the priorities of items that cannot be decoded
SLOWEST_CONNECTION = 1e6  # bytes/s; on slower ones, large batches may be lost when the requester connects anew

log = logging.getLogger("apexreplay")


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch of B items. `batch["NAME"]` is the array of a field or of a value, with the axis B first.

    Windows have two arrays for each field of a step: `NAME` and `next_NAME`, [B, W, *shape], the newest step last.
    Sequences have one, [B, L, *shape], the oldest step first; after the end of an episode it is zero.
    """

    fields: dict[str, Array]
    keys: NDArray[np.int64]  # [B]  identify the items
    probabilities: NDArray[np.float64]  # [B]  P(i), with which each item was drawn
    versions: NDArray[np.int64]  # [B]  `Writer.version` of each item
    lengths: NDArray[np.int64]  # [B]  steps of each item; below L if the episode of a sequence ended
    num_items: int  # items in the table when the batch was drawn: N of importance weights
    part: BatchMessage

    def __getitem__(self, name: str) -> Array:
        return self.fields[name]


class BaseSampler(Lease):
    """What the samplers for threads and for asyncio share: the memory or the requests, and the priorities."""

    def __init__(
        self, connection: Connection, hello: Hello, welcome: Welcome, *, batch_size: int, prefetch: int
    ) -> None:
        """Use `Client.sampler`."""
        super().__init__(connection, hello, welcome)
        self.batch_size = batch_size
        self._used = welcome
        self._closed_since = 0.0  # time since which the memory cannot be opened again; 0: it is open
        self._num_spoiled = 0  # received batches in a row with items that cannot be decoded
        self.reads_memory = welcome.row >= 0  # whether batches come from the server's memory, without messages
        self._require_batches(welcome, self.reads_memory)
        codec = Codec(int(welcome.run_id, 16), self.table)
        self._reader: _MemoryReader | None = None
        self._remote: BatchRequester | None = None
        with ExitStack() as stack:
            context = stack.enter_context(open_context(connection.keys))
            self._priorities = PrioritySender(context, codec)
            self._priorities.connect(self._endpoint(welcome.priorities))
            if welcome.row >= 0:
                self._reader = _MemoryReader(self.table, welcome, batch_size)
            else:
                endpoints = list(map(self._endpoint, welcome.batches))
                credit = max(1, -(-prefetch // len(endpoints)))
                self._remote = BatchRequester(
                    context, endpoints, codec, batch_size=batch_size, credit=credit, slowest=SLOWEST_CONNECTION
                )
            self._open = stack.pop_all()
        connection.keep(self)

    def update_priorities(self, batch: Batch, priorities: Array, keys: Array | None = None) -> None:
        """Sets the priorities of a batch's items, [B], or of `keys` of it. Items that are gone are ignored.

        Does not wait; if the server is away for long, priorities are dropped. Raises UsageError for a wrong shape. The
        server counts and ignores priorities that are negative or NaN; an infinite one counts as the highest.
        """
        self._check()
        keys = batch.keys if keys is None else np.asarray(keys)
        one = keys.ndim == 1 and len(keys) <= MAX_PRIORITIES and (keys.dtype.kind in "iu" or not len(keys))
        require(one, f"keys must be at most {MAX_PRIORITIES} integers, got {keys.dtype}{list(keys.shape)}")
        try:
            with np.errstate(over="ignore"):
                found = np.asarray(priorities, np.float32)
        except (TypeError, ValueError) as error:
            raise UsageError(f"priorities must be numbers: {error}") from error
        require(found.shape == keys.shape, f"priorities must be [{len(keys)}], got {list(found.shape)}")
        part, keys = batch.part, keys.astype(np.int64)
        self._priorities.send(PriorityUpdate(0, part.store_incarnation, part.sampler, part.number, keys, found))

    def close(self) -> None:
        """Ends the lease and closes the sockets, after at most a second. Further calls do nothing."""
        if self._leave():
            self._open.close()

    def _leave(self) -> bool:
        """Ends the lease; returns False if it has been ended before."""
        was_open, self._closed = not self._closed, True
        if was_open:
            if self._reader is not None:
                self._reader.close()  # before the next user gets the row
            self._connection.leave(self.hello.session)
            self._reader = None  # The server's memory is free once nobody has it mapped.
        return was_open

    def _sample(self, timeout: float | None, poll: float) -> Waiting[Batch]:
        """`poll`: seconds in which a wait for a message may block the thread."""
        deadline, waited = None if timeout is None else time.monotonic() + timeout, 0.0
        while True:
            self._check()
            self._follow()
            reader = self._reader
            rest = poll if deadline is None else min(poll, max(IDLE_SECONDS, deadline - time.monotonic()))
            batch = self._draw(reader) if reader is not None else self._receive(rest, waited)
            if batch is not None:
                return batch
            if deadline is not None and time.monotonic() >= deadline:
                remedy = "apexreplay status shows how many items there are, and with --json what limits wait for"
                raise DataError(f"no batch of {self.table.name!r} within {timeout:g} s", remedy)
            if self.reads_memory or not poll:
                waited = -time.monotonic()
                yield IDLE_SECONDS
                waited += time.monotonic()

    def _check(self) -> None:
        super()._check()
        if self._reader is not None and self._connection.unanswered > MAX_UNANSWERED:
            problem = f"{self._connection.address} has not answered for {MAX_UNANSWERED * BEAT_SECONDS:.0f} s"
            raise DataError(problem, "start the server again; its memory may be out of date")

    def _follow(self) -> None:
        """Opens the memory again if the server has started again; it may be another file.

        Raises UsageError if the server does not give such batches any more.
        """
        reader = self._reader
        if self._welcome is self._used and not (reader is not None and reader.may_return):
            return
        welcome = self._welcome
        if self._reader is not None:
            problem = f"the server does not let this sampler read the memory of {self.table.name!r} any more"
            problem += ": the order of the table has changed, or the server runs elsewhere now"
            require(welcome.row >= 0, problem, remedy="open a new sampler")
        self._require_batches(welcome, self._reader is not None)
        if reader is not None:
            try:
                self._reader = _MemoryReader(self.table, welcome, self.batch_size)
            except DataError:  # The server has ended again, or has not made the memory yet: the next call tries again.
                reader.release()
                self._closed_since = self._closed_since or time.monotonic()
                if time.monotonic() - self._closed_since > MAX_UNANSWERED * BEAT_SECONDS:
                    raise
                return
        self._used, self._closed_since = welcome, 0.0

    def _require_batches(self, welcome: Welcome, reads_memory: bool) -> None:
        table, most = self.table.name, welcome.max_batch
        require(self.batch_size <= most, f"a batch of {table!r} has at most {most} items, got {self.batch_size}")
        has_source = reads_memory or bool(welcome.batches)
        require(has_source, f"{table!r} has no sampler processes", remedy="raise its num_samplers")

    def note_silence(self) -> None:
        """Gives the memory back if it was removed, or if the server is gone: the next one may need the room."""
        reader = self._reader
        if reader is not None:
            reader.release_if_removed()
            if self._connection.unanswered > MAX_UNANSWERED:
                reader.release()

    def note_end(self) -> None:
        """Gives the memory back."""
        reader = self._reader
        if reader is not None:
            reader.release()

    def _draw(self, reader: "_MemoryReader") -> Batch | None:
        batch = reader.draw(self._set_aside)
        if batch is not None:
            self._num_spoiled = 0
        return batch

    def _receive(self, poll: float, waited: float) -> Batch | None:
        assert self._remote is not None
        part = self._remote.receive(poll, waited=waited)
        if part is None:
            return None
        targets = make_targets(self.table, self.batch_size)
        decoded = StackDecoder(self.table, targets).decode(part.records, part.blob, np.arange(self.batch_size))
        if not decoded.all():
            self._set_aside(part, part.records["key"][~decoded])
            return None
        self._num_spoiled = 0
        return _make_batch(self.table, part, targets)

    def _set_aside(self, part: BatchMessage, keys: Array) -> None:
        """Gives items that cannot be decoded the lowest priority, because a batch was lost that had them.

        Raises DataError if that does not help.
        """
        self._num_spoiled += 1
        problem = f"{len(keys)} items of a batch of {self.table.name!r} cannot be decoded, such as {keys[0]}"
        remedy = "check how their writer compresses steps"
        if self._num_spoiled >= MAX_ATTEMPTS:
            self._num_spoiled = 0
            raise DataError(f"{problem}; {MAX_ATTEMPTS} batches in a row had such items", remedy)
        log.warning("%s; %s", problem, remedy)
        lowest = np.zeros(len(keys), np.float32)
        update = PriorityUpdate(0, part.store_incarnation, part.sampler, part.number, keys.astype(np.int64), lowest)
        self._priorities.send(update)


class Sampler(BaseSampler):
    """Draws batches of a table. An iterator of batches that never ends; `sample` has a timeout.

    While the server is away, a sampler that reads the memory goes on, or waits if the memory was removed. It raises
    DataError after 30 s. Use a sampler from one thread, in the process that created it.
    """

    def sample(self, timeout: float | None = None) -> Batch:
        """Returns a batch; waits while there are too few items, or while the limit of draws per insert is reached.

        Raises DataError after `timeout` seconds; None: no limit.
        """
        return block(self._sample(timeout, POLL_SECONDS))

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield self.sample()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _MemoryReader:
    """Draws from the memory of a server on this host."""

    def __init__(self, table: Table, welcome: Welcome, batch_size: int) -> None:
        path = store_path(int(welcome.run_id, 16))  # In this user's own folder, whatever the server says.
        self._path, self._inode = path, _read_inode(path)
        self._table = table
        self._batch_size = batch_size
        reader, rng = StoreReader(path, table), np.random.default_rng()  # first: the counters would be created
        counters = SamplerCounters(welcome.num_rows, counters_path(path))
        settings = DrawSettings(0, 1, batch_size, 2**62, RateLimiter(*welcome.limiter))
        self._drawer: BatchDrawer | None = BatchDrawer(reader, counters, welcome.row, settings, rng)
        self._resume_at = 0.0

    def draw(self, set_aside: Callable[[BatchMessage, Array], None]) -> Batch | None:
        """Returns a batch; None if the limits do not allow one now, the writer overwrites drawn items too often, or the
        memory was released.

        Items that cannot be decoded are drawn again. If that fails, the batch is lost, but counts as drawn: calls
        `set_aside` with it and the keys of these items.
        """
        drawer = self._drawer
        if drawer is None or time.monotonic() < self._resume_at or not drawer.may_draw():
            return None
        reader = drawer.reader
        num_items, targets = reader.size, make_targets(self._table, self._batch_size)
        decoder = StackDecoder(self._table, targets)
        records, missing = np.zeros(self._batch_size, self._table.batch_record), np.arange(self._batch_size)
        spoiled: list[Array] = []
        for _ in range(MAX_ATTEMPTS):
            drawn = reader.draw(len(missing), drawer.rng)
            rows = missing[: len(drawn.records)]
            decoded, live = decoder.decode_located(drawn.frames, rows), reader.still_live(drawn)
            good = decoded & live
            spoiled.append(drawn.records["key"][live & ~decoded])
            records[rows[good]] = drawn.records[good]
            missing = np.concatenate([rows[~good], missing[len(rows) :]])
            if not len(missing):
                return _make_batch(self._table, drawer.make_part(records, num_items), targets)
        keys = np.unique(np.concatenate(spoiled))[:MAX_PRIORITIES]
        if len(keys):
            self._resume_at = time.monotonic() + SET_ASIDE_SECONDS
            set_aside(drawer.make_part(records, num_items), keys)
        return None

    def close(self) -> None:
        """Marks the row of the counters as unused."""
        drawer = self._drawer
        if drawer is not None:
            drawer.close()

    def release(self) -> None:
        """Unmaps the memory. Another thread may draw meanwhile."""
        self._drawer = None

    @property
    def may_return(self) -> bool:
        """Whether the memory was released and is still there: its server has answered again."""
        return self._drawer is None and _read_inode(self._path) == self._inode

    def release_if_removed(self) -> None:
        """Unmaps the memory if its file was removed or replaced. Another thread may draw meanwhile."""
        if _read_inode(self._path) != self._inode:
            self._drawer = None


def _read_inode(path: Path) -> int:
    """Returns the number of the file at `path`; 0 if there is none."""
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return 0


def _make_batch(table: Table, part: BatchMessage, targets: list[Array]) -> Batch:
    records = part.records
    values = {name: records[name] for name, _ in table.values if name not in table.kept}
    return Batch(
        fields={**name_arrays(table, targets), **values},
        keys=records["key"].copy(),
        probabilities=records["probability"].copy(),
        versions=records["version"].astype(np.int64),
        lengths=records["num_frames"].astype(np.int64),
        num_items=part.num_transitions,
        part=part,
    )
