"""The actor service of one host: leases actor ids and runs the worker processes."""

import logging

from apex.acting.host import ActorHost, WorkerReports
from apex.acting.shared_parameters import SharedParameters
from apex.acting.worker import Work, WorkerTask, acts_in_bfloat16
from apex.environments.foreign import require_trust
from apex.runtime.hardware import read_bfloat16, read_machine
from apex.sentences import plural
from apex.transport.curve.key_store import read_keys
from apex.transport.endpoints import ParameterSubscriber
from apex.transport.heartbeat import Session
from apex.transport.hello import Route, Welcome, greet
from apex.transport.run_codec import RunCodec
from apex.types import Role
from apexreplay.errors import FINISHED, NEIGHBOUR_GONE
from apexreplay.process.children import check_children, start_child, stop_children
from apexreplay.process.lifecycle import Stop
from apexreplay.transport.sockets import open_context

log = logging.getLogger("apex")


def join(stop: Stop, *, route: Route, processes: int, envs: int) -> Welcome | None:
    """Joins the run, computes this host's number of streams, and leases that many; returns None if stopped."""
    welcome = greet(route, Role.ACTOR, stop, needs_replay=True)
    if welcome is None:
        return None
    if welcome.shards > len(welcome.replay):
        advice = "the run's actors use so many cores that %d replay servers are useful, not %d; use --replay.num-shards"
        log.warning(advice, welcome.shards, len(welcome.replay))
    actor = welcome.config.actor
    own_cores = read_machine().cores if welcome.config.run.head else 1
    num_streams = (processes or actor.num_processes or own_cores) * (envs or actor.envs_per_process or 1)
    return greet(route, Role.ACTOR, stop, num_streams=num_streams, needs_replay=True)


def run_service(welcome: Welcome, envs: int, work: Work, stop: Stop) -> int | None:
    """Runs one worker process per `envs` leased streams (0: as configured) until the run ends; returns the exit status.

    Returns None if a replay server has moved, so that this host must join again. Raises ChildDiedError if a worker
    dies.
    """
    require_trust(welcome.config, given=bool(welcome.route.keys))
    streams = welcome.streams
    size = envs or welcome.config.actor.envs_per_process or len(streams)
    blocks = [streams[i : i + size] for i in range(0, len(streams), size)]
    shared = SharedParameters(welcome.num_parameters)
    reports = WorkerReports(len(blocks))
    log.info("actors %d to %d in %s", streams[-1].actor_id, streams[0].actor_id, plural(len(blocks), "process"))
    children = [
        start_child(f"actor-{block[0].actor_id}", work, WorkerTask(welcome, block, shared, reports, row))
        for row, block in enumerate(blocks)
    ]
    session = None
    try:
        host = ActorHost(shared, reports, [len(block) for block in blocks])
        session = Session(welcome, Role.ACTOR, stop, host.status, take_scores=host.take_scores)

        def check() -> None:
            check_children(children, welcome.config.run.stuck_seconds)
            session.check()

        with open_context(read_keys(welcome.config.transport.keys, Role.ACTOR)) as context:
            endpoint, codec = welcome.endpoint("parameters"), RunCodec(welcome.run_id, welcome.schema)
            bfloat16 = acts_in_bfloat16(welcome.config, welcome.schema, has_bfloat16=read_bfloat16())
            subscriber = ParameterSubscriber(
                context, endpoint, codec, num_parameters=welcome.num_parameters, bfloat16=bfloat16
            )
            host.run(subscriber, stop, check)
        if session.moved and not session.finished:
            return None
        return NEIGHBOUR_GONE if session.lost or session.interrupted else FINISHED
    finally:
        stop_children(children)
        if session is not None:
            session.close()  # Sends the workers' last scores.
        reports.close()
