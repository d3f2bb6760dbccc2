"""Batches on their way into the learner: child processes draw or receive, and decompress into memory that all map.

A batch has a part from each replay shard. Where a shard's server runs on the same host, a loader draws from its store
for itself, and its parts need no socket; else its samplers send them. The trainer never waits for a decompression.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from apex.config import Config
from apex.errors import ConfigError
from apex.learning.batch_ring import BatchRing
from apex.replay_memory.frames.stack_decoder import FrameError, StackDecoder
from apex.replay_memory.sampler import Sampler, make_limiter
from apex.replay_memory.sampler_counters import SamplerCounters, counter_rows
from apex.replay_memory.sampler_process import IDLE_SECONDS, SamplerTask
from apex.replay_memory.store.location import counters_path, has_owner, store_path
from apex.replay_memory.store.reader import BatchSlot
from apex.runtime.lifecycle import POLL_SECONDS, Stop
from apex.transport.codec import Codec
from apex.transport.curve.key_store import read_keys
from apex.transport.endpoints import BatchReceiver, max_batch_bytes
from apex.transport.sockets import open_context
from apex.types import Array, BatchMessage, Schema

log = logging.getLogger("apex")

LOOK_SECONDS = 0.5  # between two looks whether a replay server on this host has come, or made its store anew


class _Rows(NamedTuple):
    """Rows of a slot's stacks: a `reader.BatchSlot`."""

    decoder: StackDecoder
    first_row: int

    def decode_stored(self, arena: Array, stored: Array) -> NDArray[np.bool_]:
        stored["row"] += self.first_row
        good = self.decoder.decode_stored(arena, stored)
        stored["row"] -= self.first_row
        return good


class Loader:
    """Fills a ring: decodes each part into its rows of a free slot, and hands the slot over when it has them all.

    A sampler sees it as a place to send to.
    """

    def __init__(self, schema: Schema, ring: BatchRing) -> None:
        self._ring = ring
        self._decoders = [StackDecoder(schema, stacks) for stacks in ring.stacks]
        self._slot: int | None = None
        self.missing = list(range(ring.num_shards))  # shards whose part the slot has not yet
        self.num_undecodable = 0

    def ready(self, timeout: float) -> bool:
        """Whether there is a slot to fill; waits up to `timeout` seconds for one."""
        if self._slot is None:
            self._slot = self._ring.take_free(timeout)
        return self._slot is not None

    def place(self, shard: int) -> BatchSlot | None:
        """The shard's rows of the slot that is being filled, where frames can be decoded from its memory at once."""
        return None if self._slot is None else self.rows(self._slot, shard)

    def rows(self, slot: int, shard: int) -> BatchSlot | None:
        """A shard's rows of a slot; None where frames cannot be decoded into it straight from a memory."""
        decoder = self._decoders[slot]
        return _Rows(decoder, self._ring.first_row(shard)) if decoder.reads_stores else None

    def send(self, batch: BatchMessage, timeout: float) -> bool:
        """Takes a part of a batch; hands the batch over with its last.

        False without a slot, for a second part of one shard, or for a part that does not decode, which is counted.
        """
        if batch.shard not in self.missing or not self.ready(timeout):
            return False
        assert self._slot is not None
        if batch.blob is not None:
            try:
                self._decoders[self._slot].decode(batch.records, batch.blob, self._ring.first_row(batch.shard))
            except FrameError:
                self.num_undecodable += 1
                return False
        self._ring.put(self._slot, batch)
        self.missing.remove(batch.shard)
        if not self.missing:
            self._ring.hand_over(self._slot)
            self._slot, self.missing = None, list(range(self._ring.num_shards))
        return True


