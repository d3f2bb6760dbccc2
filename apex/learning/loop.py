"""The learner's loop: trains, reports once a second, saves periodically, and ends at a limit or a stop request."""

import logging
import os
import time
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, Protocol

from apex.config import Config, RunConfig
from apex.errors import DivergedError
from apex.facts import INTERRUPTED, EndReason
from apex.learning.batch_ring import BatchRing
from apex.learning.coordinator.link import TrainerReport
from apex.learning.trainer import Trainer
from apex.transport.messages.status import LearnerStatus
from apex.transport.timing import REPORT_SECONDS
from apex.types import Progress
from apexreplay.facts import Waiting
from apexreplay.process.lifecycle import POLL_SECONDS, Stop, Wait

COMMON_FIGURES = ("loss", "mean_q", "td_error", "gradient_norm")  # figures of every algorithm's updates
DYING_SHARE, DYING_SECONDS = 0.5, 60.0  # A layer is dying if a larger share of its units is dormant for so long.
MAX_FIGURES = 32  # figures of an algorithm, and layers with the most dormant units, in a report
LEAST_SHARE = 0.25  # minimum time between two checkpoints, as a share of checkpoint.period_seconds

log = logging.getLogger("apex")


class CoordinatorView(Protocol):
    """The part of the coordinator that the loop uses."""

    waiting: Waiting  # what the trainer waits for when no batch comes

    @property
    def progress(self) -> Progress:
        """The progress of the run."""

    def send(self, message: TrainerReport) -> None:
        """Takes a report."""

    def receive(self) -> EndReason | None:
        """Receives the coordinator's news; returns why the run should end, or None if it should continue."""


def describe_training(trainer: Trainer, **measured: Any) -> LearnerStatus:
    """Returns the status of the trainer; `measured` are the figures that depend on a clock."""
    figures: dict[str, Any] = {}
    if trainer.figures:
        numbers = {name: float(value) for name, value in trainer.figures.items()}
        figures = {name: numbers.pop(name) for name in COMMON_FIGURES if name in numbers}
        shares = trainer.dormant_units.shares()
        numbers = dict(islice(numbers.items(), MAX_FIGURES))
        worst = sorted(shares, key=lambda layer: shares[layer], reverse=True)[:MAX_FIGURES]
        numbers |= {f"dormant_share/{layer}": shares[layer] for layer in worst}
        figures |= {"dormant_share": max(shares.values(), default=None), "figures": numbers}
    return LearnerStatus(
        updates=trainer.num_updates,
        policy_lag=trainer.policy_lag,
        skipped_updates=trainer.num_skipped,
        unusable_transitions=trainer.num_unusable,
        learning_rate=trainer.learning_rate,
        **figures,
        **measured,
    )


class Reporter:
    """Measures rates and means since the last report."""

    def __init__(self, ring: BatchRing, num_updates: int = 0) -> None:
        """`num_updates`: updates of the run before this start of the learner."""
        self._batch_size = ring.batch_size
        self._loaders = loaders = ring.loaders
        self._since = time.monotonic()
        self._updates = num_updates
        self._waited = 0.0
        self._loaded = loaders.seconds.copy()
        self._dying_since: dict[str, float] = {}  # by layer: time since which most of its units are dormant
        self._warned: set[str] = set()  # layers that a warning has named

    def due(self) -> bool:
        """Returns whether a second has passed since the last report."""
        return time.monotonic() - self._since >= REPORT_SECONDS

    def report(self, trainer: Trainer, *, waiting: Waiting | None) -> TrainerReport:
        """Ends the interval; returns its report for the coordinator."""
        now = time.monotonic()
        seconds = now - self._since
        rate = (trainer.num_updates - self._updates) / seconds
        loaded = self._loaders.seconds.copy()
        status = describe_training(
            trainer,
            updates_per_second=rate,
            samples_per_second=rate * self._batch_size,
            wait_share=min(1.0, (trainer.wait_seconds - self._waited) / seconds),
            loader_busy_share=min(1.0, float((loaded - self._loaded).max()) / seconds),
            loaders_draw=int(self._loaders.draws[0]),  # All loaders draw, or none: they run on one host.
            refused_batches=int(self._loaders.refused.sum()),
            load_per_core=os.getloadavg()[0] / (os.cpu_count() or 1),
            waiting=waiting,
        )
        self._since, self._updates, self._waited, self._loaded = now, trainer.num_updates, trainer.wait_seconds, loaded
        self._warn_of_dying_layers(trainer.dormant_units.shares(), now)
        return TrainerReport(status)

    def _warn_of_dying_layers(self, shares: Mapping[str, float], now: float) -> None:
        """Warns once per layer if more than `DYING_SHARE` of its units stay dormant for `DYING_SECONDS`."""
        for layer, share in shares.items():
            if share <= DYING_SHARE:
                self._dying_since.pop(layer, None)
                continue
            since = self._dying_since.setdefault(layer, now)
            if now - since >= DYING_SECONDS and layer not in self._warned:
                self._warned.add(layer)
                log.warning(
                    "%.0f %% of the units of layer %r are dormant: start a run with a lower --learner.learning-rate "
                    "(other remedies: docs/guide/train.md, If a network stops learning)",
                    100 * share,
                    layer,
                )


