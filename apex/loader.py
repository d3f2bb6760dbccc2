"""Batches on their way into the learner: a child process receives and decompresses into memory that both map.

The trainer never waits for a decompression, and no batch is copied between the two: a byte in a pipe hands over
the slot of the ring that holds it.
"""

from __future__ import annotations

import mmap
import os
import select
import time
from math import prod
from typing import NamedTuple, Protocol

import numpy as np

from apex.lifecycle import POLL_SECONDS, Stop
from apex.stacks import FrameError, StackDecoder
from apex.transport import BatchReceiver, max_batch_bytes, open_context
from apex.types import Array, SampleBatch, Schema
from apex.wire import Codec

NUM_SLOTS = 3  # one being trained on, one ready, one being filled


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


class Batches(Protocol):
    """Where batches come from."""

    def receive(self, timeout: float) -> SampleBatch | None:
        """The next batch, or None after `timeout` seconds without one."""


class Loader:
    """Fills a ring: receives a batch, decodes it, hands it over."""

    def __init__(self, schema: Schema, ring: SampleRing, batches: Batches) -> None:
        self._ring = ring
        self._batches = batches
        self._decoders = [StackDecoder(schema, stacks) for stacks in ring.stacks]
        self._slot: int | None = None
        self.num_undecodable = 0

    def step(self, timeout: float) -> bool:
        """Loads one batch if there is one; returns whether it was handed over."""
        if self._slot is None:
            self._slot = self._ring.take_free(timeout)
        if self._slot is None:
            return False
        batch = self._batches.receive(timeout)
        if batch is None:
            return False
        try:
            self._decoders[self._slot].decode(batch.records, batch.image)
        except FrameError:
            self.num_undecodable += 1
            return False
        self._ring.put(self._slot, batch)
        self._slot = None
        return True


def load(stop: Stop, schema: Schema, ring: SampleRing, run_id: int, endpoint: str, batch_size: int) -> None:
    """The child's main function."""
    with open_context() as context:
        limit = max_batch_bytes(schema, batch_size)
        batches = BatchReceiver(context, endpoint, Codec(run_id, schema), batch_size=batch_size, max_bytes=limit)
        loader = Loader(schema, ring, batches)
        while not stop.requested:
            loader.step(POLL_SECONDS)


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
