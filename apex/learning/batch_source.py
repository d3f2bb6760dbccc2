"""Where the parts of a batch come from: the store of a shard on this host, or its samplers on another."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from apex.learning.batch_ring import BatchSlot
from apex.replay_memory.batch_drawer import BatchDrawer
from apex.types import BatchMessage


class LocalSource:
    """Draws from the store of a shard on this host. Frames are decoded from its memory straight into the slot."""

    def __init__(self, drawer: BatchDrawer) -> None:
        self._drawer = drawer

    def fill(self, slot: BatchSlot) -> bool:
        """Puts the shard's next part into its slot; False if there is none yet. Does not wait."""
        part = self._drawer.draw(slot if slot.reads_stores else None)
        if part is None:
            return False
        slot.put(part)
        return True


class RemoteSource:
    """Gives parts that came by socket, which wait in a queue for each shard until a batch has room for them.

    The samplers' credit bounds the queues. While another shard keeps a batch waiting, a sampler sends one more now and
    then: beyond its credit the oldest part is dropped and counted, for it was drawn by the oldest priorities.
    """

    def __init__(self, receive: Callable[[float], BatchMessage | None], *, num_shards: int, credit: int) -> None:
        """`receive` waits for a part, up to so many seconds; `credit`: parts of a shard that may be in flight."""
        self._receive = receive
        self._credit = credit
        self._queues: list[deque[BatchMessage]] = [deque() for _ in range(num_shards)]
        self.num_dropped = 0

    def fill(self, slot: BatchSlot) -> bool:
        """Puts the shard's next part into its slot; False if there is none yet. Does not wait."""
        queue = self._queues[slot.shard]
        if not queue:
            return False
        slot.put(queue.popleft())
        return True

    def receive(self, timeout: float) -> None:
        """Takes one part, of any shard, into its queue; waits up to `timeout` seconds for it."""
        part = self._receive(timeout)
        if part is None:
            return
        queue = self._queues[part.shard]
        queue.append(part)
        if len(queue) > self._credit:
            queue.popleft()
            self.num_dropped += 1