def share_of_limits(run: RunConfig, progress: Progress, num_updates: int) -> float | None:
    """Returns how much of the run is over, 0 ... 1, measured by its nearest limit; None without a limit.

    A run in one process ignores the limit of minutes here: the same seed must give the same curve.
    """
    trained_seconds = progress.elapsed_seconds - progress.untrained_seconds
    done = num_updates, progress.num_steps, trained_seconds / 60
    limits = run.max_updates, run.max_steps, 0 if run.single_process else run.max_minutes
    shares = [min(1.0, value / limit) for value, limit in zip(done, limits, strict=True) if limit]
    return max(shares, default=None)


class LearnerLoop:
    """Trains, reports and saves until a limit is reached or a stop is requested."""

    def __init__(
        self,
        trainer: Trainer,
        coordinator: CoordinatorView,
        reporter: Reporter,
        config: Config,
        *,
        save: Callable[[Progress], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`save` begins a checkpoint with this progress; it returns False while the previous one is being written."""
        self._trainer = trainer
        self._coordinator = coordinator
        self._reporter = reporter
        self._begin_save = save
        self._clock = clock
        self._config = config
        self._save_due = False  # whether a checkpoint period has ended since the last checkpoint
        self._saved_at, self._pause = clock(), 0.0  # No minimum pause before the first checkpoint.
        self._wait = Wait("learner")

    def run(self, stop: Stop, check: Callable[[], None]) -> EndReason:
        """Trains until the run ends; returns the reason. `check` raises the error of a failed child or thread."""
        trainer, coordinator, max_updates = self._trainer, self._coordinator, self._config.run.max_updates
        trainer.publish_newest()  # Actors wait for a first policy.
        while True:
            if trainer.step(POLL_SECONDS, share_of_limits(self._config.run, coordinator.progress, trainer.num_updates)):
                self._wait.over()
                self._check_skipped()
                if self._is_save_due() and not trainer.num_skipped_in_row and trainer.ready:
                    self.save()
            else:
                self._wait.on(coordinator.waiting)
            end = coordinator.receive()
            if stop.poll():
                end = end or INTERRUPTED
            if 0 < max_updates <= trainer.num_updates:
                end = end or EndReason("updates", max_updates)
            if end or self._reporter.due():
                check()
                coordinator.send(self._reporter.report(trainer, waiting=self._wait.waiting))
            if end:
                trainer.flush()
                self._check_skipped()
                return end

    def save(self) -> None:
        """Begins a checkpoint, unless the previous one is still being written.

        Does nothing while updates are skipped, because a new checkpoint would replace an older, good one.
        """
        if count := self._trainer.num_skipped_in_row:
            problem = "no checkpoint at update %d: the last %d updates were skipped; older checkpoints are kept"
            log.error(problem, self._trainer.num_updates, count)
            return
        if self._begin_save(self._coordinator.progress):
            self._save_due, self._saved_at = False, self._clock()
            self._pause = LEAST_SHARE * self._config.checkpoint.period_seconds

    def _is_save_due(self) -> bool:
        checkpoint, seconds = self._config.checkpoint, self._clock() - self._saved_at
        self._save_due |= seconds >= checkpoint.period_seconds or self._trainer.num_updates % checkpoint.period == 0
        return self._save_due and seconds >= self._pause

    def _check_skipped(self) -> None:
        """Raises DivergedError if too many updates in a row were skipped."""
        count = self._trainer.num_skipped_in_row
        if count >= self._config.learner.max_skipped_updates:
            raise DivergedError(
                f"the loss or gradient of {count} updates up to update {self._trainer.num_updates} was not finite",
                "look at bad-batches in the run folder, lower --learner.learning-rate, and resume from the last good "
                "checkpoint with --resume RUN --accept-changes",
            )
