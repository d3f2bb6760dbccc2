"""Makes the gradient steps of an algorithm (Horgan et al. 2018, section 3): weights, target network, publishing."""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from apex.algorithms.dormant_units import DormantUnits
from apex.algorithms.gradient_step import DeviceBatch
from apex.algorithms.graph_update import place
from apex.algorithms.interface import Algorithm
from apex.algorithms.losses import importance_weights
from apex.algorithms.optimizers import has_schedule, learning_rate_at, restore_optimizer, set_learning_rate
from apex.algorithms.parameters import flatten, flatten_parameters, follow, freeze
from apex.config import LearnerConfig
from apex.learning.batch_ring import MAX_RETURN, Batch
from apex.learning.device_transfer import copy_to_host, make_transfer
from apex.learning.skipped_batches import set_aside
from apex.types import Parameters
from apexreplay.item_kinds import Array
from apexreplay.types import PriorityUpdate

# While no batch arrives: time between two checks for gradient steps that the device has finished.
COLLECT_SECONDS = 0.001
OBSERVE_PERIOD = 25  # updates between two batches whose states are searched for dormant units; costs 1 % of the time

log = logging.getLogger("apex")


class BatchProvider(Protocol):
    """The source of batches."""

    memory: Array  # uint8[bytes]  memory of all batches

    def receive(self, timeout: float) -> Batch | None:
        """Returns the next batch, or None after `timeout` seconds without a batch."""

    def release(self, slot: int) -> None:
        """Releases a batch's memory, which may then be filled again."""


class PrioritySink(Protocol):
    """The receiver of new priorities."""

    def send(self, update: PriorityUpdate) -> None:
        """Sends new priorities without waiting."""


