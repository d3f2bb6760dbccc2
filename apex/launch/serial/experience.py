"""Acting, storing and drawing by turns: as many steps of the actors as a batch takes, whatever the time.

Where the trainer asks for a batch, one is drawn as soon as the replay ratio allows it; until then every actor takes one
step, and what they have cut is stored.
"""

from __future__ import annotations

import numpy as np

from apex.acting.reliable_sender import ReliableSender
from apex.acting.shared_parameters import SharedParameters
from apex.acting.worker import make_actor, make_environments
from apex.dqn.networks import make_network, num_parameters
from apex.learning.batch_ring import Batch, BatchRing
from apex.learning.batch_source import LocalSource
from apex.learning.loader import Loader
from apex.replay_memory.batch_drawer import BatchDrawer, DrawSettings
from apex.replay_memory.sampler_counters import SamplerCounters
from apex.replay_memory.server import ReplayServer
from apex.replay_memory.store.location import store_path
from apex.replay_memory.store.reader import StoreReader
from apex.replay_memory.store.writer import StoreWriter
from apex.runs.folder import RunFolder
from apex.transport.codec import Codec
from apex.types import PriorityUpdate, Receipt, Stream

STEPS_PER_ROW = 1_000  # transitions stored between two rows of the curves


class Loopback:
    """Both ends of the actors' link."""

    def __init__(self) -> None:
        self.messages: list[list[bytes]] = []
        self.receipts: list[Receipt] = []

    def send(self, message: list[bytes]) -> bool:
        """Takes a segment."""
        self.messages.append(message)
        return True

    def reconnect(self) -> None:
        """Memory needs no connection."""

    def receive(self, timeout: float = 0.0) -> list[Receipt]:
        """All receipts since the last call."""
        receipts, self.receipts = self.receipts, []
        return receipts


class Experience:
    """Actors, replay memory and loader: where the trainer's batches come from, and where its priorities go."""

    def __init__(self, folder: RunFolder, store: StoreWriter) -> None:
        """`store`: the run's, at its place."""
        config, schema = folder.config, folder.schema
        self._codec = Codec(folder.run_id, schema)
        counters = SamplerCounters(1)
        settings = DrawSettings.configured(config.replay, 0, config.learner.batch_size)

        def clock() -> float:  # A row of the curves counts as a second.
            return store.num_inserted / STEPS_PER_ROW

        self.server = ReplayServer(store, self._codec, counters, settings.limiter, clock=clock)
        self.ring = BatchRing.configured(config.learner, 1, schema, cuda=False)
        self.memory = self.ring.memory
        self._loader = Loader(schema, self.ring)
        reader = StoreReader(store_path(folder.run_id), schema)
        self._source = LocalSource(BatchDrawer(reader, counters, 0, settings, np.random.default_rng([config.seed, 0])))
        self._mail = Loopback()
        streams = [Stream(actor_id, 1) for actor_id in range(config.actor.num_actors)]
        self.environment, rng = make_environments(config, streams)
        network = make_network(config.network, schema, seed=config.seed)
        self.parameters = SharedParameters(num_parameters(network))
        self.actor = make_actor(
            config,
            schema,
            self.environment,
            streams,
            link=ReliableSender(
                streams, self._codec, [self._mail], self._mail, window=config.actor.window, clock=clock
            ),
            parameters=self.parameters,
            rng=rng,
        )

    def receive(self, timeout: float) -> Batch | None:
        """The next batch; or None, where it is the actors' turn: then each has taken one step."""
        if self._loader.ready(0.0) and self._loader.fill([self._source]):
            return self.ring.receive(0.0)
        self.actor.step(0.0)
        if self._mail.messages:
            self._mail.receipts += self.server.insert(self._mail.messages)
            self._mail.messages.clear()
        return None

    def release(self, slot: int) -> None:
        """Gives a batch's memory back."""
        self.ring.release(slot)

    def send(self, update: PriorityUpdate) -> None:
        """Takes new priorities."""
        self.server.update_priorities([self._codec.encode_priorities(update)])
