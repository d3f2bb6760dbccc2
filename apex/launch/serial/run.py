"""A whole run in this process, by turns: the roles' own classes, no socket, no child, and no clock that decides.

The learner's loop and the coordinator are those of every run. Between two turns of the loop the actors step, and the
coordinator is told what they did. Whose turn it is follows from counts alone, and all that is random from the seed: one
seed gives one curve, however busy the machine is.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from msgspec.structs import replace

from apex.dqn.networks import make_network
from apex.evaluation.evaluator import Evaluator
from apex.launch.serial.experience import STEPS_PER_ROW, Experience
from apex.learning.coordinator.coordinator import Coordinator
from apex.learning.coordinator.link import TrainerEnd, TrainerReport
from apex.learning.loop import LearnerLoop, Reporter, describe_training
from apex.learning.setup import make_trainer, prepare_torch, save_checkpoint
from apex.learning.trainer import Trainer
from apex.replay_memory.recovery import reclaim, store_settings
from apex.replay_memory.store.location import remove, store_path
from apex.replay_memory.store.writer import StoreWriter
from apex.runs.folder import RunFolder
from apex.runtime.lifecycle import Stop
from apex.runtime.rates import Rates
from apex.transport.hello import host_name
from apex.transport.messages.control import ReplayHeartbeat
from apex.transport.messages.results import ActorFigures
from apex.transport.messages.run_status import RunStatus
from apex.types import Progress

CPU = torch.device("cpu")


class SerialCoordinator:
    """The coordinator as `LearnerLoop` sees it, and what else happens between two turns of that loop.

    It has games played to be scored, and tells the coordinator what the programs of other runs tell by sockets.
    """

    absent = ""

    def __init__(
        self, folder: RunFolder, store: StoreWriter, experience: Experience, trainer: Trainer, stop: Stop
    ) -> None:
        config = folder.config
        self._coordinator = Coordinator(folder, epoch=1, deterministic=True)
        self._state = self._coordinator.state
        self._state.num_leased = config.actor.num_actors
        self._state.members.replay_endpoints = [{"memory": str(store_path(folder.run_id))}]
        self._folder = folder
        self._config = config.evaluator
        self._store = store
        self._experience = experience
        self._trainer = trainer
        self._stop = stop
        self._row_at = STEPS_PER_ROW
        self._evaluator = Evaluator(
            config,
            make_network(config.network, folder.schema, seed=config.seed),
            newest=lambda timeout: trainer.parameters(),
            keep=self._coordinator.keep_evaluation,
        )
        self._evaluate_at = config.evaluator.period_updates
        self._rates: dict[str, float | None] = {}  # for people: since the report before
        self._steps = Rates(0.0, 0)

    @property
    def progress(self) -> Progress:
        """How far the run is."""
        return self._state.progress

    def send(self, message: TrainerReport) -> None:
        """Takes the trainer's report, which comes once a second: only its rates, which nothing but the view needs."""
        now = self._folder.elapsed_seconds = self._state.elapsed_seconds
        (steps_per_second,) = self._steps.measure(now, self._store.num_inserted)
        self._rates = {
            "steps_per_second": steps_per_second,
            "updates_per_second": message.status.updates_per_second,
            "samples_per_second": message.status.samples_per_second,
        }

    def hear(self) -> str:
        """Does what is due; returns why the run should end, if it should."""
        self._state.steps.count(0, self._store.num_inserted, str(self._store.store_incarnation))
        if self._state.num_steps >= self._row_at:
            self._row_at = self._state.num_steps - self._state.num_steps % STEPS_PER_ROW + STEPS_PER_ROW
            self.write_rows()
        if self._config.enabled and self._trainer.num_updates >= self._evaluate_at:
            self._evaluate_at += self._config.period_updates
            self._evaluator.step(self._stop)
        return self._state.judge()

    # --- curves and status ------------------------------------------------------------------------------------------

    def write_rows(self) -> None:
        """Adds to the curves what is known now. Nothing that a clock has measured is in them but their times."""
        self._state.hear(
            ReplayHeartbeat(
                session=0,
                run_id=self._folder.run_id,
                host=host_name(),
                pid=os.getpid(),
                shard=0,
                streams=[],
                endpoints={},
                status=self._experience.server.status(),
            )
        )
        self._describe_training()
        if scores := self._experience.actor.scores.take():
            figures = ActorFigures(role="actor", steps=None, time=time.time(), scalars=scores)
            self._coordinator.keep_figures(figures)
        self._coordinator.write_rows()

    def report(self) -> RunStatus:
        """The status, with the rates of the last second."""
        self._describe_training()
        status = self._coordinator.status()
        replay = replace(status.replay, size=self._store.size)  # The rest is as of the last row.
        return replace(status, replay=replay, **self._rates)

    def finish(self, reason: str) -> None:
        """Ends curves and status."""
        self._coordinator.hear_trainer(TrainerEnd(reason))
        self.write_rows()
        self._folder.elapsed_seconds = self._state.elapsed_seconds
        self._coordinator.close()

    def _describe_training(self) -> None:
        if self._trainer.num_updates:
            self._state.hear_trainer(describe_training(self._trainer))


class SerialRun:
    """A run; made by `open_serial_run`."""

    def __init__(self, folder: RunFolder, store: StoreWriter, stop: Stop) -> None:
        self._folder = folder
        self._stop = stop
        self.experience = Experience(folder, store)
        self.trainer = make_trainer(
            folder, CPU, self.experience, self.experience, publish=self.experience.parameters.publish
        )
        self.coordinator = SerialCoordinator(folder, store, self.experience, self.trainer, stop)

    def run(self, look: Callable[[], None] = lambda: None) -> str:
        """Trains until something says enough, saves, and returns why; `look` is called once a second.

        Raises DivergedError or EnvironmentFailure where training cannot go on.
        """
        config = self._folder.config
        loop = LearnerLoop(
            self.trainer,
            self.coordinator,
            Reporter(self.experience.ring),
            config,
            save=lambda progress: save_checkpoint(self._folder, self.trainer, progress),
        )
        self.experience.actor.begin()
        reason = loop.run(self._stop, look)
        loop.save()
        self.coordinator.finish(reason)
        return reason


@contextmanager
def open_serial_run(folder: RunFolder, stop: Stop) -> Iterator[SerialRun]:
    """A new run, with its memory in the place of every run's. Its configuration is as `fit_one_process` gives.

    All of torch's sums have one order, as it has one thread; the generators that environments and networks of the
    user's own may draw from are seeded too.
    """
    config, path = folder.config, store_path(folder.run_id)
    prepare_torch(config.learner, CPU)
    random.seed(config.seed)
    np.random.seed(config.seed)
    torch.manual_seed(config.seed)
    reclaim(path)
    settings = store_settings(config.replay, config.actor.num_actors)
    store = StoreWriter.create(path, folder.schema, settings, store_incarnation=1)
    try:
        system = SerialRun(folder, store, stop)
        try:
            yield system
        finally:
            system.experience.environment.close()
    finally:
        store.close()
        remove(path)
