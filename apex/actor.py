"""Actors: environment streams that explore with the newest parameters and send what they saw.

`apex actor --learner HOST` leases actor ids and runs one process per core; each steps E environments with one batched
forward pass. An actor, as in the paper, is one environment stream with one epsilon.
"""

from __future__ import annotations

import argparse
import logging
import mmap
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from apex.config import ActorConfig, Config, ConfigError
from apex.environment import VectorEnvironment, make_environment
from apex.experience_link import ExperienceLink, Outlet, Receipts
from apex.exploration import epsilon_greedy, epsilon_ladder
from apex.lifecycle import (
    FINISHED,
    NEIGHBOUR_GONE,
    POLL_SECONDS,
    REFUSED,
    Stop,
    Wait,
    configure_logging,
    stop_on_signals,
)
from apex.machine import read_machine
from apex.networks import load_parameters, make_network, q_values
from apex.parameter_board import ParameterBoard
from apex.processes import call_in_child, check_children, start_child, stop_children
from apex.segments import SegmentBuilder
from apex.session import Session, Welcome, greet, read_welcome
from apex.sizing import Machine
from apex.transport import (
    ExperienceSender,
    MetricsSender,
    ParameterSubscriber,
    ReceiptReceiver,
    open_context,
    split_address,
)
from apex.types import Array, Parameters, Step, Stream
from apex.wire import Codec

log = logging.getLogger("apex")

REPORT_SECONDS = 1.0  # between two reports of scores
FAREWELL_SECONDS = 0.5  # that a process which was told to end waits for its last receipts


class NewestParameters(Protocol):
    """Where parameters come from."""

    def newer(self, known: int) -> tuple[int, Parameters] | None:
        """What was published after number `known`, with its number; None if nothing was."""


class ScoreBoard:
    """Raw full-game scores, per actor: below the reward clip and the handling of lives."""

    def __init__(self, streams: Sequence[Stream], epsilons: NDArray[np.float64], num_actors: int) -> None:
        self._streams = streams
        self._epsilons = epsilons
        self._num_actors = num_actors
        self._score = np.zeros(len(streams))
        self._length = np.zeros(len(streams), np.int64)
        self._finished: dict[int, list[tuple[float, int]]] = {}
        self._num_episodes = 0

    def add(self, step: Step) -> None:
        """Counts one step; notes the games that it ended."""
        self._score += step.reward
        self._length += 1
        ended = step.terminated | step.truncated
        for stream in np.flatnonzero(ended).tolist():
            game = float(self._score[stream]), int(self._length[stream])
            self._finished.setdefault(stream, []).append(game)
            self._num_episodes += 1
        self._score[ended] = 0
        self._length[ended] = 0

    def take(self) -> dict[str, float]:
        """The means since the last call, by TensorBoard tag; empty if no game has ended."""
        scalars: dict[str, float] = {}
        for stream, games in sorted(self._finished.items()):
            score, length = np.mean(games, axis=0).tolist()
            actor_id = self._streams[stream].actor_id
            scalars[f"actors/score_{actor_id:04d}_epsilon_{self._epsilons[stream]:.5f}"] = score
            if actor_id == self._num_actors - 1:
                scalars |= {"actor_highest_id/score": score, "actor_highest_id/length": length}
        if scalars:
            every = [score for games in self._finished.values() for score, _ in games]
            scalars |= {"actors/mean_score": float(np.mean(every)), "actors/episodes": self._num_episodes}
        self._finished = {}
        return scalars


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
        self._network = network
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


class WorkerFigures:
    """What the worker processes tell their host: one row each of anonymous shared memory."""

    COLUMNS = ("num_steps", "wait_seconds", "waiting", "num_resent", "in_flight")

    def __init__(self, num_workers: int) -> None:
        """To be made before the fork."""
        memory = mmap.mmap(-1, 8 * num_workers * len(self.COLUMNS))
        self.rows = np.frombuffer(memory, np.float64).reshape(num_workers, len(self.COLUMNS))

    def total(self, column: str) -> float:
        """The sum over the workers."""
        return float(self.rows[:, self.COLUMNS.index(column)].sum())


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
    first = min(stream.actor_id for stream in streams)
    seeds = np.random.SeedSequence([config.seed, first, streams[0].incarnation])
    environment_seed, exploration_seed = seeds.spawn(2)
    environment = make_environment(
        config.environment, len(streams), seed=int(environment_seed.generate_state(1)[0]) % 2**31, num_threads=1
    )
    connect = connect or partial(_connect, task, codec)
    with open_context() as context:
        actor = Actor(
            config,
            environment,
            make_network(config.network, schema, seed=config.seed),
            streams,
            builder=SegmentBuilder(
                schema,
                num_streams=len(streams),
                gamma=config.actor.gamma,
                segment_length=config.actor.segment_length,
                clip_rewards=config.environment.clip_rewards,
                life_loss_terminates=config.environment.life_loss_terminates,
            ),
            link=connect(
                [
                    ExperienceSender(context, shard["experience"], num_messages=len(streams) * config.actor.window)
                    for shard in welcome.replay
                ],
                ReceiptReceiver(context, [shard["receipts"] for shard in welcome.replay], codec, streams),
            ),
            parameters=task.board,
            num_actors=task.num_actors,
            rng=np.random.default_rng(exploration_seed),
            bfloat16=acts_in_bfloat16(config.actor, read_machine()),
        )
        metrics = MetricsSender(context, welcome.endpoint("metrics"), codec)
        try:
            _explore(stop, actor, metrics, task.figures.rows[task.row])
        finally:
            environment.close()


