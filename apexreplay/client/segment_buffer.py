"""Collects the steps and items of one stream, and cuts them into segments."""

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from apexreplay.errors import UsageError, require
from apexreplay.frame_blob import make_blob
from apexreplay.frames.encoder import StepEncoder, fill_values
from apexreplay.item_kinds import Array, Sequence, Single, Window
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
        self._begun: deque[tuple[int, Array]] = deque()  # items that are not complete: age of the first step, record
        self._num_covered = 0  # steps of the episode that are in an item of `_begun` that was completed

    def __len__(self) -> int:
        """The number of items that are not in a segment yet."""
        return len(self._records)

    def is_full(self, length: int, *, is_dense: bool = False) -> bool:
        """Whether to cut: at `length` items, or at the most steps that a segment of `length` items may have.

        `is_dense`: also at more steps than a segment of just these items may have. From this, the server of a queue
        whose inserts wait computes how many items always fit into its memory.
        """
        num_items, item = len(self._records), self._table.item
        most = item.segment_steps(length)
        if is_dense:
            most = min(most, item.segment_steps(num_items) + 1)
        return num_items >= length or (num_items > 0 and len(self._steps) >= most)

    def append(self, step: Mapping[str, Any], priority: float = 1.0, values: Mapping[str, Any] | None = None) -> None:
        """Adds a step, and the item that it is or completes. `priority`, `values`: of the item that begins with it.

        Raises UsageError if something does not fit the table; then nothing is added.
        """
        entries, item = self._encoder.encode(step), self._table.item
        age = 0 if self._is_new_episode else self._ages[-1] + 1
        if isinstance(item, Single) or (isinstance(item, Sequence) and item.period and age % item.period == 0):
            self._begun.append((age, self._make_record(priority, values or {})))
        self._ages.append(age)
        self._steps.append(entries)
        self._is_new_episode = False
        if self._begun and age - self._begun[0][0] + 1 == item.max_steps:
            self._complete()
        if not self._records:
            self._forget()

    def end_episode(self) -> None:
        """Makes the next step the first of an episode: no item reaches over it.

        The steps at the end of the episode that are in no sequence yet become a shorter one.
        """
        if self._begun and self._num_covered <= self._ages[-1]:
            self._complete()
        self._begun.clear()
        self._num_covered = 0
        self._is_new_episode = True

    def _complete(self) -> None:
        """Adds the oldest item that has begun; it ends with the newest step."""
        first, record = self._begun.popleft()
        self._num_covered = self._ages[-1] + 1
        self._add(record, -1, -1, self._num_covered - first)

    def add_item(
        self,
        priority: float,
        values: Mapping[str, Any],
        frame: int = -1,
        next_frame: int = -1,
        num_steps: int | None = None,
    ) -> None:
        """Adds an item. `frame`, `next_frame`: its steps, -1 for the newest, -2 for the one before; see `Window`.

        `num_steps`: those of a sequence, up to `frame`; None: as many as there are.

        Raises UsageError if the priority is negative or not finite, if a value does not fit the table, or if the steps
        are too old, too far apart, or of two episodes.
        """
        self._add(self._make_record(priority, values), frame, next_frame, num_steps)

    def _make_record(self, priority: float, values: Mapping[str, Any]) -> Array:
        try:
            fits = 0 <= float(priority) <= MAX_PRIORITY
        except (TypeError, ValueError):
            fits = False
        require(fits, f"a priority must be from 0 to {MAX_PRIORITY:.3g}, got {priority!r}")
        record = np.zeros(1, self._table.record)
        record["priority"] = priority
        fill_values(self._table, record[0], values)
        return record

    def _add(self, record: Array, frame: int, next_frame: int, num_steps: int | None) -> None:
        item, size = self._table.item, len(self._steps)
        places, depths = [frame, next_frame][: len(item.positions)], [1]
        for name, place in zip(item.positions, places, strict=True):
            if not (isinstance(place, int | np.integer) and -size <= place <= -1):
                raise UsageError(f"`{name}` must be from {-size} to -1, got {place!r}")
            record[name] = size + place
        if isinstance(item, Window):
            steps, ages = next_frame - frame, [self._ages[place] for place in places]
            if not 1 <= steps <= item.span:
                raise UsageError(f"`next_frame` must be 1 to {item.span} after `frame`, got {steps}")
            if ages[1] - ages[0] != steps:
                raise UsageError(f"the steps {frame} and {next_frame} belong to two episodes")
            depths = [min(age + 1, item.stack) for age in ages]
        elif isinstance(item, Sequence):
            most = min(self._ages[frame] + 1, item.length)
            depths = [most if num_steps is None else num_steps]
            fits = isinstance(depths[0], int | np.integer) and 1 <= depths[0] <= most
            require(fits, f"`num_steps` must be from 1 to {most}, got {num_steps!r}")
        for name, depth in zip(item.depths, depths, strict=False):  # A single step has no field for its depth.
            record[name] = depth
        first = min(place - depth + 1 for place, depth in zip(places, depths, strict=True))
        if first < -size:
            raise UsageError(f"the step {first} is too old: an item may span {item.max_steps} steps")
        self._records.append(record)

    def cut(self) -> Cut:
        """Returns all items with the steps that they need, and forgets them. Call it only if there are items."""
        records = np.frombuffer(bytearray().join(record.data for record in self._records), self._table.record)
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
