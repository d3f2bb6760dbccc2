"""Sampler processes: they draw from the shared store without a lock, and send."""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from apex.config import Config
from apex.errors import ConfigError
from apex.key_folder import read_keys
from apex.lifecycle import POLL_SECONDS, Stop
from apex.rate_limiter import RateLimiter
from apex.sockets import open_context
from apex.store_reader import Place, StoreReader
from apex.transport import BatchSender
from apex.types import SampleBatch, Schema
from apex.wire import Codec

IDLE_SECONDS = 0.001  # between two looks whether drawing is allowed
_ROW_BYTES = 64  # a cache line each: writers of different rows do not disturb one another
SILENCE_SECONDS = 5.0  # without an answer for so long, what is in flight counts as lost, and one more batch may go


class SamplerBoard:
    """Counters that the samplers and the writer share: one row per sampler, each cell written by one process.

    Rows belong to the replay server's sampler processes first, then to the loaders of a learner on the same host, which
    draw for themselves. The counts outlive the processes, so a sampler that is started again goes on with its numbers.
    """

    DRAWN, SENT, ACKNOWLEDGED, ACTIVE, WAITS_FOR_INSERTS, WAITS_FOR_LEARNER = range(6)  # transitions; batches; 0 or 1
    BASE_INSERTED, BASE_DRAWN = 6, 7  # of row 0: where the limiter's line begins since the replay server was started

    def __init__(self, num_rows: int, path: Path | None = None) -> None:
        """A file in tmpfs at `path`, made if it is not there; or memory that only forked children share."""
        num_bytes = _ROW_BYTES * num_rows
        if path is None:
            memory = mmap.mmap(-1, num_bytes)
        else:
            # Open for as long as the process lives: its lock says that somebody wants the store, see `is_wanted`.
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH)
                os.posix_fallocate(descriptor, 0, num_bytes)
                memory = mmap.mmap(descriptor, num_bytes)
            except OSError as error:
                os.close(descriptor)
                raise ConfigError(f"{path} needs {num_bytes} bytes: {error.strerror}; make room there") from error
        self._cells = np.frombuffer(memory, np.int64).reshape(num_rows, -1)

    def go_on_from(self, num_drawn: int) -> None:
        """Counts what was drawn before the store was restored. To be called before anybody draws by row 0."""
        self._cells[0, self.DRAWN] = num_drawn

    def rebase(self, num_inserted: int) -> None:
        """Has limiters begin their line here: what went before neither is caught up with nor blocks."""
        self._cells[0, self.BASE_DRAWN] = self.num_drawn
        self._cells[0, self.BASE_INSERTED] = num_inserted

    def limit(self, limiter: RateLimiter) -> RateLimiter:
        """The limiter with its line where it begins at present."""
        base = int(self._cells[0, self.BASE_INSERTED])
        return limiter.rebased(base, int(self._cells[0, self.BASE_DRAWN])) if base else limiter

    def activate(self, sampler: int) -> None:
        """Says that somebody draws by this row now; it calls this."""
        row = self._cells[sampler]
        row[self.ACTIVE] = 1
        row[self.ACKNOWLEDGED] = row[self.SENT]  # What an earlier one had in flight is answered no more.

    def next_number(self, sampler: int) -> int:
        """The number of the sampler's next batch; of the row, so that credit comes back whoever else draws by it."""
        return int(self._cells[sampler, self.SENT])

    @property
    def num_drawn(self) -> int:
        """Transitions drawn by all samplers."""
        return int(self._cells[:, self.DRAWN].sum())

    @property
    def num_sent(self) -> int:
        """Batches sent by all samplers."""
        return int(self._cells[:, self.SENT].sum())

    @property
    def waits_for(self) -> str:
        """What all samplers wait for at present; "" while one does not."""
        active = self._cells[self._cells[:, self.ACTIVE] == 1]
        if not len(active):
            return ""
        if active[:, self.WAITS_FOR_INSERTS].all():
            return "inserts"
        return "learner" if active[:, self.WAITS_FOR_LEARNER].all() else ""

    def in_flight(self, sampler: int) -> int:
        """Batches of one sampler whose priorities have not come back."""
        row = self._cells[sampler]
        return int(row[self.SENT] - row[self.ACKNOWLEDGED])

    def note_sent(self, sampler: int, num_transitions: int) -> None:
        """Counts a batch; the sampler calls this."""
        row = self._cells[sampler]
        row[self.DRAWN] += num_transitions
        row[self.SENT] += 1

    def take_back(self, sampler: int, num_transitions: int) -> None:
        """Says that the batch counted last was not sent after all; the sampler calls this."""
        row = self._cells[sampler]
        row[self.DRAWN] -= num_transitions
        row[self.SENT] -= 1

    def note_wait(self, sampler: int, *, inserts: bool = False, learner: bool = False) -> None:
        """Says what the sampler waits for, if anything; it calls this."""
        row = self._cells[sampler]
        row[self.WAITS_FOR_INSERTS], row[self.WAITS_FOR_LEARNER] = inserts, learner

    def acknowledge(self, sampler: int, number: int) -> None:
        """Notes that priorities of batch `number` came back: all before it did, or never will. The writer calls."""
        if 0 <= sampler < len(self._cells):
            row = self._cells[sampler]
            if row[self.ACKNOWLEDGED] <= number < row[self.SENT]:
                row[self.ACKNOWLEDGED] = number + 1