def _connect(task: Task, codec: Codec, outlets: Sequence[Outlet], receipts: Receipts) -> ExperienceLink:
    return ExperienceLink(task.streams, codec, outlets, receipts, window=task.welcome.config.actor.window)


def acts_in_bfloat16(config: ActorConfig, machine: Machine) -> bool:
    """Whether this host's actors compute in bfloat16. Each decides for itself: hosts may differ."""
    return config.bfloat16 == "on" or (config.bfloat16 == "auto" and machine.cpu_bfloat16)


def _explore(stop: Stop, actor: Actor, metrics: MetricsSender, figures: NDArray[np.float64]) -> None:
    actor.begin()
    report_at = time.monotonic() + REPORT_SECONDS
    while not stop.requested:
        began = time.monotonic()
        acted = actor.step()
        now = time.monotonic()
        figures[0] = actor.num_steps
        figures[2] = not acted
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


class Host:
    """The process above the workers: heartbeats, leases, and the host's one copy of the parameters."""

    def __init__(self, welcome: Welcome, board: ParameterBoard, figures: WorkerFigures, sizes: Sequence[int]) -> None:
        self._welcome = welcome
        self._board = board
        self._figures = figures
        self._sizes = np.array(sizes)
        self._received = 0  # bytes of parameters, for all workers
        self._before = (time.monotonic(), 0.0, 0.0, 0)

    def status(self) -> dict[str, Any]:
        """What the heartbeats say; rates are over the time since the last one."""
        now = time.monotonic()
        steps = float((self._figures.rows[:, 0] * self._sizes).sum())
        waited = self._figures.total("wait_seconds")
        received = self._received
        then, steps_then, waited_then, received_then = self._before
        seconds = max(now - then, 1e-3)
        self._before = (now, steps, waited, received)
        share = min(1.0, (waited - waited_then) / seconds / len(self._sizes))
        rate = (steps - steps_then) / seconds
        return {
            "steps_per_second": rate,
            "rate": f"{rate:,.0f} steps/s",
            "wait_share": share,
            "waiting": "for receipts" if share > 0.5 and steps else "for parameters" if not steps else "",
            "num_steps": steps,
            "parameter_bytes_per_second": (received - received_then) / seconds,
        }

    def run(self, stop: Stop, check: Callable[[], None]) -> None:
        """Hands on the newest parameters until asked to stop."""
        welcome = self._welcome
        with open_context() as context:
            subscriber = ParameterSubscriber(
                context,
                welcome.endpoint("parameters"),
                Codec(welcome.run_id, welcome.schema),
                num_parameters=welcome.num_parameters,
            )
            while not stop.requested:
                parameters = subscriber.receive(POLL_SECONDS)
                if parameters is not None:
                    self._received += parameters.values.nbytes
                    self._board.publish(parameters)
                check()


def _join(stop: Stop, *, host: str, port: int, processes: int, envs: int) -> dict[str, Any]:
    """Says hello, learns how many streams this host takes, and leases them."""
    answer = greet(host, port, "actor", stop, needs_replay=True)
    if not answer:
        return {}
    actor = read_welcome(answer).config.actor
    num_streams = (processes or actor.num_processes or 1) * (envs or actor.envs_per_process or 1)
    return greet(host, port, "actor", stop, num_streams=num_streams, needs_replay=True)


def main(argv: Sequence[str] | None = None, work: Work = work) -> int:
    """`apex actor`: the composition root. `work` is what each of its worker processes does."""
    parser = argparse.ArgumentParser(prog="apex actor", description="Explores for the learner at HOST.")
    parser.add_argument("--learner", default="127.0.0.1", metavar="HOST[:PORT]", help="the learner's control address")
    parser.add_argument(
        "--processes", type=int, default=0, help="processes on this host; default: the learner's choice"
    )
    parser.add_argument("--envs", type=int, default=0, help="streams per process; default: the learner's choice")
    arguments = parser.parse_args(argv)
    configure_logging("actor")
    try:
        if arguments.processes < 0 or arguments.envs < 0:
            raise ConfigError("--processes and --envs must be >= 1 (or 0: the learner's choice)")
        host, port = split_address(arguments.learner, Config().transport.control_port)
        with stop_on_signals() as stop:
            join = partial(_join, host=host, port=port, processes=arguments.processes, envs=arguments.envs)
            answer = call_in_child("hello", lambda child_stop: join(child_stop), stop)
            return (
                _run(read_welcome(answer), int(answer["num_actors"]), arguments.envs, work, stop)
                if answer
                else FINISHED
            )
    except ConfigError as error:
        print(f"apex actor: {error}", file=sys.stderr)
        return REFUSED


def _run(welcome: Welcome, num_actors: int, envs: int, work: Work, stop: Stop) -> int:
    streams = welcome.streams
    size = envs or welcome.config.actor.envs_per_process or len(streams)
    blocks = [streams[i : i + size] for i in range(0, len(streams), size)]
    board = ParameterBoard(welcome.num_parameters)
    figures = WorkerFigures(len(blocks))
    log.info("actors %d to %d in %d processes", streams[-1].actor_id, streams[0].actor_id, len(blocks))
    children = [
        start_child(f"actor-{block[0].actor_id}", work, Task(welcome, num_actors, block, board, figures, row))
        for row, block in enumerate(blocks)
    ]
    session = None
    try:
        host = Host(welcome, board, figures, [len(block) for block in blocks])
        session = Session(welcome, "actor", stop, host.status)

        def check() -> None:
            check_children(children)
            session.check()

        host.run(stop, check)
        return NEIGHBOUR_GONE if session.lost else FINISHED
    finally:
        stop_children(children)
        if session is not None:
            session.close()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
