"""The replay service: runs the store, samplers, snapshot process and sockets of one shard until the run ends."""

import asyncio
import logging
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from apex.config.addresses import REPLAY_SOCKETS
from apex.replay_memory.batch_drawer import DrawSettings
from apex.replay_memory.open_store import open_store, reclaim, store_settings
from apex.replay_memory.sampler import SamplerTask, run_sampler
from apex.replay_memory.sampler_counters import SamplerCounters
from apex.replay_memory.server import ReplayServer
from apex.replay_memory.snapshot_process import SnapshotProcess
from apex.transport.curve.key_store import KEYS_REMEDY, read_keys
from apex.transport.heartbeat import Session
from apex.transport.hello import Welcome
from apex.transport.messages.status import ReplayStatus
from apex.types import Role
from apexreplay.errors import FINISHED, NEIGHBOUR_GONE, LostMemoryError
from apexreplay.facts import Waiting
from apexreplay.process.children import check_children, start_child, stop_children
from apexreplay.process.lifecycle import POLL_SECONDS, Stop, Wait
from apexreplay.snapshots.folder import SnapshotFolder, shard_folder
from apexreplay.snapshots.writer import SnapshotWriter
from apexreplay.store.location import memory_id, remove, store_path
from apexreplay.store.writer import StoreWriter
from apexreplay.transport.async_receiver import PULL, AsyncReceiver
from apexreplay.transport.endpoints import ReceiptPublisher, max_segment_bytes
from apexreplay.transport.sockets import Context, InsecureBindWarning, open_context, reachable_address
from apexreplay.transport.timing import RECEIPT_SECONDS
from apexreplay.types import Receipt
from apexreplay.wire.codec import Codec

LIMITER_SECONDS = 0.005  # seconds between two checks whether inserts may continue
LOST_SNAPSHOT_SECONDS = 120.0  # maximum seconds for a snapshot after the file of the memory was removed

log = logging.getLogger("apex")


def run_service(welcome: Welcome, shard: int, advertise: str, snapshots: Path | None, stop: Stop) -> int:
    """Serves one shard until the run ends or `stop` is requested; returns the exit status.

    `snapshots` is the folder for snapshots and recovery; None disables both. Raises UsageError if the memory cannot be
    created, and ChildDiedError if a sampler or the snapshot process dies.
    """
    config = welcome.config
    path = store_path(welcome.run_id, shard)
    reclaim(path, store_settings(config.replay, config.actor.num_actors).sizes.file_bytes(welcome.schema))
    folder: SnapshotFolder | None = None
    if snapshots is not None and config.checkpoint.replay:
        own = shard_folder(snapshots, config.replay.num_shards, shard)
        folder = SnapshotFolder(own, steps=lambda step: stop.tick())  # Restoring a snapshot can take minutes.
    store, counters = open_store(path, welcome, folder)
    counters.rebase(store.num_inserted)
    settings = DrawSettings.configured(config.replay, shard, config.learner.batch_size)
    children = _start_samplers(welcome, path, store, counters, settings)
    snapshot_process: SnapshotProcess | None = None
    if folder is not None:
        snapshotter = partial(
            SnapshotWriter, path, welcome.schema, folder, run_id=welcome.run_id, num_drawn=lambda: counters.num_drawn
        )
        snapshot_process = SnapshotProcess(snapshotter, config.checkpoint.replay_period)
        children.append(snapshot_process.process)
    server = ReplayServer(store, Codec(welcome.run_id, welcome.schema), counters, settings.limiter, shard=shard)
    session: Session | None = None
    try:
        with (
            _left_in_order(store, path, snapshot_process),
            open_context(read_keys(config.transport.keys, Role.REPLAY)) as context,
        ):
            sockets = ReplaySockets(context, welcome, server)
            session = _join(welcome, server, context, advertise, stop)
            _run_tasks(
                sockets.take_experience(stop, session),
                sockets.take_priorities(stop),
                sockets.repeat_receipts(stop),
                _watch(welcome, context, children, session, stop),
            )
        if session.lost:
            return NEIGHBOUR_GONE
        if not session.finished:
            log.info("keeping the memory in %s for the run's next replay server", path)
            return FINISHED
        store.close()
        if snapshot_process is not None and (cause := snapshot_process.take_last()):
            log.warning("no last snapshot (%s); keeping the memory in %s until the run is resumed", cause, path)
            return FINISHED
        remove(path)
        return FINISHED
    finally:
        stop_children(children)
        if session is not None:
            session.close()


def _start_samplers(
    welcome: Welcome, path: Path, store: StoreWriter, counters: SamplerCounters, settings: DrawSettings
) -> list[BaseProcess]:
    """Starts the sampler processes; none if the learner draws directly from the shared memory."""
    config = welcome.config
    if config.transport.shared_memory and welcome.memory == memory_id():
        return []
    seeds = np.random.SeedSequence([config.seed, store.num_inserted, settings.shard]).spawn(config.replay.num_samplers)
    loaders = range(max(1, config.learner.num_loaders))
    endpoints = [config.transport.endpoint("batches", welcome.route.host, loader) for loader in loaders]
    task = SamplerTask(welcome.schema, welcome.run_id, path, counters, settings, config.transport.keys, endpoints)
    return [start_child(f"sampler-{index}", run_sampler, index, task, seed) for index, seed in enumerate(seeds)]