class Batches(Protocol):
    """Where batches go."""

    def place(self, shard: int) -> Place | None:
        """Where the frames of the shard's next batch may be decoded; None: they are sent compressed."""

    def send(self, batch: SampleBatch, timeout: float) -> bool:
        """Sends, waiting up to `timeout` seconds for room; returns whether it was sent."""


class Sampler:
    """Draws while the limiter allows it and the learner keeps up. What it sends is its shard's part of a batch."""

    def __init__(
        self,
        index: int,
        reader: StoreReader,
        batches: Batches,
        board: SamplerBoard,
        limiter: RateLimiter,
        *,
        shard: int = 0,
        batch_size: int,
        batches_in_flight: int,
        rng: np.random.Generator,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._index = index
        self._reader = reader
        self._batches = batches
        self._board = board
        self._limiter = limiter
        self._shard = shard
        self._batch_size = batch_size
        self._batches_in_flight = batches_in_flight
        self._rng = rng
        self._clock = clock
        board.activate(index)
        self._in_flight = 0
        self._changed_at = clock()

    def step(self, timeout: float = POLL_SECONDS) -> bool:
        """Draws and sends one batch; False if it may not, or cannot yet."""
        if not self._may_draw():
            return False
        drawn = self._reader.sample(self._batch_size, self._rng, self._batches.place(self._shard))
        if drawn is None:
            return False
        batch = SampleBatch(
            shard=self._shard,
            store_incarnation=self._reader.store_incarnation,
            sampler=self._index,
            number=self._board.next_number(self._index),
            num_transitions=drawn.num_transitions,
            records=drawn.records,
            image=drawn.image,
        )
        # Counted before it goes: a learner on this host may answer before `send` returns, and the writer gives credit
        # only for what was sent.
        self._board.note_sent(self._index, self._batch_size)
        if not self._batches.send(batch, timeout):
            self._board.take_back(self._index, self._batch_size)
            return False
        return True

    def _may_draw(self) -> bool:
        allowed = self._board.limit(self._limiter).may_sample(self._reader.num_inserted, self._board.num_drawn)
        in_flight, now = self._board.in_flight(self._index), self._clock()
        if in_flight != self._in_flight:
            self._in_flight, self._changed_at = in_flight, now
        has_credit = in_flight < self._batches_in_flight
        if not has_credit and now - self._changed_at >= SILENCE_SECONDS:
            has_credit, self._changed_at = True, now
        self._board.note_wait(self._index, inserts=not allowed, learner=allowed and not has_credit)
        return allowed and has_credit


class SamplerTask(NamedTuple):
    """What a process that draws is given."""

    config: Config
    schema: Schema
    run_id: int
    shard: int
    path: Path  # of the store
    board: SamplerBoard
    limiter: RateLimiter
    seed: np.random.SeedSequence

    def make_sampler(self, row: int, batches: Batches) -> Sampler:
        """A sampler that draws by this row of the board."""
        return Sampler(
            row,
            StoreReader(self.path, self.schema),
            batches,
            self.board,
            self.limiter,
            shard=self.shard,
            batch_size=self.config.part_size,
            batches_in_flight=self.config.replay.batches_in_flight,
            rng=np.random.default_rng(self.seed),
        )


def sample(stop: Stop, index: int, task: SamplerTask, endpoint: str) -> None:
    """A sampler process of the replay server; `endpoint` is the learner's, for batches."""
    with open_context(read_keys(task.config.transport.keys, "replay")) as context:
        sampler = task.make_sampler(index, BatchSender(context, endpoint, Codec(task.run_id, task.schema)))
        while not stop.requested:
            if not sampler.step():
                time.sleep(IDLE_SECONDS)


def board_rows(config: Config) -> int:
    """Rows of the board: the samplers', then the loaders'."""
    return config.replay.num_samplers + max(1, config.learner.num_loaders)


def make_limiter(config: Config) -> RateLimiter:
    """The replay ratio that the configuration asks for: each shard holds it for its own inserts and samples."""
    replay = config.replay.per_shard()
    return RateLimiter(
        replay.min_size_to_sample, replay.samples_per_insert, replay.samples_per_insert_tolerance, replay.inserts_wait
    )
