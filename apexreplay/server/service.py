"""Serves one shard: runs its store, samplers, snapshot process and sockets until the run ends."""

import asyncio
import logging
import signal
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing import Pipe
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from apexreplay.errors import FINISHED, NEIGHBOUR_GONE, LostMemoryError, UnsavedMemoryError
from apexreplay.facts import Waiting
from apexreplay.process.children import check_children, start_child, stop_children
from apexreplay.process.lifecycle import POLL_SECONDS, Stop, Wait
from apexreplay.sampling.batch_drawer import DrawSettings
from apexreplay.sampling.sampler_counters import SamplerCounters
from apexreplay.server.open_store import open_store, reclaim
from apexreplay.server.sampler import SamplerReports, SamplerTask, run_sampler
from apexreplay.server.server import ReplayServer
from apexreplay.server.snapshot_process import SnapshotProcess
from apexreplay.snapshots.folder import SnapshotFolder
from apexreplay.snapshots.writer import SnapshotWriter
from apexreplay.store.layout import StoreSettings
from apexreplay.store.location import remove
from apexreplay.store.writer import StoreWriter
from apexreplay.transport.async_receiver import PULL, AsyncReceiver
from apexreplay.transport.curve.key_store import Keys
from apexreplay.transport.endpoints import ReceiptPublisher
from apexreplay.transport.sockets import Context, InsecureBindWarning, open_context
from apexreplay.transport.timing import RECEIPT_SECONDS
from apexreplay.types import Receipts
from apexreplay.wire.codec import MAX_INCARNATION, MAX_PRIORITIES, Codec
from apexreplay.wire.header import HEADER
from apexreplay.wire.status import ReplayStatus

MAX_REPEATS = 32  # messages of repeated receipts before other tasks have their turn
LIMITER_SECONDS = 0.005  # seconds between two checks whether inserts may continue
LINGER_SECONDS = 10.0  # maximum time after SIGTERM in which the server waits for the end of the run
LOST_SNAPSHOT_SECONDS = 120.0  # maximum seconds for a snapshot after the file of the memory was removed

log = logging.getLogger("apexreplay")


class ServerSettings(NamedTuple):
    """What the server of one shard needs to know."""

    codec: Codec  # of the run's messages; its checks decide which items are stored
    path: Path  # file of the store
    store: StoreSettings
    draw: DrawSettings
    num_rows: int  # rows of the counters: one per sampler process, then one per reader on this host
    batch_endpoints: list[str]  # address of each sampler process; []: readers on this host draw by themselves
    seed: int
    snapshots: SnapshotFolder | None  # from which the memory is restored and in which it is saved; None: no snapshots
    snapshot_seconds: float  # between two snapshots
    last_snapshot_seconds: float  # maximum time for the snapshot at the end
    endpoints: Mapping[str, str]  # addresses to bind, by name of the socket: experience, priorities, receipts
    max_segment_items: int
    max_segments: int  # unacknowledged segments of all streams of a connection
    max_segment_bytes: int
    read_keys: Callable[[], Keys | None]
    stuck_seconds: float  # without a heartbeat, after which a child process is killed; 0: never
    warning: InsecureBindWarning
    newest_incarnation: int = MAX_INCARNATION  # the highest that a stream can have at this start


class Link(Protocol):
    """The connection to the run that the server belongs to."""

    inserts_wanted: bool  # whether samplers of another shard wait for inserts
    finished: bool  # whether the run has ended
    lost: bool  # whether the run has another server for this shard

    @property
    def answers(self) -> bool:
        """Whether the other side answers at present."""

    def check(self) -> None:
        """Raises the exception that ended the connection, if any."""

    def close(self) -> None:
        """Ends the connection."""


Join = Callable[[Callable[[], ReplayStatus]], Link]  # called with a function when the sockets are bound


def serve(settings: ServerSettings, join: Join, stop: Stop) -> int:
    """Serves one shard until the run ends or `stop` is requested; returns the exit status.

    Raises UsageError if the memory cannot be created, ChildDiedError if a sampler or the snapshot process dies, and
    UnsavedMemoryError if there is no snapshot of the memory at the end.
    """
    path, table, run_id = settings.path, settings.codec.table, settings.codec.run_id
    reclaim(path, settings.store.sizes.file_bytes(table))
    store, counters = open_store(
        path, table, settings.store, settings.num_rows, run_id=run_id, snapshots=settings.snapshots
    )
    counters.rebase(store.num_inserted)
    counters.deactivate()  # Processes that were killed have left their rows.
    samplers, reports = _start_samplers(settings, store, counters)
    children = list(samplers)
    snapshot_process: SnapshotProcess | None = None
    draw = settings.draw
    if settings.snapshots is not None:
        is_queue = draw.selection.order == "queue"  # What may be taken back must not count as drawn after a restore.

        def num_drawn() -> int:
            return counters.num_given if is_queue else counters.num_drawn

        snapshotter = partial(SnapshotWriter, path, table, settings.snapshots, run_id=run_id, num_drawn=num_drawn)
        snapshot_process = SnapshotProcess(snapshotter, settings.snapshot_seconds)
        children.append(snapshot_process.process)
    queue = draw.selection if draw.selection.order == "queue" and draw.limiter.inserts_wait else None
    server = ReplayServer(
        store,
        settings.codec,
        counters,
        draw.limiter,
        shard=draw.shard,
        queue=queue,
        segment=(settings.max_segment_items, settings.max_segment_bytes),
        newest_incarnation=settings.newest_incarnation,
    )
    link: Link | None = None
    try:
        with _left_in_order(store, path, snapshot_process), open_context(settings.read_keys()) as context:
            sockets = ReplaySockets(context, settings, server)

            def status() -> ReplayStatus:
                refused, connections = reports.collect()
                return server.status(refused, connections + Counter(context.refused_connections))

            link = join(status)
            end = _lingering(stop, link)
            run_tasks(
                sockets.take_experience(end, link),
                sockets.take_priorities(end),
                sockets.repeat_receipts(end),
                _watch(settings, context, children, link, end),
            )
        if link.lost:
            return NEIGHBOUR_GONE
        if not link.finished:
            log.info("keeping the memory in %s for the next server", path)
            return FINISHED
        stop_children(samplers)  # What they sent during the last snapshot would be sent again after it.
        store.close()
        if snapshot_process is not None and (cause := snapshot_process.take_last(settings.last_snapshot_seconds)):
            raise UnsavedMemoryError(
                f"no last snapshot: {cause}", f"the next server on this host finds the memory {path}"
            )
        remove(path)
        return FINISHED
    finally:
        stop_children(children)
        if link is not None:
            link.close()


