"""Runs all roles alternately in this process: the usual classes, but no sockets, child processes or time limits.

The learner's loop and the coordinator are those of every run. Between two iterations of the loop, the actors step, and
the results are passed to the coordinator. The order depends only on counts, and all randomness only on the seed.
Therefore the same seed gives the same curve, even on a busy machine.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TextIO

import torch
from msgspec.structs import replace

from apex.algorithms.interface import make_algorithm
from apex.errors import DivergedError, EnvironmentFailure
from apex.evaluation.evaluator import Evaluator
from apex.facts import Ending, EndReason, Failure
from apex.launch.monitor import RunMonitor
from apex.launch.preflight.fit import fit_one_process
from apex.launch.preflight.report import describe_limits
from apex.launch.preflight.warm_start import find_warm_start
from apex.launch.serial.experience import STEPS_PER_ROW, Experience
from apex.launch.start import RunOutcome, Start, judge
from apex.launch.terminal.dashboard import History
from apex.launch.terminal.view import line_view, print_line
from apex.learning.coordinator.coordinator import Coordinator
from apex.learning.coordinator.link import TrainerEnd, TrainerReport
from apex.learning.loop import LearnerLoop, Reporter, describe_training
from apex.learning.run_save import save_run
from apex.learning.setup import make_trainer, prepare_torch
from apex.learning.trainer import Trainer
from apex.replay_memory.settings import store_settings
from apex.runs.folder import RunFolder
from apex.runs.lock import hold
from apex.runtime.logs import LogTail, log_to
from apex.runtime.seeding import seed_generators
from apex.sentences import describe_warm_start
from apex.transport.hello import host_name
from apex.transport.messages.control import ReplayHeartbeat
from apex.transport.messages.results import EvaluationResult
from apex.transport.messages.run_status import RunStatus
from apex.types import Parameters, Progress
from apexreplay.errors import FINISHED, UsageError
from apexreplay.facts import Waiting
from apexreplay.process.lifecycle import Stop
from apexreplay.process.rates import Rates
from apexreplay.server.open_store import reclaim
from apexreplay.store.location import claim_run, remove, store_path
from apexreplay.store.writer import StoreWriter

CPU = torch.device("cpu")

log = logging.getLogger("apex")


class SerialCoordinator:
    """The link from `LearnerLoop` to the coordinator. Does the work that is due between two iterations of that loop.

    This work is to run evaluations, and to pass to the coordinator the data that other runs send over sockets.
    """

    waiting = Waiting("actor_steps")

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
        algorithm = make_algorithm(config, folder.schema)
        self._evaluator = Evaluator(config, algorithm.make_agent(algorithm.make_network()), self)
        self._final: int | None = None
        self._evaluate_at = config.evaluator.period_updates
        self._rates: dict[str, float | None] = {}  # rates since the previous report, only for display
        self._steps = Rates(0.0, 0)

    @property
    def progress(self) -> Progress:
        """The progress of the run."""
        return self._state.progress

    def send(self, message: TrainerReport) -> None:
        """Stores the rates in the trainer's report, which comes once a second. They are only shown to the user."""
        now = self._state.elapsed_seconds
        self._folder.run_time = self._state.run_time
        (steps_per_second,) = self._steps.measure(now, self._store.num_steps)
        self._rates = {
            "steps_per_second": steps_per_second,
            "updates_per_second": message.status.updates_per_second,
            "samples_per_second": message.status.samples_per_second,
        }

    def receive(self) -> EndReason | None:
        """Does the work that is due; returns why the run should end, or None if it should continue."""
        store = self._store
        self._state.count_steps(0, store.num_inserted, store.num_steps, str(store.store_incarnation))
        if self._state.num_steps >= self._row_at:
            self._row_at = self._state.num_steps - self._state.num_steps % STEPS_PER_ROW + STEPS_PER_ROW
            self.write_rows()
        if self._config.enabled and self._trainer.num_updates >= self._evaluate_at:
            self._evaluate_at += self._config.period_updates
            self._evaluator.step(self._stop)
        return self._state.decide_end()

    # --- the learner, as the evaluator sees it ----------------------------------------------------------------------

    def newest(self, timeout: float) -> Parameters:
        """Returns the trainer's parameters at once."""
        return self._trainer.parameters()

    def final(self) -> int | None:
        """Returns the version of the last parameters; None while training continues."""
        return self._final

    def keep(self, result: EvaluationResult, parameters: Parameters | None) -> None:
        """Passes an evaluation to the coordinator."""
        self._coordinator.keep_evaluation(result, parameters)

    # --- curves and status ------------------------------------------------------------------------------------------

    def write_rows(self) -> None:
        """Adds a row to the curves. Of the values in the row, only the time comes from a clock."""
        self._state.update(
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
        if (scores := self._experience.actor.scores.take(None)) is not None:
            self._coordinator.keep_scores(scores)
        self._coordinator.write_rows()

    def report(self) -> RunStatus:
        """Returns the status, with the rates of the last second."""
        self._describe_training()
        status = self._coordinator.status()
        replay = replace(status.replay, size=self._store.size)  # Its other values are those of the last row.
        return replace(status, replay=replay, **self._rates)

    def finish(self, end: EndReason) -> None:
        """Evaluates the last parameters if they have no score yet, and closes."""
        self._state.stop_clock()
        evaluation, self._final = self._state.evaluation, self._trainer.num_updates
        has_score = evaluation is not None and (evaluation.confirmed or evaluation.updates == self._final)
        if self._config.enabled and self._config.final_seconds and not has_score and not self._stop.poll():
            self._evaluator.step(self._stop)
        self._coordinator.receive(TrainerEnd(end))
        self.close()

    def close(self) -> None:
        """Writes the last row, and closes the coordinator."""
        self.write_rows()
        self._folder.run_time = self._state.run_time
        self._coordinator.close()

    def _describe_training(self) -> None:
        if self._trainer.num_updates:
            self._state.update_learner(describe_training(self._trainer))


class SerialRun:
    """A run in one process; create it with `open_serial_run`."""

    def __init__(self, folder: RunFolder, store: StoreWriter, stop: Stop) -> None:
        self._folder = folder
        self._stop = stop
        self.experience = Experience(folder, store)
        self.trainer = make_trainer(
            folder, CPU, self.experience, self.experience, publish=self.experience.parameters.publish
        )
        self.coordinator = SerialCoordinator(folder, store, self.experience, self.trainer, stop)

    def run(self, look: Callable[[], None] = lambda: None) -> None:
        """Trains until a limit is reached or a stop is requested, and saves.

        `look` is called once a second. Raises DivergedError or EnvironmentFailure if training cannot continue.
        """
        config = self._folder.config
        loop = LearnerLoop(self.trainer, self.coordinator, Reporter(self.experience.ring), config, save=self._save)
        self.experience.actor.begin()
        try:
            end = loop.run(self._stop, look)
        except (EnvironmentFailure, UsageError):  # What was learned before it is kept.
            self.trainer.flush()
            loop.save()
            self.coordinator.close()
            raise
        loop.save()
        self._folder.end = end
        self.coordinator.finish(end)

    def _save(self, progress: Progress) -> bool:
        save_run(self._folder, self.trainer.state(), progress)
        return True


@contextmanager
def open_serial_run(folder: RunFolder, stop: Stop) -> Iterator[SerialRun]:
    """Yields a new run, with its replay memory at the usual path. Its configuration must come from `fit_one_process`.

    torch uses one thread, so that all sums have a fixed order. The global generators of Python, NumPy and torch,
    which custom environments and networks may use, are seeded too.
    """
    config, path = folder.config, store_path(folder.run_id)
    prepare_torch(config.learner, CPU)
    seed_generators(config.seed)
    settings = store_settings(config.replay, config.actor.num_actors)
    reclaim(path, settings.sizes.file_bytes(folder.schema.table))
    with ExitStack() as stack:
        stack.enter_context(claim_run(folder.run_id, None))
        store = StoreWriter.create(path, folder.schema.table, settings, store_incarnation=1)
        stack.callback(remove, path)
        stack.callback(store.close)
        system = SerialRun(folder, store, stop)
        stack.callback(system.experience.environment.close)
        yield system


def run_in_one_process(start: Start, stop: Stop, out: TextIO | None) -> RunOutcome:
    """Chooses the run's sizes, and runs every role in this process: see `execute` and `run.single_process`.

    Progress is printed as plain lines, so that a debugger can use the terminal.
    """
    schema = start.inspector.schema(start.config, partial(print_line, stream=out))
    config, sizes = fit_one_process(start.config, schema)
    start.inspector.try_algorithm(config, schema)
    warm = find_warm_start(config, schema, stop)
    folder = RunFolder.create(config, schema, argv=start.argv, asked=start.config)
    lines = [f"{config.environment.id}, seed {config.seed}", *sizes, describe_limits(config.run)]
    lines += [] if warm is None else [describe_warm_start(warm)]
    for line in (*lines, f"run folder: {folder.path}"):
        print_line(line, out)
    # The log has the learner's name because the learner's loop runs here.
    with hold(folder.path), log_to(folder.logs / "learner.log", "learner"), open_serial_run(folder, stop) as system:
        tail = LogTail(folder.logs)
        view = line_view(out or sys.stdout)
        callbacks, report = start.callbacks, system.coordinator.report
        watch = RunMonitor(report, view, tail.entries, History(), folder=folder.path, callbacks=callbacks)
        callbacks.begin(config, folder.path)
        try:
            system.run(watch.tick)
            ending = Ending(FINISHED, "" if stop.poll() else "learner")
        except (DivergedError, EnvironmentFailure) as error:
            log.error("%s", error)
            ending = Ending(error.exit_status, "learner", Failure(role="learner", kind="error", detail=str(error)))
        watch.tick()
        ending = judge(ending, watch.status, folder)
    return RunOutcome(config, folder.path, ending, watch.status)