@contextmanager
def _left_in_order(store: StoreWriter, path: Path, snapshots: SnapshotProcess | None) -> Iterator[None]:
    """On an error: if the file of the memory was removed, takes a snapshot; if nothing was stored, removes the file."""
    try:
        yield
    except LostMemoryError:
        if snapshots is not None and not snapshots.take_last(LOST_SNAPSHOT_SECONDS):
            log.warning("saved all stored transitions in a snapshot; the next replay server restores it")
        else:
            log.error("no snapshot contains the newest transitions; the next replay server starts without them")
        raise
    except BaseException:
        if store.num_inserted == 0:
            store.close()
            remove(path)
        raise


def _join(welcome: Welcome, server: ReplayServer, context: Context, advertise: str, stop: Stop) -> Session:
    """Reports this shard's addresses to the learner and starts to send heartbeats with the shard's status."""
    transport = welcome.config.transport
    host = advertise or reachable_address("" if transport.binds_to_all else transport.bind, welcome.route.host)
    endpoints = {name: transport.endpoint(name, host, server.shard) for name in REPLAY_SOCKETS}

    def status() -> ReplayStatus:
        return replace(server.status(), refused_connections=context.refused_connections)

    session = Session(welcome, Role.REPLAY, stop, status, endpoints, server.shard)
    log.info("ready: %s", ", ".join(endpoints.values()))
    return session


class ReplaySockets:
    """The sockets for experience, priorities and receipts of one shard, with the tasks that serve them."""

    def __init__(self, context: Context, welcome: Welcome, server: ReplayServer) -> None:
        """Binds the sockets; raises AddressError if an address cannot be bound."""
        config, schema = welcome.config, welcome.schema
        self._server = server
        self._inserts_wait = config.replay.inserts_wait
        self._experience = AsyncReceiver(
            context,
            PULL,
            config.transport.endpoint("experience", index=server.shard),
            "experience",
            high_water_mark=2 * config.actor.window * config.actor.num_actors + 8,
            max_bytes=max_segment_bytes(schema, config.actor.segment_length),
            may_pause=True,
        )
        self._priorities = AsyncReceiver(
            context,
            PULL,
            config.transport.endpoint("priorities", index=server.shard),
            "priorities",
            high_water_mark=1_000,
            max_bytes=12 * config.part_size + 1_024,
        )
        endpoint = config.transport.endpoint("receipts", index=server.shard)
        self._receipts = ReceiptPublisher(context, endpoint, Codec(welcome.run_id, schema))

    async def take_experience(self, stop: Stop, session: Session) -> None:
        """Stores segments and publishes receipts; waits while the rate limiter does not allow inserts."""
        wait = Wait("replay")
        while not stop.poll():
            messages = await self._experience.burst(POLL_SECONDS)
            # If inserts may wait, stores one segment at a time, so that a wait does not delay receipts of stored ones.
            step = 1 if self._inserts_wait else max(1, len(messages))
            for first in range(0, len(messages), step):
                while not self._server.check_limiter(inserts_wanted=session.inserts_wanted):
                    if stop.poll():
                        return
                    wait.on(Waiting("samples"))
                    await asyncio.sleep(LIMITER_SECONDS)
                wait.over()
                self._publish(self._server.insert(messages[first : first + step]))

    async def take_priorities(self, stop: Stop) -> None:
        """Applies new priorities until `stop`."""
        while not stop.poll():
            self._server.update_priorities(await self._priorities.burst(POLL_SECONDS))

    async def repeat_receipts(self, stop: Stop) -> None:
        """Publishes the receipts of all active streams every RECEIPT_SECONDS."""
        while not stop.poll():
            await asyncio.sleep(RECEIPT_SECONDS)
            self._publish(self._server.receipts())

    def _publish(self, receipts: list[Receipt]) -> None:
        for receipt in receipts:
            self._receipts.publish(receipt, self._server.shard)


async def _watch(
    welcome: Welcome, context: Context, children: Sequence[BaseProcess], session: Session, stop: Stop
) -> None:
    """Watches the authenticator, the child processes and the heartbeats, and raises the error if one of them fails."""
    warning = InsecureBindWarning(welcome.config.transport.insecure_address, KEYS_REMEDY)
    while not stop.poll():
        await asyncio.sleep(POLL_SECONDS)
        context.check()
        warning.check()
        check_children(children, welcome.config.run.stuck_seconds)
        session.check()


def _run_tasks(*tasks: Coroutine[Any, Any, None]) -> None:
    """Runs all tasks until they return. If a task raises an exception, cancels the other tasks and raises it again."""

    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            for task in tasks:
                group.create_task(task)

    try:
        asyncio.run(run())
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from group  # The tasks raise no groups themselves.
