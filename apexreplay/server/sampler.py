"""A sampler process: draws from the shared store without a lock. Each request for a batch is a credit of one batch."""

from collections import deque
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
from apexreplay.transport.endpoints import RequestReceiver
from apexreplay.transport.sockets import open_context
from apexreplay.wire.codec import Codec

IDLE_SECONDS = 0.001  # seconds between two checks whether drawing is allowed
MAX_WAITING = 10_000  # requests that wait; the oldest of more are dropped


class SamplerTask(NamedTuple):
    """Arguments that all sampler processes of a replay server share."""

    codec: Codec
    path: Path  # file of the store
    counters: SamplerCounters
    settings: DrawSettings
    read_keys: Callable[[], Keys | None]
    endpoints: list[str]  # the address that each sampler process binds


def run_sampler(stop: Stop, index: int, task: SamplerTask, seed: np.random.SeedSequence) -> None:
    """Runs sampler process number `index`: answers requests for batches until `stop` is requested."""
    keep_freed_memory()
    with open_context(task.read_keys()) as context:
        reader = StoreReader(task.path, task.codec.table)
        drawer = BatchDrawer(reader, task.counters, index, task.settings, np.random.default_rng(seed))
        receiver = RequestReceiver(context, task.endpoints[index], task.codec, task.settings.shard)
        waiting: deque[tuple[bytes, int]] = deque(maxlen=MAX_WAITING)
        pause = 0.0
        while not stop.poll():
            context.check()
            waiting.extend(receiver.receive(pause if waiting else POLL_SECONDS))
            if not waiting:
                task.counters.note_wait(index, learner=True)
                continue
            client, drawer.part_size = waiting[0]
            part = drawer.draw()
            pause = IDLE_SECONDS if part is None else 0.0
            if part is not None:
                waiting.popleft()
                if not receiver.answer(client, part):
                    drawer.take_back()
