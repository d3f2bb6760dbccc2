"""Batches on their way into the learner: child processes draw or receive, and decompress into memory that all map.

Where the replay server runs on the same host, a loader draws from its store for itself, and batches need no socket;
else its samplers send them. The trainer never waits for a decompression, and no batch is copied between the two: a byte
in a pipe hands over the slot of the ring that holds it.
"""

from __future__ import annotations

import logging
import mmap
import os
import select
import time
from collections.abc import Callable
from math import prod
from typing import NamedTuple

import numpy as np

from apex.config import Config, ConfigError
from apex.lifecycle import POLL_SECONDS, Stop
from apex.sampler import IDLE_SECONDS, Sampler, SamplerBoard, SamplerTask, board_rows, make_limiter
from apex.stacks import FrameError, StackDecoder
from apex.store_layout import board_path, has_owner, store_path
from apex.transport import BatchReceiver, max_batch_bytes, open_context
from apex.types import Array, SampleBatch, Schema
from apex.wire import Codec

log = logging.getLogger("apex")

NUM_SLOTS = 3  # one being trained on, one ready, one being filled; with more loaders more
LOOK_SECONDS = 0.5  # between two looks whether a replay server on this host has come, or made its store anew


class Sample(NamedTuple):
    """A batch in the learner's memory: views of a slot, valid until the slot is released."""

    stacks: Array  # frame_dtype[2, B, S, *F]: s_t, s_{t+m}
    keys: Array  # int64[B]
    probability: Array  # float64[B]
    action: Array  # int64[B]
    n_step_return: Array  # float32[B]
    discount: Array  # float32[B]
    version: Array  # int64[B]  parameters that chose the action
    num_transitions: int
    shard: int
    store_incarnation: int
    sampler: int
    number: int
    slot: int


