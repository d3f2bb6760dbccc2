"""The learner's loop: it trains, reports once a second, saves every period, and ends when something says enough."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Any, Protocol

from apex.config import Config
from apex.dqn.networks import dormant_share
from apex.learning.batch_ring import BatchRing
from apex.learning.coordinator.link import TrainerReport
from apex.learning.run_save import DivergedError
from apex.learning.trainer import Trainer
from apex.runtime.lifecycle import INTERRUPTED, POLL_SECONDS, Stop, Wait
from apex.transport.messages.status import LearnerStatus
from apex.transport.timing import REPORT_SECONDS
from apex.types import Progress

log = logging.getLogger("apex")


class CoordinatorView(Protocol):
    """The coordinator, as the loop sees it."""

    absent: str  # replay servers that are not there, in words

    @property
    def progress(self) -> Progress:
        """How far the run is."""

    def send(self, message: TrainerReport) -> None:
        """Takes a report."""

    def hear(self) -> str:
        """Takes the news; returns why the run should end, if it should."""


def describe_training(trainer: Trainer, **measured: Any) -> LearnerStatus:
    """What the trainer says of itself; `measured` are figures that depend on a clock."""
    figures: dict[str, Any] = {}
    if trainer.figures is not None:
        figures = {name: float(value) for name, value in trainer.figures._asdict().items()}
        figures["dormant_share"] = dormant_share(trainer.online)
    return LearnerStatus(
        updates=trainer.num_updates,
        policy_lag=trainer.policy_lag,
        skipped_updates=trainer.num_skipped,
        learning_rate=trainer.learning_rate,
        **figures,
        **measured,
    )


class Reporter:
    """Rates and means since the last report."""

    def __init__(self, ring: BatchRing) -> None:
        self._batch_size = ring.batch_size
        self._loaders = loaders = ring.loaders
        self._since = time.monotonic()
        self._updates = 0
        self._waited = 0.0
        self._loaded = loaders.seconds.copy()

    def due(self) -> bool:
        """Whether a second has passed."""
        return time.monotonic() - self._since >= REPORT_SECONDS

    def report(self, trainer: Trainer, *, waiting: str) -> TrainerReport:
        """Ends the interval; returns what the coordinator is to be told of it."""
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
            loaders_draw=int(self._loaders.draws[0]),  # All do, or none, as they are on one host.
            refused_batches=int(self._loaders.refused.sum()),
            load_per_core=os.getloadavg()[0] / (os.cpu_count() or 1),
            waiting=waiting,
        )
        self._since, self._updates, self._waited, self._loaded = now, trainer.num_updates, trainer.wait_seconds, loaded
        return TrainerReport(status)


class LearnerLoop:
    """Train, report, save, until something says enough."""

    def __init__(
        self,
        trainer: Trainer,
        coordinator: CoordinatorView,
        reporter: Reporter,
        config: Config,
        *,
        save: Callable[[Progress], None],
    ) -> None:
        """`save` writes a checkpoint, and is told the progress."""
        self._trainer = trainer
        self._coordinator = coordinator
        self._reporter = reporter
        self._write = save
        self._config = config
        self._save_due = False  # a period is over; what it has learned is not saved yet
        self._wait = Wait("learner")

    def run(self, stop: Stop, check: Callable[[], None]) -> str:
        """Trains until stopped; returns why it ended. `check` raises what a child or a thread has run into."""
        trainer, coordinator, max_updates = self._trainer, self._coordinator, self._config.run.max_updates
        trainer.publish_newest()  # Actors wait for a first policy.
        while True:
            if trainer.step(POLL_SECONDS):
                self._wait.over()
                self._check_skipped()
                self._save_due |= trainer.num_updates % self._config.checkpoint.period == 0
                if self._save_due and not trainer.num_skipped_in_row:
                    self.save()
            else:
                few = "batches: a replay server has fewer transitions than its share of replay.min_size_to_sample"
                self._wait.on(f"{coordinator.absent} to say hello" if coordinator.absent else few)
            reason = coordinator.hear()
            if stop.requested:
                reason = reason or INTERRUPTED
            if 0 < max_updates <= trainer.num_updates:
                reason = reason or f"reached {max_updates} updates"
            if reason or self._reporter.due():
                check()
                coordinator.send(self._reporter.report(trainer, waiting=self._wait.reason))
            if reason:
                trainer.flush()
                self._check_skipped()
                return reason

    def save(self) -> None:
        """Writes a checkpoint; not while updates are skipped, lest those from before the trouble go in their favour."""
        count = self._trainer.num_skipped_in_row
        if count:
            log.error(
                "no checkpoint at update %d: the last %d updates were skipped; the older checkpoints stay",
                self._trainer.num_updates,
                count,
            )
            return
        self._write(self._coordinator.progress)
        self._save_due = False

    def _check_skipped(self) -> None:
        """Raises DivergedError where too many updates in a row could not be made."""
        count = self._trainer.num_skipped_in_row
        if count >= self._config.learner.max_skipped_updates:
            raise DivergedError(
                f"the loss or the gradient of {count} updates in a row was not finite, the last one number "
                f"{self._trainer.num_updates}: look at bad-batches in the run folder, lower --learner.learning-rate, "
                "and go on from the last good checkpoint with --resume RUN --accept-changes"
            )
