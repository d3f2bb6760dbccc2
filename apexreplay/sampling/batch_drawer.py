"""Draws parts of batches from one shard, as far as the rate limiter and the number of batches in flight allow."""

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from apexreplay.frame_blob import FrameBlob
from apexreplay.item_kinds import Array
from apexreplay.rate_limiter import RateLimiter
from apexreplay.sampling.sampler_counters import SamplerCounters
from apexreplay.sampling.selection import Selection
from apexreplay.store.reader import StoreReader
from apexreplay.transport.timing import CREDIT_SECONDS
from apexreplay.types import BatchMessage


class DrawSettings(NamedTuple):
    """The part size and the limits for drawing from one shard."""

    shard: int
    num_shards: int  # R
    part_size: int  # transitions in a part of a batch
    batches_in_flight: int  # parts that one sampler or loader may have in flight
    limiter: RateLimiter
    selection: Selection = Selection()


class BatchDrawer:
    """Draws parts of batches. Counts the parts sent and acknowledged in row `row` of the counters."""

    def __init__(
        self,
        reader: StoreReader,
        counters: SamplerCounters,
        row: int,
        settings: DrawSettings,
        rng: np.random.Generator,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.reader = reader
        self._counters = counters
        self._row = row
        self.part_size = settings.part_size
        self._settings = settings
        self.rng = rng
        self._clock = clock
        counters.activate(row)
        self._in_flight = self._passed_over = 0
        self._changed_at = clock()

    def close(self) -> None:
        """Marks the row as unused."""
        self._counters.deactivate(self._row)

    def draw(self) -> BatchMessage | None:
        """Returns one part with its compressed frames; None if the limits do not allow one now, if there are too few
        items, or if the writer has overwritten what was drawn."""
        if not self.may_draw():
            return None
        if self._settings.selection.order == "priority":
            drawn = self.reader.sample(self.part_size, self.rng)
        else:
            selected = self._settings.selection.select(self.reader, self.part_size, self._counters.num_drawn)
            drawn = None if selected is None else self.reader.sample_keys(selected[0])
            if selected is not None and drawn is not None:
                self._passed_over = selected[1]
                self._counters.pass_over(self._row, self._passed_over)
            self._counters.note_wait(self._row, inserts=drawn is None)
        return None if drawn is None else self.make_part(drawn.records, drawn.num_transitions, drawn.blob)

    def make_part(self, records: Array, num_transitions: int, blob: FrameBlob = b"") -> BatchMessage:
        """Returns drawn transitions as a part, and counts it as sent, because a learner on this host may answer before
        the caller's `send` returns.

        Each of the R shards gives 1/R of a batch. Therefore this multiplies the probabilities in `records`, leaf / root
        of the shard's sum-tree, by 1/R. `num_transitions`: live transitions when the part was drawn; `blob`: its
        frames, unless they are decoded.
        """
        records["probability"] /= self._settings.num_shards
        part = BatchMessage(
            shard=self._settings.shard,
            store_incarnation=self.reader.store_incarnation,
            sampler=self._row,
            number=self._counters.next_number(self._row),
            num_transitions=num_transitions,
            records=records,
            blob=blob,
        )
        self._counters.note_sent(self._row, self.part_size)
        return part

    def confirm(self) -> None:
        """Counts the newest part as given: the items of a queue that only it needs may be removed now."""
        self._counters.note_given(self._row)

    def take_back(self) -> None:
        """Removes the newest part from the counters, because it was not sent. Another part may be drawn at once."""
        self._counters.take_back(self._row, self.part_size + self._passed_over)
        self._changed_at -= CREDIT_SECONDS

    def may_draw(self) -> bool:
        """Returns whether the limits allow to draw a part now; records what the sampler waits for."""
        settings, counters = self._settings, self._counters
        allowed = counters.limit(settings.limiter).may_sample(self.reader.num_inserted, counters.num_drawn)
        in_flight, now = counters.in_flight(self._row), self._clock()
        if in_flight != self._in_flight:
            self._in_flight, self._changed_at = in_flight, now
        has_credit = in_flight < settings.batches_in_flight
        if not has_credit and now - self._changed_at >= CREDIT_SECONDS:
            has_credit, self._changed_at = True, now
        counters.note_wait(self._row, inserts=not allowed, learner=allowed and not has_credit)
        return allowed and has_credit