class LocalSource:
    """The store of a replay shard on this host, as far as there is one: the loader draws from it for itself."""

    def __init__(
        self,
        loader: Loader,
        index: int,
        shard: int,
        config: Config,
        schema: Schema,
        run_id: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loader = loader
        self._index = index
        self._shard = shard
        self._config = config
        self._schema = schema
        self._run_id = run_id
        self._path = store_path(run_id, shard)
        self._clock = clock
        self._look_at = 0.0
        self._inode = 0
        self._sampler: Sampler | None = None

    def sampler(self) -> Sampler | None:
        """A sampler of the store as it is now; None while its replay server is not on this host."""
        now = self._clock()
        if now >= self._look_at:
            self._look_at = now + LOOK_SECONDS
            try:
                inode = self._path.stat().st_ino
            except FileNotFoundError:
                inode = 0
            if inode != self._inode and (not inode or has_owner(self._path)):
                self._sampler = self._open() if inode else None
                self._inode = inode if self._sampler is not None else 0
        return self._sampler

    def _open(self) -> Sampler | None:
        """A sampler of the store, or None if it is only half made yet."""
        config, row = self._config, self._config.replay.num_samplers + self._index
        task = SamplerTask(
            config,
            self._schema,
            self._run_id,
            self._shard,
            self._path,
            SamplerCounters(counter_rows(config), counters_path(self._path)),
            make_limiter(config),
            np.random.SeedSequence([config.seed, row, self._inode]),
        )
        try:
            return task.make_sampler(row, self._loader)
        except ConfigError as error:
            log.info("not yet: %s", error)
            return None


class BatchSource(Protocol):
    """Where parts of batches come from that samplers send."""

    def receive(self, timeout: float) -> BatchMessage | None:
        """The next part, or None after `timeout` seconds without one."""


class RemoteSource:
    """Parts that came by socket, in a queue for each shard until a batch has room for them.

    The samplers' credit bounds the queues. While another shard keeps a batch waiting, a sampler sends one more now and
    then: beyond its credit the oldest part is dropped and counted, for it was drawn by the oldest priorities.
    """

    def __init__(self, batches: BatchSource, config: Config) -> None:
        self._batches = batches
        self._credit = config.replay.num_samplers * config.replay.batches_in_flight
        self._queues: list[deque[BatchMessage]] = [deque() for _ in range(config.replay.num_shards)]
        self.num_dropped = 0

    def take(self, shards: Sequence[int], timeout: float) -> BatchMessage | None:
        """A part of one of these shards, the oldest of its own; None if what came within `timeout` seconds is none."""
        if not any(self._queues[shard] for shard in shards):
            part = self._batches.receive(timeout)
            if part is None:
                return None
            queue = self._queues[part.shard]
            queue.append(part)
            if len(queue) > self._credit:
                queue.popleft()
                self.num_dropped += 1
        return next((self._queues[shard].popleft() for shard in shards if self._queues[shard]), None)


def run_loader(stop: Stop, index: int, config: Config, schema: Schema, ring: BatchRing, run_id: int) -> None:
    """A loader process. The first one also listens for the samplers of replay shards on other hosts."""
    loader = Loader(schema, ring)
    shards = range(config.replay.num_shards)
    stores = [LocalSource(loader, index, shard, config, schema, run_id) for shard in shards]
    draws = config.transport.shared_memory
    with open_context(read_keys(config.transport.keys, "learner")) as context:
        remote = batches = None
        if index == 0:
            batches = BatchReceiver(
                context,
                config.transport.endpoint("batches"),
                Codec(run_id, schema),
                batch_size=config.part_size,
                max_bytes=max_batch_bytes(schema, config.part_size),
                num_shards=config.replay.num_shards,
            )
            remote = RemoteSource(batches, config)
        while not stop.requested:
            context.check()
            ring.loaders.seconds[index] = time.process_time()
            if batches is not None:
                ring.refused[0] = batches.num_refused
            if loader.ready(POLL_SECONDS):
                samplers = [store.sampler() if draws else None for store in stores]
                ring.loaders.draws[index] = None not in samplers
                fill(loader, samplers, remote)


def fill(loader: Loader, samplers: Sequence[Sampler | None], remote: RemoteSource | None) -> None:
    """Draws what the loader's batch lacks of shards on this host, and takes a part of another; waits if there is none.

    `samplers`: for each shard one that draws, or None where it is on another host; `remote`: where parts come from
    then, if this loader gets them.
    """
    elsewhere = [shard for shard in loader.missing if samplers[shard] is None]
    if elsewhere and remote is None:
        time.sleep(POLL_SECONDS)
        return
    drawn = [sampler.step() for shard in tuple(loader.missing) if (sampler := samplers[shard]) is not None]
    if elsewhere and remote is not None:
        part = remote.take(elsewhere, POLL_SECONDS if all(drawn) else IDLE_SECONDS)
        if part is not None:
            loader.send(part, 0.0)
    elif not any(drawn):
        time.sleep(IDLE_SECONDS)
