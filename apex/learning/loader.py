"""Loads batches for the learner: child processes draw or receive them, and decompress them into shared memory.

A batch has a part from each replay shard. If a shard's server runs on the same host, a loader draws from its replay
memory directly, without a socket; otherwise it asks the shard's samplers for parts. The trainer never decompresses.
"""

import logging
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from typing import NamedTuple

import numpy as np

from apex.config import Config
from apex.learning.batch_ring import BatchRing, BatchSlot
from apex.learning.batch_source import LocalSource, RemoteSource
from apex.learning.random_shift import RandomShift
from apex.replay_memory.settings import batch_endpoints, counter_rows, draw_settings
from apex.schema import Schema
from apex.transport.curve.key_store import read_keys
from apex.transport.run_codec import RunCodec
from apex.types import Role
from apexreplay.errors import UsageError
from apexreplay.frames.stack_decoder import StackDecoder
from apexreplay.process.children import start_child
from apexreplay.process.freed_memory import keep_freed_memory
from apexreplay.process.lifecycle import POLL_SECONDS, Stop
from apexreplay.sampling.batch_drawer import BatchDrawer
from apexreplay.sampling.sampler_counters import SamplerCounters
from apexreplay.server.sampler import IDLE_SECONDS
from apexreplay.store.location import counters_path, has_owner, store_path
from apexreplay.store.reader import StoreReader
from apexreplay.transport.endpoints import BatchRequester
from apexreplay.transport.sockets import Context, open_context

LOOK_SECONDS = 0.5  # time between two checks for a new replay memory file

log = logging.getLogger("apex")


class Loader:
    """Fills the slots of a ring one after the other. Passes a slot to the trainer when all shards' parts are filled."""

    def __init__(self, schema: Schema, ring: BatchRing, shift: RandomShift) -> None:
        self._ring = ring
        self._shift = shift
        self._decoders = [StackDecoder(schema.table, [stacks]) for stacks in ring.stacks]
        self._slot: int | None = None
        self.missing = list(range(ring.num_shards))  # shards whose part is still missing in the slot

    def ready(self, timeout: float) -> bool:
        """Returns whether there is a slot to fill; waits up to `timeout` seconds for a free slot."""
        if self._slot is None:
            self._slot = self._ring.take_free(timeout)
        return self._slot is not None

    def fill(self, sources: Sequence[LocalSource | RemoteSource | None]) -> bool:
        """Fills the missing parts whose sources have data; returns whether any part was filled.

        Call `ready` first, which takes a slot: without a slot, returns False.
        """
        slot, missing = self._slot, self.missing
        if slot is None:
            return False
        self.missing = []
        for shard in missing:
            source = sources[shard]
            if source is None or not source.fill(BatchSlot(self._ring, self._decoders[slot], slot, shard)):
                self.missing.append(shard)
        filled = len(self.missing) < len(missing)
        if not self.missing:
            self._shift.apply(self._ring.stacks[slot])
            self._ring.hand_over(slot)
            self._slot, self.missing = None, list(range(self._ring.num_shards))
        return filled


