"""A sampler process that clients ask for batches, on a socket that it binds: each request is a credit of one batch."""

import time
from collections import deque

import numpy as np

from apexreplay.process.lifecycle import POLL_SECONDS, Stop
from apexreplay.sampling.batch_drawer import BatchDrawer
from apexreplay.server.sampler import IDLE_SECONDS, SamplerTask
from apexreplay.store.reader import StoreReader
from apexreplay.transport.endpoints import RequestReceiver
from apexreplay.transport.sockets import open_context

MAX_WAITING = 10_000  # requests that wait; more are dropped and counted


def run_batch_server(stop: Stop, index: int, task: SamplerTask, seed: np.random.SeedSequence) -> None:
    """Runs sampler process number `index`, which binds the address task.endpoints[index], until `stop` is requested."""
    with open_context(task.read_keys()) as context:
        reader = StoreReader(task.path, task.codec.table)
        drawer = BatchDrawer(reader, task.counters, index, task.settings, np.random.default_rng(seed))
        receiver = RequestReceiver(context, task.endpoints[index], task.codec)
        waiting: deque[tuple[bytes, int]] = deque(maxlen=MAX_WAITING)
        while not stop.poll():
            context.check()
            waiting.extend(receiver.receive(0.0 if waiting else POLL_SECONDS))
            if not waiting:
                task.counters.note_wait(index, learner=True)
                continue
            peer, drawer.part_size = waiting[0]
            part = drawer.draw()
            if part is None:
                time.sleep(IDLE_SECONDS)
            else:
                waiting.popleft()
                if not receiver.answer(peer, part):
                    drawer.take_back()
