"""Gradient steps: double Q, n-step returns, importance weights, a target network (Horgan et al. 2018, section 3.2)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from apex.checkpoint import LearnerState
from apex.config import Config, LearnerConfig
from apex.loader import Sample
from apex.losses import double_q_loss, importance_weights
from apex.networks import flatten_parameters
from apex.optimizers import make_optimizer
from apex.types import Parameters, PriorityUpdate, Schema


class Samples(Protocol):
    """Where samples come from."""

    def receive(self, timeout: float) -> Sample | None:
        """The next sample, or None after `timeout` seconds without one."""

    def release(self, slot: int) -> None:
        """Says that a sample's memory may be filled again."""


class Priorities(Protocol):
    """Where new priorities go."""

    def send(self, update: PriorityUpdate) -> None:
        """Sends without waiting."""


class Figures(NamedTuple):
    """What one update tells, still on its device."""

    loss: Tensor
    mean_q: Tensor
    td_error: Tensor
    gradient_norm: Tensor


class Trainer:
    """One gradient step after the other: double Q, importance weights, clipped gradients, a target network."""

    def __init__(
        self,
        config: LearnerConfig,
        online: nn.Module,
        target: nn.Module,
        *,
        device: torch.device,
        samples: Samples,
        priorities: Priorities,
        publish: Callable[[Parameters], None],
    ) -> None:
        self._config = config
        self._device = device
        self._samples = samples
        self._priorities = priorities
        self._publish = publish
        self.online = online.to(device)
        self.target = target.to(device).requires_grad_(False)
        self.target.load_state_dict(self.online.state_dict())
        self.optimizer = make_optimizer(config, self.online.parameters())
        self.num_updates = 0
        self.wait_seconds = 0.0  # in all, for samples
        self.policy_lag = 0.0  # learner version - version that chose the actions, mean of the last batch
        self.figures: Figures | None = None  # of the last update
        # Priorities leave one update late with CUDA, so that their copy to the host is awaited by nobody.
        self._outgoing: deque[tuple[Sample, Tensor, torch.cuda.Event | None]] = deque()

    def begin(self) -> None:
        """Publishes: actors wait for a first policy."""
        self._publish(self.parameters())

    def step(self, timeout: float) -> bool:
        """Makes one update; False if no sample came within `timeout` seconds."""
        began = time.monotonic()
        sample = self._samples.receive(timeout)
        self.wait_seconds += time.monotonic() - began
        if sample is None:
            return False
        self._update(sample)
        self.num_updates += 1
        if self.num_updates % self._config.target_period == 0:
            self.target.load_state_dict(self.online.state_dict())
        if self.num_updates % self._config.publish_period == 0:
            self._publish(self.parameters())
        return True

    def parameters(self) -> Parameters:
        """A clone of the online network, at a step boundary."""
        return Parameters(self.num_updates, flatten_parameters(self.online))

    def state(self, config: Config, schema: Schema, num_steps: int) -> LearnerState:
        """All that is needed to go on, for a checkpoint."""
        return LearnerState(
            num_updates=self.num_updates,
            num_steps=num_steps,
            config=config,
            schema=schema,
            online=self.online.state_dict(),
            target=self.target.state_dict(),
            optimizer=self.optimizer.state_dict(),
            rng={"torch": torch.get_rng_state()},
        )

    def restore(self, state: LearnerState) -> None:
        """Goes on from a checkpoint."""
        self.num_updates = state.num_updates
        self.online.load_state_dict(state.online)
        self.target.load_state_dict(state.target)
        self.optimizer.load_state_dict(state.optimizer)
        torch.set_rng_state(state.rng["torch"])

    def flush(self) -> None:
        """Sends the priorities that are still on their way to the host."""
        while self._outgoing:
            self._send_priorities()

    def _update(self, sample: Sample) -> None:
        config, device = self._config, self._device
        weights = importance_weights(sample.probability, sample.num_transitions, config.importance_sampling_exponent)
        observation, next_observation = (self._move(stack) for stack in sample.stacks)
        action, n_step_return, discount = (
            self._move(array) for array in (sample.action, sample.n_step_return, sample.discount)
        )
        with torch.autocast(device.type, torch.bfloat16, enabled=config.bfloat16 == "on"):
            q = self.online(observation)
            with torch.no_grad():
                next_q = self.online(next_observation)
                next_q_target = self.target(next_observation)
        loss = double_q_loss(
            q.float(),
            next_q.float(),
            next_q_target.float(),
            action,
            n_step_return,
            discount,
            self._move(weights),
            kind=config.loss,
        )
        self.optimizer.zero_grad(set_to_none=True)
        loss.loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(self.online.parameters(), config.max_gradient_norm)
        self.optimizer.step()
        self.figures = Figures(
            loss.loss.detach(), q.detach().max(1).values.mean(), loss.td_errors.mean(), norm.detach()
        )
        self.policy_lag = max(0.0, self.num_updates - float(sample.version.mean()))
        self._return(sample, loss.td_errors)

    def _move(self, array: Any) -> Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)

    def _return(self, sample: Sample, td_errors: Tensor) -> None:
        """Sends priorities and gives the sample's memory back, as soon as the device is done with both."""
        if self._device.type == "cpu":
            self._outgoing.append((sample, td_errors, None))
        else:
            copy = td_errors.to("cpu", non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._outgoing.append((sample, copy, event))
        while len(self._outgoing) > (self._device.type != "cpu"):
            self._send_priorities()

    def _send_priorities(self) -> None:
        sample, td_errors, event = self._outgoing.popleft()
        if event is not None:
            event.synchronize()
        self._priorities.send(
            PriorityUpdate(
                sample.shard,
                sample.store_incarnation,
                sample.sampler,
                sample.number,
                sample.keys.copy(),
                td_errors.numpy(),
            )
        )
        self._samples.release(sample.slot)
