"""Collects the steps and items of one stream, and cuts them into segments."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from apexreplay.errors import require
from apexreplay.frame_blob import make_blob
from apexreplay.frames.encoder import StepEncoder, fill_values
from apexreplay.item_kinds import Array, Window
from apexreplay.tables import Table
from apexreplay.types import Cut

MAX_PRIORITY = float(np.finfo(np.float32).max)


class SegmentBuffer:
    """The newest steps of one stream, and the items that are not in a segment yet. A step is encoded once."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._encoder = StepEncoder(table)
        self._steps: list[list[bytes]] = []  # entries, from the oldest step that an item may still need on
        self._ages: list[int] = []  # number of each of these steps in its episode, from 0
        self._is_new_episode = True
        self._records: list[Array] = []

    def __len__(self) -> int:
        """The number of items that are not in a segment yet."""
        return len(self._records)

    def is_full(self, length: int) -> bool:
        """Whether there are items, and `length` of them or steps for twice as many."""
        return len(self._records) >= length or (len(self._records) > 0 and len(self._steps) >= 2 * length)

    def append(self, step: Mapping[str, Any]) -> None:
        """Adds a step. Raises UsageError if it does not fit the table; then nothing is added."""
        entries = self._encoder.encode(step)
        self._ages.append(0 if self._is_new_episode else self._ages[-1] + 1)
        self._steps.append(entries)
        self._is_new_episode = False
        if not self._records:
            self._forget()

    def end_episode(self) -> None:
        """Makes the next step the first of an episode: no window begins before it."""
        self._is_new_episode = True

    def add_item(self, priority: float, values: Mapping[str, Any], frame: int = -1, next_frame: int = -1) -> None:
        """Adds an item. `frame`, `next_frame`: its steps, -1 for the newest, -2 for the one before; see `Window`.

        Raises UsageError if the priority is negative or not finite, if a value does not fit the table, or if the steps
        are too old, too far apart, or of two episodes.
        """
        require(0 <= priority <= MAX_PRIORITY, f"a priority must be from 0 to {MAX_PRIORITY:.3g}, got {priority}")
        record = np.zeros(1, self._table.record)
        record["priority"] = priority
        fill_values(self._table, record[0], values)
        item, places = self._table.item, [frame, next_frame][: len(self._table.item.positions)]
        for name, place in zip(item.positions, places, strict=True):
            known = -len(self._steps) <= place <= -1
            require(known, f"`{name}` must be from {-len(self._steps)} to -1, got {place}")
            record[name] = len(self._steps) + place
        if isinstance(item, Window):
            steps = next_frame - frame
            require(1 <= steps <= item.span, f"`next_frame` must be 1 to {item.span} after `frame`, got {steps}")
            ages = [self._ages[place] for place in places]
            require(ages[1] - ages[0] == steps, f"the steps {frame} and {next_frame} belong to two episodes")
            for name, age in zip(item.depths, ages, strict=True):
                record[name] = min(age + 1, item.stack)
        first = int(item.spans(record)[0][0])
        require(first >= 0, f"the step {first - len(self._steps)} is too old: an item may span {item.max_steps} steps")
        self._records.append(record)

    def cut(self) -> Cut:
        """Returns all items with the steps that they need, and forgets them. Call it only if there are items."""
        records = np.concatenate(self._records)
        item = self._table.item
        oldest = int(item.spans(records)[0].min())
        newest = max(int(records[name].max()) for name in item.positions)
        entries = [entry for step in self._steps[oldest : newest + 1] for entry in step]
        for name in item.positions:
            records[name] -= oldest
        self._records = []
        self._forget()
        return Cut(0, records, make_blob(entries))

    def _forget(self) -> None:
        """Drops steps that no later item can need. Positions in `_records` count from the oldest kept step."""
        num_old = len(self._steps) - max(1, self._table.item.max_steps)
        if num_old > 0:
            del self._steps[:num_old], self._ages[:num_old]
