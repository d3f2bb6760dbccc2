"""Gradient steps: double Q, n-step returns, importance weights, a target network (Horgan et al. 2018, section 3.2)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from apex.config import LearnerConfig
from apex.dqn.autograd_update import make_update, place
from apex.dqn.gradient_step import UpdateFigures
from apex.dqn.losses import importance_weights
from apex.dqn.networks import flatten_parameters
from apex.dqn.optimizers import learning_rate_at, make_optimizer, restore_optimizer, set_learning_rate
from apex.learning.batch_ring import MAX_RETURN, Batch
from apex.learning.device_transfer import make_transfer
from apex.learning.skipped_batches import set_aside
from apex.types import Array, Parameters, PriorityUpdate

COLLECT_SECONDS = 0.001  # between two looks for results, while no batch comes

log = logging.getLogger("apex")


class BatchProvider(Protocol):
    """Where batches come from."""

    memory: Array  # uint8[bytes] that all batches lie in

    def receive(self, timeout: float) -> Batch | None:
        """The next batch, or None after `timeout` seconds without one."""

    def release(self, slot: int) -> None:
        """Says that a batch's memory may be filled again."""


class PrioritySink(Protocol):
    """Where new priorities go."""

    def send(self, update: PriorityUpdate) -> None:
        """Sends without waiting."""


class Trainer:
    """One gradient step after the other: double Q, importance weights, clipped gradients, a target network."""

    def __init__(
        self,
        config: LearnerConfig,
        make_network: Callable[[], nn.Module],
        *,
        device: torch.device,
        batches: BatchProvider,
        priorities: PrioritySink,
        publish: Callable[[Parameters], None],
        keep_skipped: Callable[[Batch, NDArray[np.float32], int], None] = lambda batch, td_errors, count: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`make_network` makes the online network, and then the target network.

        `keep_skipped` takes a batch that no update could be made with, its |TD errors| and `num_skipped`.
        """
        self._config = config
        self._keep_skipped = keep_skipped
        self._batches = batches
        self._priorities = priorities
        self._publish = publish
        self._publish_due, self._publish_at = False, 0.0
        self._clock = clock
        self.online = place(make_network(), device)
        self.target = place(make_network(), device).requires_grad_(False).eval()
        self.target.load_state_dict(self.online.state_dict())
        self.optimizer = make_optimizer(config, self.online.parameters())
        self.num_updates = 0  # batches learned from, those included that were skipped
        self.num_skipped = 0  # updates that were not made, as their loss or gradient was not finite
        self.num_skipped_in_row = 0  # up to the newest whose result is known
        self.num_unusable = 0  # rows of batches that could not be learned from, see `Batch.probability`
        self.wait_seconds = 0.0  # in all, for batches
        self.policy_lag = 0.0  # learner version - version that chose the actions, mean of the last batch
        self.figures: UpdateFigures | None = None  # of the last update
        self._transfer = make_transfer(device, batches.memory, self._send, batches.release)
        self._update = make_update(config, self.online, self.target, self.optimizer, device)

    def publish_newest(self) -> None:
        """Publishes the online network as it is."""
        self._publish(self.parameters())
        self._publish_due, self._publish_at = False, self._clock() + self._config.publish_seconds

    def step(self, timeout: float) -> bool:
        """Makes one update; False if no batch came within `timeout` seconds."""
        began = time.monotonic()
        batch = self._receive(timeout)
        self.wait_seconds += time.monotonic() - began
        if batch is None:
            return False
        self._train(batch)
        self.num_updates += 1
        if self.num_updates % self._config.target_period == 0:
            self.target.load_state_dict(self.online.state_dict())
        self._publish_due |= self.num_updates % self._config.publish_period == 0
        if self._publish_due and self._clock() >= self._publish_at:
            self.publish_newest()
        return True

    @property
    def learning_rate(self) -> float:
        """That of the next update."""
        return learning_rate_at(self._config, self.num_updates)

    def parameters(self) -> Parameters:
        """A clone of the online network, at a step boundary."""
        return Parameters(self.num_updates, flatten_parameters(self.online))

    def state(self) -> dict[str, Any]:
        """All that is needed to go on: state dicts by the names that `checkpoint.LearnerState` has for them."""
        return {
            "num_updates": self.num_updates,
            "online": self.online.state_dict(),
            "target": self.target.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": {"torch": torch.get_rng_state()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from what `state` gave."""
        self.num_updates = state["num_updates"]
        self.online.load_state_dict(state["online"])
        self.target.load_state_dict(state["target"])
        restore_optimizer(self.optimizer, state["optimizer"])
        torch.set_rng_state(state["rng"]["torch"])

    def flush(self) -> None:
        """Waits for the results that are still on their way to the host, and sends their priorities."""
        self._transfer.flush()

    def _receive(self, timeout: float) -> Batch | None:
        """The next batch. Meanwhile results leave as they arrive: where credit is short, it waits for just these."""
        deadline = time.monotonic() + timeout
        while self._transfer.collect():
            remaining = deadline - time.monotonic()
            batch = self._batches.receive(max(0.0, min(COLLECT_SECONDS, remaining)))
            if batch is not None or remaining <= 0:
                return batch
        return self._batches.receive(max(0.0, deadline - time.monotonic()))

    def _train(self, batch: Batch) -> None:
        # Of the whole memory, whatever its shards hold: P(i) = 1/R * leaf / root, N = the sum of what is alive in each.
        weights = importance_weights(
            batch.probability, batch.num_transitions, self._config.importance_sampling_exponent
        )
        self._count_unusable(int((~batch.usable).sum()))
        on_device = self._transfer.load(batch, weights)
        if self._config.learning_rate_updates:
            set_learning_rate(self.optimizer, self.learning_rate)
        updated = self._update(on_device)
        self.figures = updated.figures
        self.policy_lag = max(0.0, self.num_updates - float(batch.version.mean()))
        # In one tensor: one copy to the host tells both.
        self._transfer.give_back(batch, torch.cat([updated.td_errors.float(), updated.finite.float().reshape(1)]))

    def _count_unusable(self, count: int) -> None:
        """Counts rows that cannot be learned from; warns at 1, 2, 4, 8 ..."""
        before, self.num_unusable = self.num_unusable, self.num_unusable + count
        if before.bit_length() != self.num_unusable.bit_length():
            log.warning(
                "%d transitions could not be learned from: their frames do not decompress, or their return is beyond "
                "%g. They get priority 0; look at the environment and at who may insert",
                self.num_unusable,
                MAX_RETURN,
            )

    def _send(self, batch: Batch, result: NDArray[np.float32]) -> None:
        """Takes a result that has arrived on the host, at most `device_transfer.MAX_BEHIND` steps after it was made."""
        td_errors, finite = result[:-1], bool(result[-1])
        if finite:
            self.num_skipped_in_row = 0
        else:
            self.num_skipped += 1
            self.num_skipped_in_row += 1
            self._keep_skipped(batch, td_errors, self.num_skipped)
        for update in batch.updates(td_errors):
            self._priorities.send(update if finite else set_aside(update))
