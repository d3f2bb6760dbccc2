"""Selects items in an order: the newest, or a queue, which gives each item a number of times, the oldest first.

Items whose version is too old are passed over. Only one process selects items of a table in this way.
"""

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from apexreplay.store.reader import StoreReader

Order = Literal["priority", "newest", "queue"]
_EXAMINED = 4_096  # items that are examined at once


class Selection(NamedTuple):
    """How items are selected. "priority": at random, in proportion to their weights."""

    order: Order = "priority"
    draws_per_item: int = 1  # of a queue

    def position(self, first_key: int, num_drawn: int) -> int:
        """Returns the number of the queue's next draw. `num_drawn` includes those that were passed over."""
        return max(num_drawn, first_key * self.draws_per_item)

    def select(self, reader: StoreReader, count: int, num_drawn: int) -> tuple[NDArray[np.int64], int] | None:
        """Returns the keys of the next `count` items, and how many draws of the queue were passed over; None if there
        are too few items."""
        first_key, commit = reader.first_key, reader.num_inserted
        if self.order == "newest":
            chosen = self._first(reader, range(commit - 1, first_key - 1, -1), count)
            return (chosen, 0) if len(chosen) == count else None
        draws = range(self.position(first_key, num_drawn), commit * self.draws_per_item)
        chosen = self._first(reader, draws, count)
        if len(chosen) < count:
            return None
        return chosen // self.draws_per_item, int(chosen[-1]) + 1 - count - num_drawn

    def _first(self, reader: StoreReader, draws: range, count: int) -> NDArray[np.int64]:
        """Returns the first `count` draws whose items can be drawn, or fewer if there are not as many."""
        chosen = np.zeros(0, np.int64)
        if len(draws) < count:
            return chosen
        for start in range(0, len(draws), _EXAMINED):
            part = draws[start : start + _EXAMINED]
            numbers = np.arange(part.start, part.stop, part.step)
            chosen = np.concatenate([chosen, numbers[reader.can_be_drawn(numbers // self.draws_per_item)]])
            if len(chosen) >= count:
                break
        return chosen[:count]