class LoaderTask(NamedTuple):
    """The arguments of the loader processes."""

    schema: Schema
    ring: BatchRing
    run_id: int
    config: Config

    def connect(self, context: Context, shard: int, host: str) -> BatchRequester:
        """Connects to the samplers of a shard on `host`. All loaders together may have `batches_in_flight` of each."""
        replay, num_loaders = self.config.replay, max(1, self.config.learner.num_loaders)
        return BatchRequester(
            context,
            batch_endpoints(self.config, shard, host),
            RunCodec(self.run_id, self.schema),
            batch_size=self.ring.part_size,
            credit=max(1, replay.batches_in_flight // num_loaders),
            shard=shard,
        )


class StoreMonitor:
    """Checks periodically for the replay memory of a shard on this host, so that a loader can draw from it directly."""

    def __init__(self, task: LoaderTask, index: int, shard: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`index`: number of the loader."""
        self._task = task
        self._index = index
        self._shard = shard
        self._path = store_path(task.run_id, shard)
        self._clock = clock
        self._look_at = 0.0
        self._inode = 0
        self._source: LocalSource | None = None
        self._host = b""  # where the server was when the source was opened

    def source(self, host: bytes = b"", *, now_at_latest: bool = False) -> LocalSource | None:
        """Returns a source over the current replay memory; None while the shard's server is not on this host.

        Looks for the file every LOOK_SECONDS, and with `now_at_latest` also in this call if there is no source.
        `host`: of the server that has joined; b"": none has. A server that was stopped leaves its file: if the next one
        is on another host, the file is out of date.
        """
        now = self._clock()
        if now >= self._look_at or (now_at_latest and self._source is None):
            self._look_at = now + LOOK_SECONDS
            try:
                inode = self._path.stat().st_ino
            except FileNotFoundError:
                inode = 0
            self._host = self._host or host
            if self._source is not None and host != self._host and not has_owner(self._path):
                self._source, self._inode = None, 0
            if inode != self._inode and (not inode or has_owner(self._path)):
                self._source = self._open(inode) if inode else None
                self._inode = inode if self._source is not None else 0
                self._host = host
        return self._source

    def _open(self, inode: int) -> LocalSource | None:
        """Opens the replay memory; returns None while it is created."""
        task, config = self._task, self._task.config
        row = config.replay.num_samplers + self._index
        try:
            reader = StoreReader(self._path, task.schema.table)
        except UsageError as error:
            log.info("the replay memory is not ready: %s", error)
            return None
        counters = SamplerCounters(counter_rows(config.replay, config.learner), counters_path(self._path))
        settings = draw_settings(config.replay, self._shard, config.learner.batch_size)
        rng = np.random.default_rng([config.seed, row, inode])
        return LocalSource(BatchDrawer(reader, counters, row, settings, rng))


class ShardSource:
    """Finds the source of a shard's parts: its replay memory on this host, else the samplers of its server."""

    def __init__(self, task: LoaderTask, index: int, shard: int, context: Context) -> None:
        """`index`: number of the loader."""
        self._monitor = StoreMonitor(task, index, shard)
        self._task = task
        self._shard = shard
        self._context = context
        self._host = b""  # to whose samplers this loader is connected
        self._remote: RemoteSource | None = None

    def find(self) -> LocalSource | RemoteSource | None:
        """Returns the present source; None while the shard's server has not joined. Connects only to another host."""
        host = bytes(self._task.ring.hosts[self._shard])
        is_new = host not in (b"", self._host)
        # A server joins after it has created its replay memory, so this look finds one on this host.
        local = self._monitor.source(host, now_at_latest=is_new) if self._task.config.transport.shared_memory else None
        if local is None and is_new:
            if self._remote is not None:
                self._remote.requester.close()
            self._host = host
            self._remote = RemoteSource(self._task.connect(self._context, self._shard, host.decode()))
        return local or self._remote

    @property
    def num_refused(self) -> int:
        """Number of messages that were not valid parts."""
        return 0 if self._remote is None else self._remote.requester.num_refused


def start_loaders(task: LoaderTask) -> list[BaseProcess]:
    """Starts the processes that fill the ring. Call this before this process has a ZeroMQ context or a thread."""
    num_loaders = max(1, task.config.learner.num_loaders)
    return [start_child(f"loader-{index}", run_loader, index, task) for index in range(num_loaders)]


def run_loader(stop: Stop, index: int, task: LoaderTask) -> None:
    """Runs a loader process."""
    keep_freed_memory()
    ring = task.ring
    loader = Loader(task.schema, ring, RandomShift.configured(task.config, index, task.schema.parts))
    with open_context(read_keys(task.config.transport.keys, Role.LEARNER)) as context:
        shards = [ShardSource(task, index, shard, context) for shard in range(ring.num_shards)]
        while not stop.poll():
            ring.loaders.seconds[index] = time.process_time()
            ring.loaders.refused[index] = sum(shard.num_refused for shard in shards)
            if loader.ready(POLL_SECONDS):
                sources = [shard.find() for shard in shards]
                ring.loaders.draws[index] = all(isinstance(source, LocalSource) for source in sources)
                load(loader, sources)


def load(loader: Loader, sources: Sequence[LocalSource | RemoteSource | None]) -> None:
    """Fills all available parts of the loader's batch. If no part is available, waits for one or sleeps briefly.

    `sources`: of each shard; None while its server has not joined.
    """
    if loader.fill(sources):
        return
    remote = [source for shard in loader.missing if isinstance(source := sources[shard], RemoteSource)]
    if remote:
        # A batch needs all parts, so the order in which this waits for remote ones does not matter.
        remote[0].receive(POLL_SECONDS if len(remote) == len(loader.missing) else IDLE_SECONDS)
    else:
        time.sleep(IDLE_SECONDS)
