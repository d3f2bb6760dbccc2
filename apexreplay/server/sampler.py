"""A sampler process: draws from the shared store without a lock and sends parts of batches to the learner."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from apexreplay.process.freed_memory import keep_freed_memory
from apexreplay.process.lifecycle import POLL_SECONDS, Stop
from apexreplay.sampling.batch_drawer import BatchDrawer, DrawSettings
from apexreplay.sampling.sampler_counters import SamplerCounters
from apexreplay.store.reader import StoreReader
from apexreplay.transport.curve.key_store import Keys
from apexreplay.transport.endpoints import BatchSender
from apexreplay.transport.sockets import ReconnectBackoff, open_context
from apexreplay.wire.codec import Codec

IDLE_SECONDS = 0.001  # seconds between two checks whether drawing is allowed


class SamplerTask(NamedTuple):
    """Arguments that all sampler processes of a replay server share."""

    codec: Codec
    path: Path  # file of the store
    counters: SamplerCounters
    settings: DrawSettings
    read_keys: Callable[[], Keys | None]
    endpoints: list[str]  # addresses of the learner's loaders, which receive the batches


def run_sampler(stop: Stop, index: int, task: SamplerTask, seed: np.random.SeedSequence) -> None:
    """Runs sampler process number `index`: draws parts of batches and sends them until `stop` is requested."""
    keep_freed_memory()
    with open_context(task.read_keys()) as context:
        reader = StoreReader(task.path, task.codec.table)
        drawer = BatchDrawer(reader, task.counters, index, task.settings, np.random.default_rng(seed))
        sender = BatchSender(context, task.endpoints, task.codec)
        backoff = ReconnectBackoff()
        while not stop.poll():
            if backoff.is_due(drawer.silence):
                sender.reconnect()
            part = drawer.draw()
            if part is None:
                time.sleep(IDLE_SECONDS)
            elif not sender.send(part, POLL_SECONDS):
                drawer.take_back()
