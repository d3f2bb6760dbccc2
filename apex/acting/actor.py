"""One acting loop: E environment streams, stepped together with one batched forward pass."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from apex.acting.episode_scores import EpisodeScores
from apex.acting.reliable_sender import ReliableSender
from apex.acting.segment_builder import SegmentBuilder
from apex.config import ActorConfig
from apex.dqn.exploration import epsilon_greedy, epsilon_ladder
from apex.dqn.networks import load_parameters, q_values
from apex.environments.interface import VectorEnvironment
from apex.runtime.lifecycle import POLL_SECONDS, Wait
from apex.transport.timing import DRAIN_SECONDS
from apex.types import Array, Parameters, Stream


class NewestParameters(Protocol):
    """Where parameters come from."""

    def newer(self, known: int) -> tuple[int, Parameters] | None:
        """What was published after number `known`, with its number; None if nothing was."""


class ActingPolicy:
    """A network with the newest parameters that were published."""

    def __init__(self, network: torch.nn.Module, parameters: NewestParameters, *, bfloat16: bool = False) -> None:
        """`bfloat16`: compute Q-values in it, where the processor multiplies it."""
        self._network = network.eval()  # A user's may have layers that only train.
        self._parameters = parameters
        self._bfloat16 = bfloat16
        self._published = 0  # number of the newest parameters
        self.version = 0  # their version

    @property
    def ready(self) -> bool:
        """Whether parameters have come."""
        return self._published > 0

    def refresh(self) -> None:
        """Loads newer parameters, if there are any."""
        news = self._parameters.newer(self._published)
        if news is not None:
            self._published, parameters = news
            self.version = parameters.version
            load_parameters(self._network, parameters.values)

    def q_values(self, observation: Array) -> NDArray[np.float32]:
        """Q of every action, float32[E, A]."""
        return q_values(self._network, observation, bfloat16=self._bfloat16)


class Actor:
    """One process: E streams, stepped together."""

    def __init__(
        self,
        config: ActorConfig,
        environment: VectorEnvironment,
        policy: ActingPolicy,
        streams: Sequence[Stream],
        *,
        builder: SegmentBuilder,
        link: ReliableSender,
        rng: np.random.Generator,
    ) -> None:
        self._parameters_period = config.parameters_period
        self._environment = environment
        self._policy = policy
        self._builder = builder
        self._link = link
        self._rng = rng
        ladder = epsilon_ladder(config.num_actors, config.epsilon_base, config.epsilon_exponent)
        self._epsilon = ladder[[stream.actor_id for stream in streams]]
        self.scores = EpisodeScores(streams, self._epsilon, config.num_actors)
        self._observation: Array | None = None
        self.num_steps = 0  # of each stream
        self.wait = Wait(f"actor {max(stream.actor_id for stream in streams)}")

    def begin(self) -> None:
        """Resets the environments."""
        self._observation = self._environment.reset()
        self._builder.begin(self._observation)

    def step(self, timeout: float = POLL_SECONDS) -> bool:
        """Steps all streams once. False if it had to wait instead: for first parameters, or for receipts."""
        policy = self._policy
        if self.num_steps % self._parameters_period == 0 or not policy.ready:
            policy.refresh()
        if not policy.ready:
            self.wait.on("the learner's first parameters")
            return False
        self._link.pump(timeout if self._link.blocked else 0.0)
        if self._link.blocked:
            self.wait.on("receipts from the replay server")
            return False
        self.wait.over()
        assert self._observation is not None
        q = policy.q_values(self._observation)
        if self._builder.ready:
            self._link.send(self._builder.cut(q), policy.version)
        action = epsilon_greedy(q, self._epsilon, self._rng)
        step = self._environment.step(action)
        cut_short = step.truncated & ~step.terminated
        final_q = policy.q_values(step.final_observation) if cut_short.any() else None
        self._builder.append(action, q, step, final_q)
        self.scores.add(step)
        self._observation = step.observation
        self.num_steps += 1
        return True

    def end(self, timeout: float = DRAIN_SECONDS) -> None:
        """Sends what is complete, and waits up to `timeout` seconds until all is acknowledged."""
        if self._observation is None or not self._policy.ready:
            return
        q = self._policy.q_values(self._observation)
        self._link.send(self._builder.cut(q), self._policy.version)
        deadline = time.monotonic() + timeout
        while self._link.in_flight and time.monotonic() < deadline:
            self._link.pump(0.05)
