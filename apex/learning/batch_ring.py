"""Batches in memory that loaders and trainer share: a byte in a pipe hands over the slot that holds one, uncopied."""

from __future__ import annotations

import mmap
import os
import select
import time
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from apex.config import LearnerConfig
from apex.replay_memory.frames.stack_decoder import StackDecoder
from apex.types import Array, BatchMessage, PriorityUpdate, Schema

NUM_SLOTS = 3  # one being trained on, one ready, one being filled; with more loaders more
MAX_BEHIND = 2  # steps that a GPU may be behind: one is computed, one lies ready; their slots stay as they are
MOST_LOADERS = 64
MAX_RETURN = 1e15  # of a transition that is learned from: beyond it squares of TD errors and gradients overflow


class BatchPart(NamedTuple):
    """Where B/R transitions of a batch come from, by the names of `types.BatchMessage`."""

    shard: int
    store_incarnation: int
    sampler: int
    number: int


class Batch(NamedTuple):
    """A batch in the learner's memory: views of a slot, valid until the slot is released.

    It has one part from each of the R replay shards, B/R rows each, in the order of the shards.
    """

    stacks: Array  # frame_dtype[2, B, S, *F]: s_t, s_{t+m}
    keys: Array  # int64[B]  each of its own shard's
    # P(i) = 1/R * leaf / root of its shard: every shard gives 1/R of each batch. Infinite for a row that cannot be
    # learned from, as its frames do not decompress or its return is beyond MAX_RETURN: its weight and priority are 0.
    probability: Array  # float64[B]
    action: Array  # int64[B]
    n_step_return: Array  # float32[B]
    discount: Array  # float32[B]
    version: Array  # int64[B]  parameters that chose the action
    num_transitions: int  # alive in all shards when it was drawn: N
    parts: list[BatchPart]
    slot: int

    @property
    def usable(self) -> NDArray[np.bool_]:
        """bool[B]  which rows can be learned from."""
        return np.isfinite(self.probability)

    def updates(self, priorities: Array) -> list[PriorityUpdate]:
        """New priorities, float32[B], for the keys: one update for each part, to be sent to where it came from."""
        size = len(self.keys) // len(self.parts)
        priorities = np.where(self.usable, priorities, np.float32(0))
        rows = [slice(size * index, size * (index + 1)) for index in range(len(self.parts))]
        return [
            PriorityUpdate(*part, self.keys[own].copy(), priorities[own])
            for part, own in zip(self.parts, rows, strict=True)
        ]


class LoaderFigures(NamedTuple):
    """What the loaders say of themselves, in memory that the trainer maps too."""

    seconds: NDArray[np.float64]  # of each: processor time; what it waits takes none
    draws: NDArray[np.float64]  # of each: 1 while it draws every shard's part for itself, else 0
    refused: NDArray[np.float64]  # of each: messages that were no batches


