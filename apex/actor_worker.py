"""A worker process of an actor host: E environment streams, stepped together with one batched forward pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from apex.actor_host import WorkerFigures
from apex.config import Config
from apex.control_client import MetricsSender
from apex.environment import EnvironmentFailure, VectorEnvironment, make_environment
from apex.experience_link import ExperienceLink, Outlet, Receipts
from apex.exploration import epsilon_greedy, epsilon_ladder
from apex.key_folder import read_keys
from apex.lifecycle import POLL_SECONDS, Stop, Wait
from apex.machine import read_bfloat16
from apex.networks import load_parameters, make_network, q_values
from apex.parameter_board import ParameterBoard
from apex.scores import ScoreBoard
from apex.segments import SegmentBuilder
from apex.session import Welcome
from apex.sizing import is_wide
from apex.sockets import open_context
from apex.transport import ExperienceSender, ReceiptReceiver
from apex.types import Array, Parameters, Schema, Stream
from apex.wire import Codec

REPORT_SECONDS = 1.0  # between two reports of scores
FAREWELL_SECONDS = 0.5  # that a process which was told to end waits for its last receipts


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
        link: ExperienceLink,
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
        self.scores = ScoreBoard(streams, self._epsilon, num_actors)
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

    def end(self, timeout: float = FAREWELL_SECONDS) -> None:
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


class Task(NamedTuple):
    """What a worker process is given."""

    welcome: Welcome
    num_actors: int
    streams: list[Stream]
    board: ParameterBoard
    figures: WorkerFigures
    row: int


Connect = Callable[[Sequence[Outlet], Receipts], ExperienceLink]
Work = Callable[[Stop, Task], None]


def work(stop: Stop, task: Task, connect: Connect | None = None) -> None:
    """A worker process: explores until it is told to stop.

    `connect` makes the link to the replay shards of their sockets; if it is None, it is made of nothing else.
    """
    welcome, streams = task.welcome, task.streams
    config, schema = welcome.config, welcome.schema
    torch.set_num_threads(config.actor.num_threads)
    codec = Codec(welcome.run_id, schema)
    environment, rng = make_world(config, streams)
    connect = connect or partial(_connect, task, codec)
    with open_context(read_keys(config.transport.keys, "actor")) as context:
        actor = make_actor(
            config,
            schema,
            environment,
            streams,
            link=connect(
                [
                    ExperienceSender(context, shard["experience"], num_messages=len(streams) * config.actor.window)
                    for shard in welcome.replay
                ],
                ReceiptReceiver(context, [shard["receipts"] for shard in welcome.replay], codec, streams),
            ),
            parameters=task.board,
            num_actors=task.num_actors,
            rng=rng,
        )
        metrics = MetricsSender(context, welcome.endpoint("metrics"), codec)
        try:
            _explore(stop, actor, metrics, task.figures.rows[task.row])
        except EnvironmentFailure as failure:
            task.figures.leave_words(task.row, str(failure))
            raise
        finally:
            environment.close()


def make_world(config: Config, streams: Sequence[Stream]) -> tuple[VectorEnvironment, np.random.Generator]:
    """Environments and exploration of a process: by the seed, its lowest actor id and its life."""
    first = min(stream.actor_id for stream in streams)
    seeds = np.random.SeedSequence([config.seed, first, streams[0].incarnation])
    environment_seed, exploration_seed = seeds.spawn(2)
    environment = make_environment(
        config.environment, len(streams), seed=int(environment_seed.generate_state(1)[0]) % 2**31, num_threads=1
    )
    return environment, np.random.default_rng(exploration_seed)


def make_actor(
    config: Config,
    schema: Schema,
    environment: VectorEnvironment,
    streams: Sequence[Stream],
    *,
    link: ExperienceLink,
    parameters: NewestParameters,
    num_actors: int,
    rng: np.random.Generator,
) -> Actor:
    """The actor of a process on this host."""
    return Actor(
        config,
        environment,
        make_network(config.network, schema, seed=config.seed),
        streams,
        builder=SegmentBuilder.configured(config, schema, len(streams)),
        link=link,
        parameters=parameters,
        num_actors=num_actors,
        rng=rng,
        bfloat16=acts_in_bfloat16(config, schema, has_bfloat16=read_bfloat16()),
    )


def _connect(task: Task, codec: Codec, outlets: Sequence[Outlet], receipts: Receipts) -> ExperienceLink:
    return ExperienceLink(task.streams, codec, outlets, receipts, window=task.welcome.config.actor.window)


def acts_in_bfloat16(config: Config, schema: Schema, *, has_bfloat16: bool) -> bool:
    """Whether this host's actors compute in bfloat16. Each decides for itself: hosts may differ."""
    pays = has_bfloat16 and is_wide(config.network, schema)
    return config.actor.bfloat16 == "on" or (config.actor.bfloat16 == "auto" and pays)


def _explore(stop: Stop, actor: Actor, metrics: MetricsSender, figures: NDArray[np.float64]) -> None:
    actor.begin()
    report_at = time.monotonic() + REPORT_SECONDS
    while not stop.requested:
        began = time.monotonic()
        acted = actor.step()
        now = time.monotonic()
        figures[0] = actor.num_steps
        if not acted:
            figures[1] += now - began
            if not actor.num_steps:
                time.sleep(0.01)  # First parameters are on their way.
        if now >= report_at:
            report_at = now + REPORT_SECONDS
            scalars = actor.scores.take()
            if scalars:
                metrics.send({"role": "actor", "steps": None, "time": time.time(), "scalars": scalars})
    actor.end()
