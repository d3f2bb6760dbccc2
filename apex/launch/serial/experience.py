"""Acts, stores and draws alternately in one process, in a fixed order that does not depend on time.

When the trainer requests a batch, the batch is drawn as soon as the replay ratio allows it. Until then every actor
takes one step, and the finished segments are stored.
"""

import numpy as np

from apex.acting.shared_parameters import SharedParameters
from apex.acting.worker import make_actor, make_environments
from apex.algorithms.interface import make_algorithm
from apex.algorithms.parameters import num_parameters
from apex.learning.batch_ring import Batch, BatchRing
from apex.learning.batch_source import LocalSource
from apex.learning.loader import Loader
from apex.learning.random_shift import RandomShift
from apex.replay_memory.settings import draw_settings
from apex.runs.folder import RunFolder
from apex.transport.run_codec import RunCodec
from apexreplay.client.reliable_sender import ReliableSender
from apexreplay.sampling.batch_drawer import BatchDrawer
from apexreplay.sampling.sampler_counters import SamplerCounters
from apexreplay.server.server import ReplayServer
from apexreplay.store.location import store_path
from apexreplay.store.reader import StoreReader
from apexreplay.store.writer import StoreWriter
from apexreplay.types import PriorityUpdate, Receipt, Stream

STEPS_PER_ROW = 1_000  # stored transitions per row of the curves


class Loopback:
    """Both ends of the link between actors and replay server, in memory."""

    def __init__(self) -> None:
        self.messages: list[list[bytes]] = []
        self.receipts: list[Receipt] = []

    def send(self, message: list[bytes]) -> bool:
        """Queues a segment; returns True, because the queue is never full."""
        self.messages.append(message)
        return True

    def reconnect(self) -> None:
        """Does nothing, because there is no connection."""

    def receive(self, timeout: float = 0.0) -> list[Receipt]:
        """Returns all receipts since the last call."""
        receipts, self.receipts = self.receipts, []
        return receipts


class Experience:
    """Actors, replay memory and loader: provides batches to the trainer, and stores the trainer's priorities."""

    def __init__(self, folder: RunFolder, store: StoreWriter) -> None:
        """`store`: the replay memory of the run, at its usual path."""
        config, schema = folder.config, folder.schema
        self._codec = RunCodec(folder.run_id, schema)
        counters = SamplerCounters(1)
        settings = draw_settings(config.replay, 0, config.learner.batch_size)

        def clock() -> float:  # Advances by one second for each row of the curves.
            return store.num_steps / STEPS_PER_ROW

        self.server = ReplayServer(store, self._codec, counters, settings.limiter, clock=clock)
        self.ring = BatchRing.configured(config.learner, 1, schema, cuda=False)
        self.memory = self.ring.memory
        self._loader = Loader(schema, self.ring, RandomShift.configured(config, 0, schema.parts))
        reader = StoreReader(store_path(folder.run_id), schema.table)
        self._source = LocalSource(BatchDrawer(reader, counters, 0, settings, np.random.default_rng([config.seed, 0])))
        self._mail = Loopback()
        streams = [Stream(actor_id, 1) for actor_id in range(config.actor.num_actors)]
        self.environment, rng = make_environments(config, streams)
        self.parameters = SharedParameters(num_parameters(make_algorithm(config, schema).make_network()))
        link = ReliableSender(streams, self._codec, [self._mail], self._mail, window=config.actor.window, clock=clock)
        self.actor = make_actor(
            config, schema, self.environment, streams, link=link, parameters=self.parameters, rng=rng
        )

    def receive(self, timeout: float) -> Batch | None:
        """Returns the next batch. If none can be drawn yet, lets each actor take one step and returns None."""
        if self._loader.ready(0.0) and self._loader.fill([self._source]):
            return self.ring.receive(0.0)
        self.actor.step(0.0)
        if self._mail.messages:
            for stored in self.server.insert(self._mail.messages):
                self._mail.receipts += stored.each()
            self._mail.messages.clear()
        return None

    def release(self, slot: int) -> None:
        """Releases the memory of a batch."""
        self.ring.release(slot)

    def send(self, update: PriorityUpdate) -> None:
        """Writes new priorities to the replay memory."""
        self.server.update_priorities([self._codec.encode_priorities(update)])