class BatchRing:
    """A few batches in anonymous shared memory, made before the fork."""

    def __init__(self, schema: Schema, batch_size: int, num_slots: int = NUM_SLOTS, num_shards: int = 1) -> None:
        """`batch_size` must be a multiple of `num_shards`."""
        shape = (2, batch_size, *schema.observation_shape)
        self.dtype = np.dtype(
            [
                ("keys", "<i8", batch_size),
                ("probability", "<f8", batch_size),
                ("action", "<i8", batch_size),
                ("version", "<i8", batch_size),
                ("n_step_return", "<f4", batch_size),
                ("discount", "<f4", batch_size),
                ("parts", "<u8", (num_shards, 5)),  # `BatchPart`, and transitions alive
            ]
        )
        frame_bytes = prod(shape) * np.dtype(schema.frame_dtype).itemsize
        slot_bytes = -(-(frame_bytes + self.dtype.itemsize) // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = mmap.mmap(-1, slot_bytes * num_slots)
        self.memory = np.frombuffer(memory, np.uint8)  # all slots, for who wants to lock them
        self.loaders = LoaderFigures(*np.frombuffer(mmap.mmap(-1, 3 * 8 * MOST_LOADERS), np.float64).reshape(3, -1))
        self.num_slots = num_slots
        self.batch_size = batch_size
        self.num_shards = num_shards
        self.part_size = batch_size // num_shards
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

    @classmethod
    def configured(cls, learner: LearnerConfig, num_shards: int, schema: Schema, *, cuda: bool) -> BatchRing:
        """A learner's, by a sized configuration."""
        num_slots = slots_needed(learner.num_loaders, cuda=cuda)
        return cls(schema, learner.batch_size, num_slots, num_shards)

    # --- the filling side -------------------------------------------------------------------------------------------

    def take_free(self, timeout: float) -> int | None:
        """A slot to fill, or None after `timeout` seconds without one."""
        return _read_byte(self._free[0], timeout)

    def first_row(self, shard: int) -> int:
        """Where the part of a shard begins in a batch."""
        return shard * self.part_size

    def put(self, slot: int, part: BatchMessage, decoded: NDArray[np.bool_] | None = None) -> None:
        """Writes what a part says beside its stacks; `decoded`: which rows have them, all if None."""
        fields, records, first = self._fields[slot], part.records, self.first_row(part.shard)
        rows = slice(first, first + self.part_size)
        fields["keys"][rows] = records["key"]
        for name in ("action", "version", "discount"):
            fields[name][rows] = records[name]
        usable = np.abs(records["n_step_return"]) <= MAX_RETURN
        if decoded is not None:
            usable &= decoded
        fields["n_step_return"][rows] = np.where(usable, records["n_step_return"], 0)
        share = records["probability"] / self.num_shards  # the shard's share of every batch
        fields["probability"][rows] = np.where(usable, share, np.inf)
        fields["parts"][part.shard] = (
            part.shard,
            part.store_incarnation,
            part.sampler,
            part.number,
            part.num_transitions,
        )

    def hand_over(self, slot: int) -> None:
        """Gives a slot to the reading side: all parts are in it."""
        os.write(self._ready[1], bytes([slot]))

    # --- the reading side -------------------------------------------------------------------------------------------

    def receive(self, timeout: float) -> Batch | None:
        """The oldest filled slot, or None after `timeout` seconds without one."""
        slot = _read_byte(self._ready[0], timeout)
        if slot is None:
            return None
        fields = self._fields[slot]
        parts = fields["parts"].tolist()
        return Batch(
            stacks=self.stacks[slot],
            keys=fields["keys"],
            probability=fields["probability"],
            action=fields["action"],
            n_step_return=fields["n_step_return"],
            discount=fields["discount"],
            version=fields["version"],
            num_transitions=sum(num_transitions for *_, num_transitions in parts),
            parts=[BatchPart(*part) for *part, _ in parts],
            slot=slot,
        )

    def release(self, slot: int) -> None:
        """Gives a slot back to be filled again."""
        os.write(self._free[1], bytes([slot]))


class BatchSlot(NamedTuple):
    """The rows that a shard's part takes in a slot that is being filled: a `reader.FrameDecoder`."""

    ring: BatchRing
    decoder: StackDecoder  # of the slot
    slot: int
    shard: int

    @property
    def reads_stores(self) -> bool:
        """Whether `decode_stored` can be called here."""
        return self.decoder.reads_stores

    def decode_stored(self, arena: NDArray[np.uint8], stored: Array) -> NDArray[np.bool_]:
        """See `reader.FrameDecoder`; it changes the numbers of the rows in `stored`."""
        stored["row"] += self.ring.first_row(self.shard)
        return self.decoder.decode_stored(arena, stored)

    def put(self, part: BatchMessage) -> None:
        """Writes the part, its frames too where they are compressed still."""
        decoded = None
        if part.blob is not None:
            decoded = self.decoder.decode_sound(part.records, part.blob, self.ring.first_row(self.shard))
        self.ring.put(self.slot, part, decoded)


def slots_needed(num_loaders: int, *, cuda: bool) -> int:
    """Slots enough for all that are filled, trained on, or not yet done with."""
    return NUM_SLOTS + max(1, num_loaders) - 1 + (MAX_BEHIND if cuda else 0)


def _read_byte(descriptor: int, timeout: float) -> int | None:
    deadline = time.monotonic() + timeout
    while True:
        try:
            return os.read(descriptor, 1)[0]
        except BlockingIOError:
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not select.select([descriptor], [], [], remaining)[0]:
                return None
