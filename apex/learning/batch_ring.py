"""Batches in memory that loaders and trainer share. Only the number of a batch's slot is sent, as a byte in a pipe."""

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
from apex.schema import Schema, unpack_mask
from apexreplay.facts import MAX_TEXT
from apexreplay.frames.stack_decoder import StackDecoder
from apexreplay.item_kinds import Array
from apexreplay.types import BatchMessage, PriorityUpdate

NUM_SLOTS = 3  # slots: one in training, one ready, one being filled; each further loader needs one more
MAX_BEHIND = 2  # updates that a GPU may be behind: one being computed, one queued; their slots must not change
MOST_LOADERS = 64
ROW_FIELDS = ("keys", "probability", "action", "n_step_return", "discount", "version")  # of every `Batch`
SEQUENCE_FIELDS = ("span", "state")  # of a `Batch` of sequences
MAX_RETURN = 1e15  # largest usable |n_step_return|: beyond it, squares of TD errors and gradients overflow


class BatchPart(NamedTuple):
    """The origin of one part of a batch. The fields are named as in `types.BatchMessage`."""

    shard: int
    store_incarnation: int
    sampler: int
    number: int


class Batch(NamedTuple):
    """A batch in the learner's memory: views of a slot, valid until the slot is released.

    Of sequences, `stacks` is frame_dtype[1, B, L, *F], and fields of a transition have an axis of steps: [B, L, ...].
    A batch has one part of B/R rows from each of the R replay shards, in the order of the shards.
    """

    stacks: Array  # frame_dtype[2, B, S, *F]: s_t, s_{t+m}
    keys: Array  # int64[B]  key of each transition in its shard
    # P(i), see `BatchDrawer`. Infinite for an unusable row, whose frames do not decompress or whose
    # |n_step_return| is above MAX_RETURN: its weight and priority are 0.
    probability: Array  # float64[B]
    action: Array  # int64[B] or float32[B, K]
    n_step_return: Array  # float32[B]
    discount: Array  # float32[B]
    version: Array  # int64[B]  version of the parameters that chose the action
    num_transitions: int  # N: live transitions in all shards when the batch was drawn
    parts: list[BatchPart]
    slot: int
    next_mask: Array | None = None  # bool[B, A]  actions allowed in s_{t+m}; None: the environment has no masks
    span: Array | None = None  # uint8[B, L]  m, see `schema.sequences`; None: a batch of transitions
    state: Array | None = None  # float32[B, D]

    @property
    def usable(self) -> NDArray[np.bool_]:
        """bool[B]: which rows can be used for training."""
        return np.isfinite(self.probability)

    def updates(self, priorities: Array) -> list[PriorityUpdate]:
        """Returns one update per part with the new `priorities`, float32[B]. Send each update to the part's shard."""
        shape = len(self.parts), -1
        keys, values = self.keys.reshape(shape).copy(), np.where(self.usable, priorities, np.float32(0)).reshape(shape)
        return [PriorityUpdate(*part, *own) for part, *own in zip(self.parts, keys, values, strict=True)]


class LoaderFigures(NamedTuple):
    """Figures of the loaders, one per loader, in memory shared with the trainer."""

    seconds: NDArray[np.float64]  # CPU time of the loader in seconds
    draws: NDArray[np.float64]  # 1 while the loader draws whole batches from local memory, 0 while samplers send parts
    refused: NDArray[np.float64]  # number of messages that were not valid batches


