"""One acting loop: E environment streams, stepped together with one batched forward pass."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from apex.acting.episode_scores import EpisodeScores
from apex.acting.reliable_sender import ReliableSender
from apex.acting.segment_builder import SegmentBuilder
from apex.config import Config
from apex.dqn.exploration import epsilon_greedy, epsilon_ladder
from apex.dqn.networks import load_parameters, q_values
from apex.environments.interface import VectorEnvironment
from apex.runtime.lifecycle import POLL_SECONDS, Wait
from apex.types import Array, Parameters, Stream

DRAIN_SECONDS = 0.5  # that a process which was told to end waits for its last receipts


class NewestParameters(Protocol):
    """Where parameters come from."""

    def newer(self, known: int) -> tuple[int, Parameters] | None:
        """What was published after number `known`, with its number; None if nothing was."""


class Actor:
    """One process: E streams, stepped together."""

    def __init__(
        self,
        config: Config,
        environment: VectorEnvironment,
        network: torch.nn.Module,
        streams: Sequence[Stream],
        *,
        builder: SegmentBuilder,
        link: ReliableSender,
        parameters: NewestParameters,
        num_actors: int,
        rng: np.random.Generator,
        bfloat16: bool = False,
    ) -> None:
        """`bfloat16`: act by Q-values that are computed in it, where the processor multiplies it."""
        self._config = config.actor
        self._environment = environment
        self._network = network.eval()  # A user's may have layers that only train.
        self._builder = builder
        self._link = link
        self._parameters = parameters
        self._rng = rng
        ladder = epsilon_ladder(num_actors, config.actor.epsilon_base, config.actor.epsilon_exponent)
        self._epsilon = ladder[[stream.actor_id for stream in streams]]
        self.scores = EpisodeScores(streams, self._epsilon, num_actors)
        self._bfloat16 = bfloat16
        self._published = 0  # number of the newest parameters
        self._version = 0  # their version
        self._observation: Array | None = None
        self.num_steps = 0  # of each stream
        self.wait = Wait(f"actor {max(stream.actor_id for stream in streams)}")

    def begin(self) -> None:
        """Resets the environments."""
        self._observation = self._environment.reset()
        self._builder.begin(self._observation)

    def step(self, timeout: float = POLL_SECONDS) -> bool:
        """Steps all streams once. False if it had to wait instead: for first parameters, or for receipts."""
        if self.num_steps % self._config.parameters_period == 0 or not self._published:
            self._refresh()
        if not self._published:
            self.wait.on("the learner's first parameters")
            return False
        self._link.pump(timeout if self._link.blocked else 0.0)
        if self._link.blocked:
            self.wait.on("receipts from the replay server")
            return False
        self.wait.over()
        assert self._observation is not None
        q = q_values(self._network, self._observation, bfloat16=self._bfloat16)
        if self._builder.ready:
            self._link.send(self._builder.cut(q), self._version)
        action = epsilon_greedy(q, self._epsilon, self._rng)
        step = self._environment.step(action)
        cut_short = step.truncated & ~step.terminated
        final_q = q_values(self._network, step.final_observation, bfloat16=self._bfloat16) if cut_short.any() else None
        self._builder.append(action, q, step, final_q)
        self.scores.add(step)
        self._observation = step.observation
        self.num_steps += 1
        return True

    def end(self, timeout: float = DRAIN_SECONDS) -> None:
        """Sends what is complete, and waits up to `timeout` seconds until all is acknowledged."""
        if self._observation is None or not self._published:
            return
        q = q_values(self._network, self._observation, bfloat16=self._bfloat16)
        self._link.send(self._builder.cut(q), self._version)
        deadline = time.monotonic() + timeout
        while self._link.in_flight and time.monotonic() < deadline:
            self._link.pump(0.05)

    def _refresh(self) -> None:
        news = self._parameters.newer(self._published)
        if news is not None:
            self._published, parameters = news
            self._version = parameters.version
            load_parameters(self._network, parameters.values)
