"""A whole run in this process, by turns: the roles' own classes, no socket, no child, and no clock that decides.

The learner's loop runs as it does everywhere, on what `turns` gives it; between two of its turns a desk keeps curves
and scores. Whose turn it is follows from counts alone, and all that is random from the seed: one seed gives one curve,
however busy the machine is.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from apex.config import Config
from apex.dqn.networks import make_network
from apex.environments.factory import make_environment
from apex.evaluation.evaluator import EvaluationResult, Evaluator
from apex.launch.serial.experience import STEPS_PER_ROW, Experience
from apex.learning.coordinator.metric_rows import MetricRows, evaluation_row, make_row
from apex.learning.loop import CoordinatorLink, LearnerLoop, Reporter, describe_training
from apex.learning.setup import make_trainer, prepare_torch, save_checkpoint
from apex.learning.trainer import Trainer
from apex.replay_memory.recovery import reclaim, store_settings
from apex.replay_memory.store.location import remove, store_path
from apex.replay_memory.store.writer import StoreWriter
from apex.runs.checkpoints.best_policy import BestPolicy, games_of
from apex.runs.folder import RunFolder
from apex.runs.members import Status
from apex.runs.metrics.writer import MetricsWriter
from apex.runs.status import RunStatus
from apex.runtime.lifecycle import Stop
from apex.runtime.rates import Rates
from apex.transport.hello import host_name
from apex.types import Parameters, Progress

BY_THE_CLOCK = ("inserts_per_second", "samples_per_second", "busy_share", "rate")  # of a replay server's figures
CPU = torch.device("cpu")


class SerialStatus(RunStatus):
    """What a run by turns says of itself."""

    def limited_by(self) -> Status | None:
        """Nobody waits for anybody: there is no setting to turn."""
        return None


class SerialCoordinator:
    """The coordinator's work, between two turns of the learner's loop, which sees it as the way to the coordinator.

    It keeps the curves and the best policy, has games played to be scored, and says when the run is over.
    """

    def __init__(
        self, folder: RunFolder, store: StoreWriter, experience: Experience, trainer: Trainer, stop: Stop
    ) -> None:
        config = folder.config
        self.status = SerialStatus(
            config, name=folder.name, folder=str(folder.path), num_actors=config.actor.num_actors
        )
        self.status.replay_endpoints = [{"memory": str(store_path(folder.run_id))}]
        self.status.num_leased = config.actor.num_actors
        self._folder = folder
        self._config = config
        self._store = store
        self._experience = experience
        self._trainer = trainer
        self._stop = stop
        self._metrics = MetricsWriter(folder.path)
        self._metrics.begin(0)
        self._rows = MetricRows(self.status)
        self._row_at = STEPS_PER_ROW
        self._best_policy = BestPolicy(folder.checkpoints, config, folder.schema)
        self._evaluator = Evaluator(
            config.evaluator,
            make_network(config.network, folder.schema, seed=config.seed),
            stop_score=config.run.stop_score,
            seed=config.seed,
            make_environment=lambda num_envs, seed: make_environment(
                config.environment, num_envs, seed=seed, num_threads=1
            ),
            learner=self,
        )
        self._evaluate_at = config.evaluator.period_updates
        self._told: dict[str, Any] = {}
        self._rates: Status = {}  # for people: since the report before
        self._steps = Rates(0.0, 0)

    # --- the way to the coordinator, as `LearnerLoop` sees it -------------------------------------------------------

    def send_bytes(self, buf: bytes, /) -> None:
        """Takes the trainer's report, which comes once a second: only its rates, which nothing but the view needs."""
        report, now = json.loads(buf), self.status.elapsed_seconds
        self._rates = {name: report[name] for name in ("updates_per_second", "samples_per_second")}
        (self._rates["steps_per_second"],) = self._steps.measure(now, self._store.num_inserted)
        self._folder.elapsed_seconds = now

    def poll(self) -> bool:
        """Does what is due, and says whether there is news."""
        status, updates = self.status, self._trainer.num_updates
        status.num_steps = self._store.num_inserted
        if status.num_steps >= self._row_at:
            self._row_at = status.num_steps - status.num_steps % STEPS_PER_ROW + STEPS_PER_ROW
            self.write_rows()
        if self._config.evaluator.enabled and updates >= self._evaluate_at:
            self._evaluate_at += self._config.evaluator.period_updates
            self._evaluator.step(self._stop)
        status.reason = status.reason or status.end_reason()
        news = {
            "replay": [{}],  # Priorities go by no address.
            "absent": "",
            "end": status.reason,
            "steps": status.num_steps,
            "episodes": status.num_episodes,
            "elapsed_seconds": int(status.elapsed_seconds),
        }
        is_new, self._told = news != self._told, news
        return is_new

    def recv_bytes(self) -> bytes:
        """The news."""
        return json.dumps(self._told).encode()

    # --- the evaluator's parameters and results ---------------------------------------------------------------------

    def newest(self, timeout: float) -> Parameters:
        """The parameters as they are."""
        return self._trainer.parameters()

    def send(self, result: EvaluationResult, parameters: Parameters | None) -> None:
        """Keeps a result, and its parameters when they are the best so far."""
        best = self._best_policy.keep(result.mean, parameters, games_of(result.to_dict()))
        self.status.evaluation = {**result.to_dict(), "best": best}
        self._metrics.accept(evaluation_row(self.status.num_steps, result.to_dict(), best))

    # --- curves and status ------------------------------------------------------------------------------------------

    def write_rows(self) -> None:
        """Adds to the curves what is known now. Nothing that a clock has measured is in them but their times."""
        figures = self._experience.server.status()
        counts = {name: value for name, value in figures.items() if name not in BY_THE_CLOCK}
        self.status.hear(0, "replay", host_name(), os.getpid(), counts)
        self._describe_training()
        if scores := self._experience.actor.scores.take():
            row = make_row("actor", self.status.num_steps, scores)
            self.status.count_episodes(row)
            self._metrics.accept(row)
        for row in self._rows.next():
            self._metrics.accept(row)

    def report(self) -> Status:
        """The status object, with the rates of the last second."""
        self._describe_training()
        report = {**self.status.report(self._metrics.latest), **self._rates}
        report["replay"]["size"] = self._store.size  # The rest is as of the last row.
        return report

    def finish(self, reason: str) -> None:
        """Ends curves and status."""
        self.status.reason, self.status.finished = reason, True
        self.write_rows()
        self._folder.elapsed_seconds = self.status.elapsed_seconds
        self._metrics.close()

    def _describe_training(self) -> None:
        if self._trainer.num_updates:
            self.status.learner = describe_training(self._trainer)