def _start_samplers(
    settings: ServerSettings, store: StoreWriter, counters: SamplerCounters
) -> tuple[list[BaseProcess], SamplerReports]:
    """Starts the sampler processes."""
    draw, endpoints = settings.draw, settings.batch_endpoints
    seeds = np.random.SeedSequence([settings.seed, store.num_inserted, draw.shard]).spawn(len(endpoints))
    task = SamplerTask(settings.codec, settings.path, counters, draw, settings.read_keys, endpoints)
    children, pipes = [], []
    for index, seed in enumerate(seeds):
        reader, writer = Pipe(duplex=False)
        children.append(start_child(f"sampler-{index}", run_sampler, index, task, seed, writer))
        writer.close()
        pipes.append(reader)
    return children, SamplerReports(pipes)


@contextmanager
def _left_in_order(store: StoreWriter, path: Path, snapshots: SnapshotProcess | None) -> Iterator[None]:
    """On an error: if the file of the memory was removed, takes a snapshot; if nothing was stored, removes the file."""
    try:
        yield
    except LostMemoryError:
        if snapshots is not None and not snapshots.take_last(LOST_SNAPSHOT_SECONDS):
            log.warning("saved all stored items in a snapshot; the next server restores it")
        else:
            log.error("no snapshot contains the newest items; the next server starts without them")
        raise
    except BaseException:
        if store.num_inserted == 0:
            store.close()
            remove(path)
        raise


class ReplaySockets:
    """The sockets for experience, priorities and receipts of one shard, with the tasks that serve them."""

    def __init__(self, context: Context, settings: ServerSettings, server: ReplayServer) -> None:
        """Binds the sockets; raises AddressError if an address cannot be bound."""
        self._server = server
        self._inserts_wait = settings.draw.limiter.inserts_wait
        self._experience = AsyncReceiver(
            context,
            PULL,
            settings.endpoints["experience"],
            "experience",
            high_water_mark=2 * settings.max_segments + 8,
            max_bytes=settings.max_segment_bytes,
            may_pause=True,
        )
        self._priorities = AsyncReceiver(
            context,
            PULL,
            settings.endpoints["priorities"],
            "priorities",
            high_water_mark=1_000,
            max_bytes=12 * MAX_PRIORITIES + HEADER.size,
        )
        self._receipts = ReceiptPublisher(context, settings.endpoints["receipts"], settings.codec)

    async def take_experience(self, stop: Stop, link: Link) -> None:
        """Stores segments and publishes receipts; waits while the rate limiter does not allow inserts."""
        wait = Wait("replay")
        while not stop.poll():
            messages = await self._experience.burst(POLL_SECONDS)
            # If inserts may wait, stores one segment at a time, so that a wait does not delay receipts of stored ones.
            step = 1 if self._inserts_wait else max(1, len(messages))
            for first in range(0, len(messages), step):
                while not self._server.check_limiter(inserts_wanted=link.inserts_wanted):
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
        """Publishes the receipts that are due again, every RECEIPT_SECONDS."""
        while not stop.poll():
            await asyncio.sleep(RECEIPT_SECONDS)
            for count, due in enumerate(self._server.receipts(), 1):
                self._publish([due])
                if count % MAX_REPEATS == 0:
                    await asyncio.sleep(0)

    def _publish(self, receipts: Sequence[Receipts]) -> None:
        for each in receipts:
            self._receipts.publish(each, self._server.shard)


def _lingering(stop: Stop, link: Link) -> Stop:
    """Returns a Stop that follows `stop`, but after SIGTERM later: once the run has ended or no longer answers.

    A scheduler may send SIGTERM to all programs of a run at once. The run then ends while the learner saves, and this
    server can still take a last snapshot.
    """
    until: float | None = None

    def look() -> None:
        nonlocal until
        if not stop.poll():
            return
        until = until or time.monotonic() + LINGER_SECONDS
        is_open = link.answers and not link.finished and not link.lost
        if stop.signum != signal.SIGTERM or not is_open or time.monotonic() > until:
            end.request()

    end = Stop(look)
    return end


async def _watch(
    settings: ServerSettings, context: Context, children: Sequence[BaseProcess], link: Link, stop: Stop
) -> None:
    """Watches the authenticator, the child processes and the link, and raises the error if one of them fails."""
    while not stop.poll():
        context.check()
        settings.warning.check()
        check_children(children, settings.stuck_seconds)
        link.check()
        await asyncio.sleep(POLL_SECONDS)


def run_tasks(*tasks: Coroutine[Any, Any, None]) -> None:
    """Runs all tasks until they return. If a task raises an exception, cancels the other tasks and raises it again."""

    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            for task in tasks:
                group.create_task(task)

    try:
        asyncio.run(run())
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from group  # The tasks raise no groups themselves.
