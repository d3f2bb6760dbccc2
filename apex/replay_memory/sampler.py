"""Sampler processes: they draw from the shared store without a lock, and send."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import numpy as np

from apex.config import Config
from apex.replay_memory.rate_limiter import RateLimiter
from apex.replay_memory.sampler_counters import SamplerCounters
from apex.replay_memory.store.reader import BatchSlot, StoreReader
from apex.runtime.lifecycle import POLL_SECONDS
from apex.types import BatchMessage

SILENCE_SECONDS = 5.0  # without an answer for so long, what is in flight counts as lost, and one more batch may go


class BatchSink(Protocol):
    """Where batches go."""

    def place(self, shard: int) -> BatchSlot | None:
        """Where the frames of the shard's next batch may be decoded; None: they are sent compressed."""

    def send(self, batch: BatchMessage, timeout: float) -> bool:
        """Sends, waiting up to `timeout` seconds for room; returns whether it was sent."""


class Sampler:
    """Draws while the limiter allows it and the learner keeps up. What it sends is its shard's part of a batch."""

    def __init__(
        self,
        index: int,
        reader: StoreReader,
        batches: BatchSink,
        counters: SamplerCounters,
        limiter: RateLimiter,
        *,
        shard: int = 0,
        batch_size: int,
        batches_in_flight: int,
        rng: np.random.Generator,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._index = index
        self._reader = reader
        self._batches = batches
        self._counters = counters
        self._limiter = limiter
        self._shard = shard
        self._batch_size = batch_size
        self._batches_in_flight = batches_in_flight
        self._rng = rng
        self._clock = clock
        counters.activate(index)
        self._in_flight = 0
        self._changed_at = clock()

    def step(self, timeout: float = POLL_SECONDS) -> bool:
        """Draws and sends one batch; False if it may not, or cannot yet."""
        if not self._may_draw():
            return False
        drawn = self._reader.sample(self._batch_size, self._rng, self._batches.place(self._shard))
        if drawn is None:
            return False
        batch = BatchMessage(
            shard=self._shard,
            store_incarnation=self._reader.store_incarnation,
            sampler=self._index,
            number=self._counters.next_number(self._index),
            num_transitions=drawn.num_transitions,
            records=drawn.records,
            blob=drawn.blob,
        )
        # Counted before it goes: a learner on this host may answer before `send` returns, and the writer gives credit
        # only for what was sent.
        self._counters.note_sent(self._index, self._batch_size)
        if not self._batches.send(batch, timeout):
            self._counters.take_back(self._index, self._batch_size)
            return False
        return True

    def _may_draw(self) -> bool:
        allowed = self._counters.limit(self._limiter).may_sample(self._reader.num_inserted, self._counters.num_drawn)
        in_flight, now = self._counters.in_flight(self._index), self._clock()
        if in_flight != self._in_flight:
            self._in_flight, self._changed_at = in_flight, now
        has_credit = in_flight < self._batches_in_flight
        if not has_credit and now - self._changed_at >= SILENCE_SECONDS:
            has_credit, self._changed_at = True, now
        self._counters.note_wait(self._index, inserts=not allowed, learner=allowed and not has_credit)
        return allowed and has_credit


def make_limiter(config: Config) -> RateLimiter:
    """The replay ratio that the configuration asks for: each shard holds it for its own inserts and samples."""
    replay = config.replay.per_shard()
    return RateLimiter(
        replay.min_size_to_sample, replay.samples_per_insert, replay.samples_per_insert_tolerance, replay.inserts_wait
    )
