"""The replay service: store, samplers, snapshot process and sockets of one shard, until the run ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np

from apex.config import REPLAY_SOCKETS
from apex.replay_memory.recovery import open_store, reclaim
from apex.replay_memory.sampler import make_limiter
from apex.replay_memory.sampler_process import SamplerTask, run_sampler
from apex.replay_memory.server import ReplayServer
from apex.replay_memory.snapshots.folder import SnapshotFolder
from apex.replay_memory.snapshots.process import SnapshotProcess
from apex.replay_memory.snapshots.writer import SnapshotWriter
from apex.replay_memory.store.location import memory_id, remove, store_path
from apex.runtime.children import check_children, start_child, stop_children
from apex.runtime.lifecycle import (
    FINISHED,
    NEIGHBOUR_GONE,
    POLL_SECONDS,
    Stop,
    Wait,
)
from apex.transport.async_receiver import PULL, AsyncReceiver
from apex.transport.codec import Codec
from apex.transport.curve.key_store import read_keys
from apex.transport.endpoints import ReceiptPublisher, max_segment_bytes
from apex.transport.heartbeat import Session
from apex.transport.hello import Welcome
from apex.transport.sockets import InsecureBindWarning, local_address, open_context

log = logging.getLogger("apex")


RECEIPT_SECONDS = 0.2  # between two receipts of a stream that lives: a SUB may have missed one
LIMITER_SECONDS = 0.005  # between two looks whether inserts may go on


async def serve(server: ReplayServer, welcome: Welcome, stop: Stop, bound: Callable[[], None]) -> None:
    """Moves messages between the sockets and the server; `bound` is called when all are bound."""
    transport, schema, shard = welcome.config.transport, welcome.schema, server.shard
    codec = Codec(welcome.run_id, schema)
    num_messages = 2 * welcome.config.actor.window * welcome.config.actor.num_actors + 8
    with open_context(read_keys(transport.keys, "replay")) as context:
        experience = AsyncReceiver(
            context,
            PULL,
            transport.endpoint("experience", shard=shard),
            "experience",
            high_water_mark=num_messages,
            max_bytes=max_segment_bytes(schema, welcome.config.actor.segment_length),
            peers=server.peers["experience"],
        )
        priorities = AsyncReceiver(
            context,
            PULL,
            transport.endpoint("priorities", shard=shard),
            "priorities",
            high_water_mark=1_000,
            max_bytes=12 * welcome.config.part_size + 1_024,
            peers=server.peers["priorities"],
        )
        publisher = ReceiptPublisher(context, transport.endpoint("receipts", shard=shard), codec)
        bound()

        async def take_experience() -> None:
            wait = Wait("replay")
            while not stop.requested:
                messages = await experience.burst(POLL_SECONDS)
                # The limiter is asked before each segment: a whole burst would leave actors without receipts for long.
                step = 1 if welcome.config.replay.inserts_wait else len(messages)
                for first in range(0, len(messages), max(1, step)):
                    while not server.check_limiter():
                        if stop.requested:
                            return
                        wait.on("the learner to take samples: replay.inserts_wait")
                        await asyncio.sleep(LIMITER_SECONDS)
                    wait.over()
                    for receipt in server.insert(messages[first : first + step]):
                        publisher.publish(receipt, shard)

        async def take_priorities() -> None:
            while not stop.requested:
                server.update_priorities(await priorities.burst(POLL_SECONDS))

        async def repeat_receipts() -> None:
            while not stop.requested:
                await asyncio.sleep(RECEIPT_SECONDS)
                for receipt in server.receipts():
                    publisher.publish(receipt, shard)

        async def watch_doors() -> None:
            warning = InsecureBindWarning(transport)
            while not stop.requested:
                await asyncio.sleep(POLL_SECONDS)
                context.check()
                server.refused_connections = context.refused_connections
                warning.check()

        async with asyncio.TaskGroup() as tasks:
            for work in (take_experience, take_priorities, repeat_receipts, watch_doors):
                tasks.create_task(work())


def run_service(welcome: Welcome, shard: int, advertise: str, snapshots: Path | None, stop: Stop) -> int:
    """Serves one shard until the run ends or `stop` is requested; returns the exit status.

    `snapshots` is the folder for snapshots and recovery; None: neither. Raises ConfigError when the memory cannot be
    made, and ChildDiedError when a sampler or the snapshot process dies.
    """
    config = welcome.config
    path = store_path(welcome.run_id, shard)
    reclaim(path)
    folder: SnapshotFolder | None = None
    if snapshots is not None and config.checkpoint.replay:
        own = snapshots if config.replay.num_shards == 1 else snapshots / f"shard-{shard}"
        folder = SnapshotFolder(own, pause=lambda step: stop.tick())  # To restore a large memory takes minutes.
    store, counters = open_store(path, welcome, folder)
    counters.rebase(store.num_inserted)
    limiter = make_limiter(config)
    # A learner that sees the same memory draws for itself.
    beside_the_learner = config.transport.shared_memory and welcome.memory == memory_id()
    seeds = np.random.SeedSequence([config.seed, store.num_inserted, shard]).spawn(config.replay.num_samplers)
    tasks = [
        SamplerTask(config, welcome.schema, welcome.run_id, shard, path, counters, limiter, seed) for seed in seeds
    ]
    children = [
        start_child(f"sampler-{index}", run_sampler, index, task, welcome.endpoint("batches"))
        for index, task in enumerate(tasks if not beside_the_learner else [])
    ]
    snapshot_process: SnapshotProcess | None = None
    if folder is not None:
        snapshotter = partial(
            SnapshotWriter, path, welcome.schema, folder, run_id=welcome.run_id, num_drawn=lambda: counters.num_drawn
        )
        snapshot_process = SnapshotProcess(snapshotter, config.checkpoint.replay_period)
        children.append(snapshot_process.process)
    server = ReplayServer(store, Codec(welcome.run_id, welcome.schema), counters, limiter, shard=shard)
    host = advertise or (config.transport.bind if config.transport.is_loopback else local_address(welcome.host))
    endpoints = {name: config.transport.endpoint(name, host, shard) for name in REPLAY_SOCKETS}
    sessions: list[Session] = []
    try:
        try:
            asyncio.run(_serve_and_watch(server, welcome, endpoints, children, sessions, stop))
        except BaseExceptionGroup as group:
            if store.num_inserted == 0:
                store.close()
                remove(path)  # It never held anything.
            raise _first(group) from group
        if sessions[0].lost:
            return NEIGHBOUR_GONE
        if not sessions[0].finished:
            log.info("the memory stays in %s: the run goes on, and so does the next replay server of it", path)
            return FINISHED
        store.close()
        if snapshot_process is not None and not snapshot_process.take_last():
            log.warning("the last snapshot was not ready in time: the memory stays in %s until it is resumed", path)
            return FINISHED
        remove(path)
        return FINISHED
    finally:
        stop_children(children)
        for session in sessions:
            session.close()


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first cause among the exceptions of several tasks."""
    cause = group.exceptions[0]
    return _first(cause) if isinstance(cause, BaseExceptionGroup) else cause


async def _serve_and_watch(
    server: ReplayServer,
    welcome: Welcome,
    endpoints: dict[str, str],
    children: Sequence[BaseProcess],
    sessions: list[Session],
    stop: Stop,
) -> None:
    def bound() -> None:
        sessions.append(Session(welcome, "replay", stop, server.status, endpoints, server.shard))
        log.info("ready: %s", ", ".join(endpoints.values()))

    async def watch() -> None:
        while not stop.requested:
            await asyncio.sleep(POLL_SECONDS)
            check_children(children, welcome.config.run.stuck_seconds)
            for session in sessions:
                session.check()
                server.inserts_wanted = session.inserts_wanted

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(serve(server, welcome, stop, bound))
        tasks.create_task(watch())