class Trainer:
    """Makes gradient steps for any algorithm, with importance weights, a target network and publishing."""

    def __init__(
        self,
        config: LearnerConfig,
        algorithm: Algorithm,
        *,
        device: torch.device,
        batches: BatchProvider,
        priorities: PrioritySink,
        publish: Callable[[Parameters], None],
        keep_skipped: Callable[[Batch, NDArray[np.float32], int], None] = lambda batch, td_errors, count: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`algorithm` creates the online network, then the target network.

        `keep_skipped` takes the batch of a skipped update, its |TD errors| and `num_skipped`.
        """
        self._config = config
        self._keep_skipped = keep_skipped
        self._batches = batches
        self._priorities = priorities
        self._publish = publish
        self._publish_due, self._publish_at = False, 0.0
        self._clock = clock
        self.online = place(algorithm.make_network(), device)
        if config.freeze:
            log.info("not trained: %s (%d tensors)", config.freeze, freeze(self.online, config.freeze))
        self.target = place(algorithm.make_network(), device).requires_grad_(False).eval()
        self.target.load_state_dict(self.online.state_dict())
        self.optimizer = algorithm.make_optimizer(self.online)
        self.learning_rate = config.learning_rate  # of the newest update
        self.num_updates = 0  # batches processed, including skipped ones
        self.num_skipped = 0  # updates skipped because their loss or gradient was not finite
        self.num_skipped_in_row = 0  # consecutive skipped updates, up to the newest known result
        self.num_unusable = 0  # rows of batches that could not be used for training, see `Batch.probability`
        self.wait_seconds = 0.0  # total time spent waiting for batches
        self.policy_lag = 0.0  # learner version - version that chose the action, averaged over the last batch
        self.figures: Mapping[str, Tensor] = {}  # figures of the last update
        self.dormant_units = DormantUnits(self.online)
        self._transfer = make_transfer(device, batches.memory, self._send, batches.release)
        self._update = algorithm.make_update(self.online, self.target, self.optimizer, device)

    @property
    def torch_threads(self) -> int:
        """The number of threads to pass to `torch.set_num_threads` on a CPU."""
        return self._update.torch_threads

    @property
    def ready(self) -> bool:
        """Whether the online network may be published, saved and examined; see `Update`."""
        return getattr(self._update, "ready", True)

    def publish_newest(self) -> None:
        """Publishes the current online network. On a GPU, starts the copy to the host, and publishes it later."""
        version = self.num_updates
        self._transfer.fetch(flatten(self.online), lambda values: self._publish(Parameters(version, values)))
        self._publish_due, self._publish_at = False, self._clock() + self._config.publish_seconds

    def step(self, timeout: float, run_share: float | None = None) -> bool:
        """Makes one update; returns False if no batch came within `timeout` seconds.

        run_share: how much of the run is over, 0 ... 1; None: the run has no limit.
        """
        began = time.monotonic()
        batch = self._receive(timeout)
        self.wait_seconds += time.monotonic() - began
        if batch is None:
            return False
        self.learning_rate = learning_rate_at(self._config, self.num_updates, run_share)
        self._train(batch)
        self.num_updates += 1
        if self.num_updates % self._config.target_period == 0:
            follow(self.target, self.online, self._config.target_share)
        self._publish_due |= self.num_updates % self._config.publish_period == 0
        if self._publish_due and self.ready and self._clock() >= self._publish_at:
            self.publish_newest()
        return True

    def parameters(self) -> Parameters:
        """Returns a copy of the parameters of the online network. Call this between two steps."""
        return Parameters(self.num_updates, flatten_parameters(self.online))

    def state(self) -> dict[str, Any]:
        """Returns all state needed to continue: state dicts named as in `checkpoint.LearnerState`."""
        return {
            "num_updates": self.num_updates,
            "online": self.online.state_dict(),
            "target": self.target.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": {"torch": torch.get_rng_state()},
        }

    def snapshot(self) -> tuple[dict[str, Any], Callable[[], None]]:
        """Returns a copy of `state` on the host, and a function that waits, on any thread, until it is complete."""
        copied: dict[str, Any] = copy_to_host(self.state())
        return copied, self._transfer.mark()

    def restore(self, state: dict[str, Any]) -> None:
        """Restores what an earlier call of `state` returned."""
        self.num_updates = state["num_updates"]
        self.online.load_state_dict(state["online"])
        self.target.load_state_dict(state["target"])
        restore_optimizer(self.optimizer, state["optimizer"])
        torch.set_rng_state(state["rng"]["torch"])

    def flush(self) -> None:
        """Waits for the results that are still being copied to the host, and sends their priorities."""
        self._transfer.flush()

    def _receive(self, timeout: float) -> Batch | None:
        """Returns the next batch. Meanwhile sends results as they arrive, because they return credit to samplers."""
        deadline = time.monotonic() + timeout
        while self._transfer.collect():
            remaining = deadline - time.monotonic()
            batch = self._batches.receive(max(0.0, min(COLLECT_SECONDS, remaining)))
            if batch is not None or remaining <= 0:
                return batch
        return self._batches.receive(max(0.0, deadline - time.monotonic()))

    def _train(self, batch: Batch) -> None:
        exponent = self._config.importance_sampling_exponent
        weights = importance_weights(batch.probability, batch.num_transitions, exponent)
        self._count_unusable(int((~batch.usable).sum()))
        on_device = self._transfer.load(batch, weights)
        if has_schedule(self._config):
            set_learning_rate(self.optimizer, self.learning_rate)
        if self.num_updates % OBSERVE_PERIOD == 0 and self.ready:
            self.dormant_units.add(on_device.stacks[0])
        # Adam's means of the gradients of inactive units decay to denormal numbers, below 1e-38. If they did not become
        # 0, its step would take up to 14 times as long on a CPU. Only here, because 0.0 < 5e-324 must hold elsewhere.
        torch.set_flush_denormal(True)
        try:
            updated = self._update(cast(DeviceBatch, on_device))
        finally:
            torch.set_flush_denormal(False)
        self.figures = updated.figures
        self.policy_lag = max(0.0, self.num_updates - float(batch.version.mean()))
        # One tensor for both results, so that one copy to the host is enough.
        self._transfer.give_back(batch, torch.cat([updated.td_errors.float(), updated.finite.float().reshape(1)]))

    def _count_unusable(self, count: int) -> None:
        """Counts unusable rows; warns at 1, 2, 4, 8 ..."""
        before, self.num_unusable = self.num_unusable, self.num_unusable + count
        if before.bit_length() != self.num_unusable.bit_length():
            log.warning(
                "%d transitions are unusable: their frames do not decompress, or their |return| is larger than %g. "
                "They get priority 0; check the environment's rewards, and which hosts may send experience",
                self.num_unusable,
                MAX_RETURN,
            )

    def _send(self, batch: Batch, result: NDArray[np.float32]) -> None:
        """Sends the priorities of an update whose result has arrived, at most `MAX_BEHIND` steps after the update."""
        td_errors, finite = result[:-1], bool(result[-1])
        if finite:
            self.num_skipped_in_row = 0
        else:
            self.num_skipped += 1
            self.num_skipped_in_row += 1
            self._keep_skipped(batch, td_errors, self.num_skipped)
        for update in batch.updates(td_errors):
            self._priorities.send(update if finite else set_aside(update))
