"""The replay service of a run: serves one shard with the settings of the learner's welcome."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from apex.config.addresses import REPLAY_SOCKETS
from apex.replay_memory.settings import batch_endpoints, counter_rows, draw_settings, store_settings
from apex.transport.curve.key_store import KEYS_REMEDY, read_keys
from apex.transport.heartbeat import Session
from apex.transport.hello import Welcome, host_name
from apex.transport.messages.control import WaitAnswer
from apex.transport.run_codec import RunCodec
from apex.types import Role
from apexreplay.errors import FINISHED, NEIGHBOUR_GONE, UnsavedMemoryError
from apexreplay.process.lifecycle import Stop
from apexreplay.server.service import ServerSettings, serve
from apexreplay.snapshots.folder import SnapshotFolder, shard_folder
from apexreplay.store import location
from apexreplay.store.location import memory_id, store_path
from apexreplay.transport.endpoints import max_segment_bytes
from apexreplay.transport.sockets import InsecureBindWarning, reachable_address
from apexreplay.wire.status import ReplayStatus

LAST_SNAPSHOT_SECONDS = 2.0  # maximum time for the snapshot at the end of a run; the learner waits for it

log = logging.getLogger("apex")


def run_service(welcome: Welcome, shard: int, advertise: str, snapshots: Path | None, stop: Stop) -> int:
    """Serves one shard until the run ends or `stop` is requested; returns the exit status.

    `snapshots` is the folder for snapshots and recovery; None disables both. Raises UsageError if the memory cannot be
    created, and ChildDiedError if a sampler or the snapshot process dies.
    """
    folder: SnapshotFolder | None = None
    if snapshots is not None and welcome.config.checkpoint.replay:
        own = shard_folder(snapshots, welcome.config.replay.num_shards, shard)
        folder = SnapshotFolder(own, steps=lambda step: stop.tick())  # Restoring a snapshot can take minutes.

    sessions: list[Session] = []

    def join(status: Callable[[], ReplayStatus]) -> Session:
        sessions.append(_join(welcome, shard, status, advertise, stop))
        return sessions[-1]

    try:
        ended = serve(_settings(welcome, shard, folder), join, stop)
    except UnsavedMemoryError as error:
        log.warning("%s", error)
        ended = FINISHED
    return NEIGHBOUR_GONE if ended == FINISHED and any(session.interrupted for session in sessions) else ended


def _settings(welcome: Welcome, shard: int, snapshots: SnapshotFolder | None) -> ServerSettings:
    """Returns the settings of one shard. There are no samplers if the learner draws from the shared memory."""
    config, transport = welcome.config, welcome.config.transport
    length = welcome.schema.sequence_length
    most = config.actor.segment_length + max(config.actor.n_step, length)  # items of one segment
    is_shared = transport.shared_memory and welcome.memory == memory_id()
    return ServerSettings(
        codec=RunCodec(welcome.run_id, welcome.schema),
        path=store_path(welcome.run_id, shard),
        store=store_settings(config.replay, config.actor.num_actors),
        draw=draw_settings(config.replay, shard, config.learner.batch_size),
        num_rows=counter_rows(config.replay, config.learner),
        batch_endpoints=[] if is_shared else batch_endpoints(config, shard),
        seed=config.seed,
        snapshots=snapshots,
        snapshot_seconds=config.checkpoint.replay_period,
        last_snapshot_seconds=LAST_SNAPSHOT_SECONDS,
        endpoints={name: transport.endpoint(name, index=shard) for name in REPLAY_SOCKETS},
        max_segment_items=most,
        max_segments=config.actor.send_window * config.actor.num_actors,
        max_segment_bytes=max_segment_bytes(welcome.schema.table, most if length else config.actor.segment_length),
        read_keys=partial(read_keys, transport.keys, Role.REPLAY),
        stuck_seconds=config.run.stuck_seconds,
        warning=InsecureBindWarning(transport.insecure_address, KEYS_REMEDY),
    )


def _join(welcome: Welcome, shard: int, status: Callable[[], ReplayStatus], advertise: str, stop: Stop) -> Session:
    """Reports this shard's addresses to the learner and starts to send heartbeats with the shard's status."""
    transport = welcome.config.transport
    host = advertise or reachable_address("" if transport.binds_to_all else transport.bind, welcome.route.host)
    endpoints = {name: transport.endpoint(name, host, shard) for name in REPLAY_SOCKETS}
    session = Session(welcome, Role.REPLAY, stop, status, endpoints, shard)
    log.info("ready: %s", ", ".join(endpoints.values()))
    return session


def predecessor_is_dead(shard: int, answer: WaitAnswer) -> bool:
    """Returns whether the previous replay server of this shard ran on this host, died and left its memory.

    `answer`: the learner's answer that the shard already has a replay server.
    """
    path = location.store_path(answer.run_id, shard)
    left = path.exists() or location.beside(path).exists()
    return answer.host == host_name() and left and not location.has_owner(path)