class SerialRun:
    """A run; made by `open_single_process`."""

    def __init__(self, folder: RunFolder, store: StoreWriter, stop: Stop) -> None:
        self._folder = folder
        self._stop = stop
        self.experience = Experience(folder, store)
        self.trainer = make_trainer(
            folder, CPU, self.experience, self.experience, publish=self.experience.parameters.publish
        )
        self.desk = SerialCoordinator(folder, store, self.experience, self.trainer, stop)

    def run(self, look: Callable[[], None] = lambda: None) -> str:
        """Trains until something says enough, saves, and returns why; `look` is called once a second.

        Raises DivergedError or EnvironmentFailure where training cannot go on.
        """
        config = self._folder.config
        loop = LearnerLoop(
            self.trainer,
            CoordinatorLink(self.desk, config.replay, lambda endpoint, shard: None, Progress()),
            Reporter(self.desk, self.experience.ring),
            save=lambda progress: save_checkpoint(self._folder, self.trainer, progress),
            learner=config.learner,
            checkpoint=config.checkpoint,
            run=config.run,
        )
        self.experience.actor.begin()
        reason = loop.run(self._stop, look)
        loop.save()
        self.desk.finish(reason)
        return reason


@contextmanager
def open_serial_run(folder: RunFolder, stop: Stop) -> Iterator[SerialRun]:
    """A new run, with its memory in the place of every run's. Its configuration is as `fitting.fit_one_process` gives.

    All of torch's sums have one order, as it has one thread; the generators that environments and networks of the
    user's own may draw from are seeded too.
    """
    config, path = folder.config, store_path(folder.run_id)
    prepare_torch(config.learner, CPU)
    _seed_all(config)
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


def _seed_all(config: Config) -> None:
    random.seed(config.seed)
    np.random.seed(config.seed)
    torch.manual_seed(config.seed)
