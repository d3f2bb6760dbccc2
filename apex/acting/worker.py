"""A worker process of an actor host: steps E environment streams together with one batched forward pass."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from apex.acting.actor import ActingPolicy, Actor
from apex.acting.host import WorkerReports
from apex.acting.segment_builder import SegmentBuilder
from apex.acting.sequence_builder import SequenceBuilder
from apex.acting.shared_parameters import SharedParameters
from apex.algorithms.interface import make_algorithm
from apex.config import Config
from apex.config.algorithm_choice import is_wide
from apex.environments.factory import make_environment
from apex.environments.interface import VectorEnvironment
from apex.runtime.hardware import read_bfloat16
from apex.runtime.seeding import seed_generators
from apex.schema import Schema
from apex.transport.curve.key_store import read_keys
from apex.transport.hello import Welcome
from apex.transport.run_codec import RunCodec
from apex.transport.timing import REPORT_SECONDS
from apex.types import Role
from apexreplay.client.reliable_sender import Outlet, Receipts, ReliableSender
from apexreplay.process.child_setup import lower_priority
from apexreplay.process.lifecycle import Stop
from apexreplay.transport.endpoints import ExperienceSender, ReceiptReceiver
from apexreplay.transport.sockets import open_context
from apexreplay.types import Stream

NICENESS = 10  # if inserts wait for samples: the learner is then the bottleneck, and needs the CPU time more


class WorkerTask(NamedTuple):
    """The arguments of a worker process."""

    welcome: Welcome
    streams: Sequence[Stream]
    shared: SharedParameters
    reports: WorkerReports
    number: int  # number of the worker


Connect = Callable[[Sequence[Outlet], Receipts], ReliableSender]
Work = Callable[[Stop, WorkerTask], None]


def run_worker(stop: Stop, task: WorkerTask, connect: Connect | None = None) -> None:
    """Runs a worker process: acts until `stop` is requested. `connect` creates the sender; None: ReliableSender."""
    welcome, streams = task.welcome, task.streams
    config, schema = welcome.config, welcome.schema
    torch.set_num_threads(config.actor.num_threads)
    # All workers are forked with the same state of these generators.
    seed_generators(config.seed, streams[0].actor_id, streams[0].incarnation)
    codec = RunCodec(welcome.run_id, schema)
    environment, rng = make_environments(config, streams)
    window, shards = config.actor.send_window, welcome.replay
    connect = connect or partial(ReliableSender, streams, codec, window=window)
    with open_context(read_keys(config.transport.keys, Role.ACTOR)) as context:
        most = len(streams) * window
        outlets = [ExperienceSender(context, shard["experience"], num_messages=most) for shard in shards]
        receipts = ReceiptReceiver(context, [shard["receipts"] for shard in shards], codec, streams)
        link = connect(outlets, receipts)
        actor = make_actor(config, schema, environment, streams, link=link, parameters=task.shared, rng=rng)
        try:
            explore(stop, actor, task.reports, task.number, niceness=NICENESS if config.replay.inserts_wait else 0)
        finally:
            environment.close()


def make_environments(config: Config, streams: Sequence[Stream]) -> tuple[VectorEnvironment, np.random.Generator]:
    """Creates a process's environments and random generator, seeded by run seed, lowest actor id and incarnation."""
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
    link: ReliableSender,
    parameters: SharedParameters,
    rng: np.random.Generator,
) -> Actor:
    """Creates the actor of a process."""
    algorithm = make_algorithm(config, schema)
    bfloat16 = acts_in_bfloat16(config, schema, has_bfloat16=read_bfloat16())
    return Actor(
        config.actor,
        environment,
        ActingPolicy(algorithm.make_agent(algorithm.make_network(), bfloat16=bfloat16), parameters),
        streams,
        algorithm.exploration(config.actor.num_actors),
        builder=make_builder(config, schema, len(streams)),
        link=link,
        rng=rng,
    )


def make_builder(config: Config, schema: Schema, num_streams: int) -> SegmentBuilder:
    """Returns the builder of the items that the schema has: sequences, or transitions."""
    if schema.sequence_length:
        return SequenceBuilder(config, schema, num_streams)
    rescaled = config.network.value_rescaling
    return SegmentBuilder(config.actor, config.environment, schema, num_streams, rescaled=rescaled)


def acts_in_bfloat16(config: Config, schema: Schema, *, has_bfloat16: bool) -> bool:
    """Returns whether the actors of this host compute in bfloat16. This depends on the CPU of the host."""
    if schema.action_size:  # Policies of continuous actions compute in float32.
        return False
    pays = has_bfloat16 and is_wide(config.network, schema)
    return config.actor.bfloat16 == "on" or (config.actor.bfloat16 == "auto" and pays)


def explore(stop: Stop, actor: Actor, reports: WorkerReports, worker: int, niceness: int = 0) -> None:
    """Acts until `stop` is requested. Reports scores once a second and at the end; `worker`: number of this worker.

    Until the actor first waits for receipts, it is the bottleneck of the run. From then on, it has the `niceness`.
    """
    actor.begin()
    figures, report_at = reports.figures[worker], time.monotonic() + REPORT_SECONDS
    while not stop.poll():
        began = time.monotonic()
        acted = actor.step()
        now = time.monotonic()
        figures[0] = actor.num_steps
        if not acted:
            figures[1] += now - began
            if not actor.num_steps:
                time.sleep(0.01)  # The first parameters have not arrived yet.
            elif niceness:
                lower_priority(niceness)
                niceness = 0
        if now >= report_at:
            report_at = now + REPORT_SECONDS
            _report_scores(actor, reports, worker)
    _report_scores(actor, reports, worker)
    actor.end()


def _report_scores(actor: Actor, reports: WorkerReports, worker: int) -> None:
    while (scores := actor.scores.take()) is not None:
        if not reports.send_scores(worker, scores):
            actor.scores.add(scores)
            return
