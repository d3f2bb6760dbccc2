"""The acting loop: steps E environment streams together with one batched forward pass."""

import time
from collections.abc import Sequence

import numpy as np

from apex.acting.segment_builder import SegmentBuilder
from apex.acting.shared_parameters import SharedParameters
from apex.algorithms.interface import Agent, Mask, check_allowed, forget
from apex.algorithms.parameters import load_parameters
from apex.config import ActorConfig
from apex.environments.interface import VectorEnvironment
from apex.transport.messages.results import ActorScores, MetricSum, Scores, ScoreSums
from apex.transport.timing import DRAIN_SECONDS
from apex.types import Exploration, Step
from apexreplay.client.reliable_sender import ReliableSender
from apexreplay.facts import Waiting
from apexreplay.item_kinds import Array
from apexreplay.process.lifecycle import POLL_SECONDS, Wait
from apexreplay.types import Stream


class ActingPolicy:
    """An agent with the newest published parameters."""

    def __init__(self, agent: Agent, parameters: SharedParameters) -> None:
        self.agent = agent
        self._parameters = parameters
        self._published = 0  # number of the loaded parameters; 0: none
        self.version = 0  # version of the loaded parameters

    @property
    def ready(self) -> bool:
        """Whether parameters have been loaded."""
        return self._published > 0

    def refresh(self) -> None:
        """Loads newer parameters, if there are any."""
        news = self._parameters.newer(self._published)
        if news is not None:
            self._published, parameters = news
            self.version = parameters.version
            load_parameters(self.agent.network, parameters.values)


class EpisodeScores(ScoreSums):
    """Scores of full games per actor: sums of unclipped rewards. A lost life does not end a game. Also sums metrics."""

    def __init__(self, streams: Sequence[Stream]) -> None:
        super().__init__()
        self._streams = streams
        self._score = np.zeros(len(streams))
        self._length = np.zeros(len(streams), np.int64)

    def add_step(self, step: Step) -> None:
        """Adds one step of all streams. A game that a fault of the environment ended has no score."""
        self._score += step.reward
        self._length += 1
        finished = step.terminated | step.truncated
        ended = step.over
        if ended.any():
            games = [
                ActorScores(self._streams[i].actor_id, 1, float(self._score[i]), int(self._length[i]))
                for i in np.flatnonzero(finished).tolist()
            ]
            self.add(Scores(games, 0 if step.failed is None else int(step.failed.sum())))
            for metrics in step.metrics.values():
                self.add(Scores([], 0, {name: MetricSum(1, value) for name, value in metrics.items()}))
            self._score[ended] = 0
            self._length[ended] = 0


class Actor:
    """The actor of one process: steps E streams together."""

    def __init__(
        self,
        config: ActorConfig,
        environment: VectorEnvironment,
        policy: ActingPolicy,
        streams: Sequence[Stream],
        exploration: Exploration,
        *,
        builder: SegmentBuilder,
        link: ReliableSender,
        rng: np.random.Generator,
    ) -> None:
        """`exploration`: the amounts of all N actors, from `Algorithm.exploration`."""
        self._parameters_period = config.parameters_period
        self._environment = environment
        self._policy = policy
        self._builder = builder
        self._link = link
        self._rng = rng
        self._exploration = exploration.amounts[[stream.actor_id for stream in streams]]
        self.scores = EpisodeScores(streams)
        self._observation: Array | None = None
        self._mask: Mask = None
        self._acted_version = 0  # version of the parameters that chose the last actions
        self.num_steps = 0  # steps of each stream
        self.wait = Wait(f"actor {max(stream.actor_id for stream in streams)}")

    def begin(self) -> None:
        """Resets the environments."""
        self._observation = self._environment.reset()
        self._mask = self._environment.action_mask
        self._builder.begin(self._observation)

    def step(self, timeout: float = POLL_SECONDS) -> bool:
        """Steps all streams once; returns False if it only waited, for the first parameters or for receipts."""
        policy, agent = self._policy, self._policy.agent
        if self.num_steps % self._parameters_period == 0 or not policy.ready:
            policy.refresh()
        if not policy.ready:
            self.wait.on(Waiting("parameters"))
            return False
        waited = self._link.blocked
        self._link.pump(timeout if waited else 0.0)
        if self._link.blocked:
            self.wait.on(Waiting("receipts"))
            return False
        if waited:  # The learner has made updates meanwhile.
            policy.refresh()
        self.wait.over()
        assert self._observation is not None
        state = getattr(agent, "state", None)
        decision = agent.decide(self._observation, self._mask, self._exploration, self._rng)
        check_allowed(decision.action, self._mask)
        if self._builder.ready:
            self._link.send(self._builder.cut(decision.state_value), self._acted_version)
        self._acted_version = policy.version
        step = self._environment.step(decision.action)
        cut_short = step.truncated & ~step.terminated
        final_value = agent.state_value(step.final_observation, step.final_mask) if cut_short.any() else None
        played = decision.action if step.played is None else step.played
        self._builder.append(played, decision.value(played), decision.state_value, step, final_value, state)
        self.scores.add_step(step)
        forget(agent, step.over)
        self._observation, self._mask = step.observation, step.action_mask
        self.num_steps += 1
        return True

    def end(self, timeout: float = DRAIN_SECONDS) -> None:
        """Sends the complete transitions, and waits up to `timeout` seconds for all acknowledgements."""
        if self._observation is None or not self._policy.ready:
            return
        state_value = self._policy.agent.state_value(self._observation, self._mask)
        self._link.send(self._builder.cut(state_value), self._acted_version)
        deadline = time.monotonic() + timeout
        while self._link.in_flight and time.monotonic() < deadline:
            self._link.pump(0.05)
