"""Sources of the parts of a batch: the replay memory of a shard on this host, or samplers on another host."""

from collections import deque
from collections.abc import Callable

import numpy as np

from apex.learning.batch_ring import BatchSlot
from apexreplay.item_kinds import Array
from apexreplay.sampling.batch_drawer import BatchDrawer
from apexreplay.store.reader import MAX_ATTEMPTS
from apexreplay.types import BatchMessage


class LocalSource:
    """Draws from the replay memory of a shard on this host, and decodes the frames directly into the slot."""

    def __init__(self, drawer: BatchDrawer) -> None:
        self._drawer = drawer

    def fill(self, slot: BatchSlot) -> bool:
        """Writes the shard's next part to the slot. Returns False, without waiting, if no part is available yet.

        The limits may not allow one now, or the writer overwrites drawn data too often. Transitions that the writer
        overwrote while they were decoded are drawn again, into the rows that are still missing.
        """
        drawer, reader = self._drawer, self._drawer.reader
        if not drawer.may_draw():
            return False
        num_transitions, missing = reader.size, slot.rows
        parts: list[list[Array]] = []
        for _ in range(MAX_ATTEMPTS if num_transitions else 0):
            draw = reader.draw(len(missing), drawer.rng)
            rows = missing[: len(draw.records)]
            part = [rows, draw.records, slot.decoder.decode_located(draw.frames, rows)]
            live = reader.still_live(draw)
            parts.append(part if live.all() else [array[live] for array in part])
            if len(parts[-1][0]) == len(missing):
                rows, records, decoded = parts[0] if len(parts) == 1 else map(np.concatenate, zip(*parts, strict=True))
                slot.put(drawer.make_part(records, num_transitions), decoded, rows)
                return True
            missing = np.setdiff1d(missing, parts[-1][0], assume_unique=True)
        return False


class RemoteSource:
    """Takes parts from a socket and keeps them in one queue per shard until a batch needs them.

    The samplers' credit limits the length of the queues. While a batch waits for another shard, a sampler occasionally
    exceeds its credit. Then the oldest part is dropped and counted, because it was drawn with the oldest priorities.
    """

    def __init__(self, receive: Callable[[float], BatchMessage | None], *, num_shards: int, credit: int) -> None:
        """`receive` takes a timeout in seconds and returns a part; `credit`: maximum parts in flight per shard."""
        self._receive = receive
        self._credit = credit
        self._queues: list[deque[BatchMessage]] = [deque() for _ in range(num_shards)]
        self.num_dropped = 0

    def fill(self, slot: BatchSlot) -> bool:
        """Writes the shard's next part to the slot. Returns False, without waiting, if no part is available yet."""
        queue = self._queues[slot.shard]
        if not queue:
            return False
        part = queue.popleft()
        slot.put(part, slot.decoder.decode(part.records, part.blob, slot.rows), slot.rows)
        return True

    def receive(self, timeout: float) -> None:
        """Receives one part from any shard and adds it to that shard's queue. Waits up to `timeout` seconds."""
        part = self._receive(timeout)
        if part is None:
            return
        queue = self._queues[part.shard]
        queue.append(part)
        if len(queue) > self._credit:
            queue.popleft()
            self.num_dropped += 1