class SampleRing:
    """A few samples in anonymous shared memory, made before the fork."""

    def __init__(self, schema: Schema, batch_size: int, num_slots: int = NUM_SLOTS) -> None:
        shape = (2, batch_size, *schema.observation_shape)
        self.dtype = np.dtype(
            [
                ("keys", "<i8", batch_size),
                ("probability", "<f8", batch_size),
                ("action", "<i8", batch_size),
                ("version", "<i8", batch_size),
                ("n_step_return", "<f4", batch_size),
                ("discount", "<f4", batch_size),
                ("facts", "<i8", 5),
            ]
        )
        frame_bytes = prod(shape) * np.dtype(schema.frame_dtype).itemsize
        slot_bytes = -(-(frame_bytes + self.dtype.itemsize) // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = mmap.mmap(-1, slot_bytes * num_slots)
        self.memory = np.frombuffer(memory, np.uint8)  # all slots, for who wants to lock them
        self.num_slots = num_slots
        self.stacks = [
            np.frombuffer(memory, schema.frame_dtype, prod(shape), slot * slot_bytes).reshape(shape)
            for slot in range(num_slots)
        ]
        self._fields = [
            np.frombuffer(memory, self.dtype, 1, slot * slot_bytes + frame_bytes)[0] for slot in range(num_slots)
        ]
        self._ready = os.pipe()
        self._free = os.pipe()
        for end in (*self._ready, *self._free):
            os.set_blocking(end, False)
        os.write(self._free[1], bytes(range(num_slots)))

    # --- the filling side -------------------------------------------------------------------------------------------

    def take_free(self, timeout: float) -> int | None:
        """A slot to fill, or None after `timeout` seconds without one."""
        return _read_byte(self._free[0], timeout)

    def put(self, slot: int, batch: SampleBatch) -> None:
        """Hands over a slot whose stacks are filled."""
        fields, records = self._fields[slot], batch.records
        fields["keys"] = records["key"]
        for name in ("probability", "action", "version", "n_step_return", "discount"):
            fields[name] = records[name]
        fields["facts"] = (
            batch.num_transitions,
            batch.shard,
            _signed(batch.store_incarnation),
            batch.sampler,
            batch.number,
        )
        os.write(self._ready[1], bytes([slot]))

    # --- the reading side -------------------------------------------------------------------------------------------

    def receive(self, timeout: float) -> Sample | None:
        """The oldest filled slot, or None after `timeout` seconds without one."""
        slot = _read_byte(self._ready[0], timeout)
        if slot is None:
            return None
        fields = self._fields[slot]
        num_transitions, shard, store_incarnation, sampler, number = fields["facts"].tolist()
        return Sample(
            stacks=self.stacks[slot],
            keys=fields["keys"],
            probability=fields["probability"],
            action=fields["action"],
            n_step_return=fields["n_step_return"],
            discount=fields["discount"],
            version=fields["version"],
            num_transitions=num_transitions,
            shard=shard,
            store_incarnation=store_incarnation % 2**64,
            sampler=sampler,
            number=number,
            slot=slot,
        )

    def release(self, slot: int) -> None:
        """Gives a slot back to be filled again."""
        os.write(self._free[1], bytes([slot]))


class Loader:
    """Fills a ring: decodes a batch into a free slot, and hands it over. A sampler sees it as a place to send to."""

    def __init__(self, schema: Schema, ring: SampleRing) -> None:
        self._ring = ring
        self._decoders = [StackDecoder(schema, stacks) for stacks in ring.stacks]
        self._slot: int | None = None
        self.num_undecodable = 0

    def ready(self, timeout: float) -> bool:
        """Whether there is a slot to fill; waits up to `timeout` seconds for one."""
        if self._slot is None:
            self._slot = self._ring.take_free(timeout)
        return self._slot is not None

    def send(self, batch: SampleBatch, timeout: float) -> bool:
        """Decodes and hands over; False without a slot, or for a batch that does not decode, which is counted."""
        if not self.ready(timeout):
            return False
        assert self._slot is not None
        try:
            self._decoders[self._slot].decode(batch.records, batch.image)
        except FrameError:
            self.num_undecodable += 1
            return False
        self._ring.put(self._slot, batch)
        self._slot = None
        return True


class DirectSource:
    """The store of a replay server on this host, as far as there is one: the loader draws from it for itself."""

    def __init__(
        self,
        loader: Loader,
        index: int,
        config: Config,
        schema: Schema,
        run_id: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loader = loader
        self._index = index
        self._config = config
        self._schema = schema
        self._run_id = run_id
        self._path = store_path(run_id)
        self._clock = clock
        self._look_at = 0.0
        self._inode = 0
        self._sampler: Sampler | None = None

    def sampler(self) -> Sampler | None:
        """A sampler of the store as it is now; None while no replay server of this run is on this host."""
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
            self._path,
            SamplerBoard(board_rows(config), board_path(self._path)),
            make_limiter(config),
            np.random.SeedSequence([config.seed, row, self._inode]),
        )
        try:
            return task.make_sampler(row, self._loader)
        except ConfigError as error:
            log.info("not yet: %s", error)
            return None


def load(stop: Stop, index: int, config: Config, schema: Schema, ring: SampleRing, run_id: int) -> None:
    """A loader process. The first one also listens for the samplers of a replay server on another host."""
    loader = Loader(schema, ring)
    direct = DirectSource(loader, index, config, schema, run_id)
    batch_size = config.learner.batch_size
    with open_context() as context:
        batches = None
        if index == 0:
            limit = max_batch_bytes(schema, batch_size)
            endpoint = config.transport.endpoint("batches")
            batches = BatchReceiver(context, endpoint, Codec(run_id, schema), batch_size=batch_size, max_bytes=limit)
        while not stop.requested:
            if not loader.ready(POLL_SECONDS):
                continue
            sampler = direct.sampler() if config.transport.shared_memory else None
            if sampler is not None:
                if not sampler.step():
                    time.sleep(IDLE_SECONDS)
            elif batches is not None:
                batch = batches.receive(POLL_SECONDS)
                if batch is not None:
                    loader.send(batch, 0.0)
            else:
                time.sleep(POLL_SECONDS)


def _read_byte(descriptor: int, timeout: float) -> int | None:
    deadline = time.monotonic() + timeout
    while True:
        try:
            data = os.read(descriptor, 1)
            if data:
                return data[0]
            return None
        except BlockingIOError:
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not select.select([descriptor], [], [], remaining)[0]:
                return None


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number
