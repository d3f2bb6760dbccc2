"""Draws parts of batches from one shard, as far as the rate limiter and the number of batches in flight allow."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, Self

import numpy as np

from apex.config import ReplayConfig
from apex.replay_memory.rate_limiter import RateLimiter
from apex.replay_memory.sampler_counters import SamplerCounters
from apex.replay_memory.store.reader import FrameDecoder, StoreReader
from apex.transport.timing import CREDIT_SECONDS
from apex.types import BatchMessage


class DrawSettings(NamedTuple):
    """The part size and the limits for drawing from one shard."""

    shard: int
    part_size: int  # transitions in a part of a batch
    batches_in_flight: int  # parts that one sampler or loader may have in flight
    limiter: RateLimiter

    @classmethod
    def configured(cls, replay: ReplayConfig, shard: int, batch_size: int) -> Self:
        """Returns the settings of one shard. A batch of `batch_size` transitions has one part from each shard.

        Each shard applies the replay ratio to its own inserts and samples.
        """
        own = replay.per_shard()
        tolerance = own.samples_per_insert_tolerance
        limiter = RateLimiter(own.min_size_to_sample, own.samples_per_insert, tolerance, own.inserts_wait)
        return cls(shard, batch_size // replay.num_shards, replay.batches_in_flight, limiter)


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
        self._reader = reader
        self._counters = counters
        self._row = row
        self._settings = settings
        self._rng = rng
        self._clock = clock
        counters.activate(row)
        self._in_flight = 0
        self._changed_at = clock()
        self._answered_at = clock()

    def draw(self, decoder: FrameDecoder | None = None) -> BatchMessage | None:
        """Returns one part; None if the limits do not allow one now, or if `StoreReader.sample` returns None.

        decoder: see `StoreReader.sample`. The part counts as sent before the caller sends it, because a learner on this
        host may answer before `send` returns.
        """
        settings = self._settings
        drawn = self._reader.sample(settings.part_size, self._rng, decoder) if self._may_draw() else None
        if drawn is None:
            return None
        part = BatchMessage(
            shard=settings.shard,
            store_incarnation=drawn.store_incarnation,
            sampler=self._row,
            number=self._counters.next_number(self._row),
            num_transitions=drawn.num_transitions,
            records=drawn.records,
            blob=drawn.blob,
        )
        self._counters.note_sent(self._row, settings.part_size)
        return part

    @property
    def silence(self) -> float:
        """Returns the seconds since the learner's last answer if parts are in flight; 0 if none are in flight."""
        return self._clock() - self._answered_at if self._in_flight else 0.0

    def take_back(self) -> None:
        """Removes the newest part from the counters, because it was not sent."""
        self._counters.take_back(self._row, self._settings.part_size)

    def _may_draw(self) -> bool:
        settings, counters = self._settings, self._counters
        allowed = counters.limit(settings.limiter).may_sample(self._reader.num_inserted, counters.num_drawn)
        in_flight, now = counters.in_flight(self._row), self._clock()
        if in_flight < self._in_flight or not self._in_flight:
            self._answered_at = now
        if in_flight != self._in_flight:
            self._in_flight, self._changed_at = in_flight, now
        has_credit = in_flight < settings.batches_in_flight
        if not has_credit and now - self._changed_at >= CREDIT_SECONDS:
            has_credit, self._changed_at = True, now
        counters.note_wait(self._row, inserts=not allowed, learner=allowed and not has_credit)
        return allowed and has_credit
