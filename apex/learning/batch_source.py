"""Sources of the parts of a batch: the replay memory of a shard on this host, or samplers on another host."""

import numpy as np

from apex.learning.batch_ring import BatchSlot
from apexreplay.item_kinds import Array
from apexreplay.sampling.batch_drawer import BatchDrawer
from apexreplay.store.reader import MAX_ATTEMPTS
from apexreplay.transport.endpoints import BatchRequester
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
    """Receives parts from the samplers of a shard on another host. They wait in the socket until a batch needs them."""

    def __init__(self, requester: BatchRequester) -> None:
        self.requester = requester
        self._part: BatchMessage | None = None

    def fill(self, slot: BatchSlot) -> bool:
        """Writes the shard's next part to the slot. Returns False, without waiting, if no part is available yet."""
        self.receive(0.0)
        part, self._part = self._part, None
        if part is None:
            return False
        slot.put(part, slot.decoder.decode(part.records, part.blob, slot.rows), slot.rows)
        return True

    def receive(self, timeout: float) -> None:
        """Receives the next part, unless it has arrived already. Waits up to `timeout` seconds."""
        if self._part is None:
            self._part = self.requester.receive(timeout)