class BatchRing:
    """A few batches in anonymous shared memory. Create the ring before forking the loaders."""

    def __init__(self, schema: Schema, batch_size: int, num_slots: int = NUM_SLOTS, num_shards: int = 1) -> None:
        """`batch_size` must be a multiple of `num_shards`."""
        item, length = schema.table.item, schema.sequence_length
        shape = (len(item.positions), batch_size, item.width, *schema.frame_shape)
        rows = (batch_size, length) if length else (batch_size,)
        self._num_masked = schema.num_actions if schema.masked else 0
        self._copied = ("action", "version", "discount", *(SEQUENCE_FIELDS if length else ()))
        self._row_fields = (*ROW_FIELDS, *(SEQUENCE_FIELDS if length else ()))
        self.dtype = np.dtype(
            [
                ("keys", "<i8", batch_size),
                ("probability", "<f8", batch_size),
                ("action", schema.action_dtype, (*rows, *schema.action_shape)),
                ("version", "<i8", batch_size),
                ("n_step_return", "<f4", rows),
                ("discount", "<f4", rows),
                ("parts", "<u8", (num_shards, 5)),  # fields of `BatchPart`, then number of live transitions
                ("next_mask", "?", (*rows, self._num_masked)),
                ("span", "u1", (batch_size, length)),
                ("state", "<f4", (batch_size, schema.state_size)),
            ]
        )
        frame_bytes = prod(shape) * np.dtype(schema.frame_dtype).itemsize
        slot_bytes = -(-(frame_bytes + self.dtype.itemsize) // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = mmap.mmap(-1, slot_bytes * num_slots)
        self.memory = np.frombuffer(memory, np.uint8)  # memory of all slots, page-locked for a GPU
        self.loaders = LoaderFigures(*np.frombuffer(mmap.mmap(-1, 3 * 8 * MOST_LOADERS), np.float64).reshape(3, -1))
        # bytes[R]: host of each shard's server, b"" until it has joined; set by the trainer, read by the loaders
        self.hosts = np.frombuffer(mmap.mmap(-1, num_shards * MAX_TEXT), f"S{MAX_TEXT}")
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
        """Creates the ring of a learner from its sized configuration."""
        return cls(schema, learner.batch_size, slots_needed(learner.num_loaders, cuda=cuda), num_shards)

    # --- the filling side -------------------------------------------------------------------------------------------

    def take_free(self, timeout: float) -> int | None:
        """Returns a slot to fill, or None after `timeout` seconds without a free slot."""
        return _read_byte(self._free[0], timeout)

    def put(self, slot: int, part: BatchMessage, decoded: NDArray[np.bool_], rows: NDArray[np.int64]) -> None:
        """Writes all fields of a part except its stacks. `decoded`: which stacks could be decoded; `rows`: of each."""
        fields, records = self._fields[slot], part.records
        fields["keys"][rows] = records["key"]
        for name in self._copied:
            fields[name][rows] = records[name]
        if self._num_masked:
            fields["next_mask"][rows] = unpack_mask(records["next_mask"], self._num_masked)
        returns = records["n_step_return"]
        usable = decoded & (np.abs(returns) <= MAX_RETURN).reshape(len(returns), -1).all(1)
        fields["n_step_return"][rows] = np.where(usable.reshape(-1, *(1,) * (returns.ndim - 1)), returns, 0)
        fields["probability"][rows] = np.where(usable, records["probability"], np.inf)
        fields["parts"][part.shard] = part[:5]  # up to `num_transitions`

    def hand_over(self, slot: int) -> None:
        """Passes a slot to the reading side; all parts of its batch must be filled."""
        os.write(self._ready[1], bytes([slot]))

    # --- the reading side -------------------------------------------------------------------------------------------

    def receive(self, timeout: float) -> Batch | None:
        """Returns the batch of the oldest filled slot, or None after `timeout` seconds without a filled slot."""
        slot = _read_byte(self._ready[0], timeout)
        if slot is None:
            return None
        fields = self._fields[slot]
        parts = fields["parts"].tolist()
        return Batch(
            stacks=self.stacks[slot],
            **{name: fields[name] for name in self._row_fields},
            next_mask=fields["next_mask"] if self._num_masked else None,
            num_transitions=sum(num_transitions for *_, num_transitions in parts),
            parts=[BatchPart(*part) for *part, _ in parts],
            slot=slot,
        )

    def release(self, slot: int) -> None:
        """Releases a slot, which may then be filled again."""
        os.write(self._free[1], bytes([slot]))


class BatchSlot(NamedTuple):
    """The rows of a shard's part in a slot that is being filled."""

    ring: BatchRing
    decoder: StackDecoder  # decoder that writes into the slot
    slot: int
    shard: int

    @property
    def rows(self) -> NDArray[np.int64]:
        """The rows of the part, int64[B/R]."""
        return np.arange(self.shard * self.ring.part_size, (self.shard + 1) * self.ring.part_size)

    def put(self, part: BatchMessage, decoded: NDArray[np.bool_], rows: NDArray[np.int64]) -> None:
        """Writes the part, whose frames are decoded already; see `BatchRing.put`."""
        self.ring.put(self.slot, part, decoded, rows)


def slots_needed(num_loaders: int, *, cuda: bool) -> int:
    """Returns the number of slots needed for batches being filled, in training, or waiting for a GPU's results."""
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
