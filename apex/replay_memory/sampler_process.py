"""A sampler process: draws from the shared store without a lock and sends batches to the learner."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from apex.config import Config
from apex.replay_memory.rate_limiter import RateLimiter
from apex.replay_memory.sampler import BatchSink, Sampler
from apex.replay_memory.sampler_counters import SamplerCounters
from apex.replay_memory.store.reader import StoreReader
from apex.runtime.lifecycle import Stop
from apex.transport.codec import Codec
from apex.transport.curve.key_store import read_keys
from apex.transport.endpoints import BatchSender
from apex.transport.sockets import open_context
from apex.types import Schema

IDLE_SECONDS = 0.001  # between two looks whether drawing is allowed


class SamplerTask(NamedTuple):
    """What a process that draws is given."""

    config: Config
    schema: Schema
    run_id: int
    shard: int
    path: Path  # of the store
    counters: SamplerCounters
    limiter: RateLimiter
    seed: np.random.SeedSequence

    def make_sampler(self, row: int, batches: BatchSink) -> Sampler:
        """A sampler that draws by this row of the counters."""
        return Sampler(
            row,
            StoreReader(self.path, self.schema),
            batches,
            self.counters,
            self.limiter,
            shard=self.shard,
            batch_size=self.config.part_size,
            batches_in_flight=self.config.replay.batches_in_flight,
            rng=np.random.default_rng(self.seed),
        )


def run_sampler(stop: Stop, index: int, task: SamplerTask, endpoint: str) -> None:
    """A sampler process of the replay server; `endpoint` is the learner's, for batches."""
    with open_context(read_keys(task.config.transport.keys, "replay")) as context:
        sampler = task.make_sampler(index, BatchSender(context, endpoint, Codec(task.run_id, task.schema)))
        while not stop.requested:
            if not sampler.step():
                time.sleep(IDLE_SECONDS)
