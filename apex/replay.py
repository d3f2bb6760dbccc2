"""The replay server: one writer with asyncio and ZeroMQ, K samplers that read shared memory without locks.

`apex replay --learner HOST` keeps the newest transitions in a file in tmpfs that all its processes map. The writer owns
every write: inserts and priorities. No other process of ours waits for it, and it waits for none. There are
replay.num_shards of these servers, each with its --shard of the streams and of the memory.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from apex.async_receiver import PULL, AsyncReceiver
from apex.config import REPLAY_SOCKETS, ConfigError
from apex.copyist import Copyist
from apex.header import Frame, WireError
from apex.key_folder import read_keys
from apex.lifecycle import (
    FAILED,
    FINISHED,
    NEIGHBOUR_GONE,
    POLL_SECONDS,
    REFUSED,
    Stop,
    Wait,
    complain,
    configure_logging,
    stop_on_signals,
)
from apex.peers import Peers
from apex.priority_histogram import PriorityHistogram
from apex.processes import ChildDiedError, call_in_child, check_children, start_child, stop_children
from apex.rate_limiter import RateLimiter
from apex.sampler import SamplerBoard, SamplerTask, board_rows, make_limiter, sample
from apex.session import Session, Welcome, add_route_options, greet, read_route, read_welcome
from apex.snapshot import Snapshotter
from apex.snapshot_folder import SnapshotFolder
from apex.snapshot_restore import restore
from apex.sockets import OpenDoorWarning, local_address, open_context
from apex.store_admission import Outcome
from apex.store_layout import board_path, is_same_run, is_wanted, memory_id, remove, store_path
from apex.store_writer import StoreWriter
from apex.transport import ReceiptPublisher, max_segment_bytes
from apex.types import Receipt
from apex.wire import Codec

log = logging.getLogger("apex")

RECEIPT_SECONDS = 0.2  # between two receipts of a stream that lives: a SUB may have missed one
STREAM_LIFE_SECONDS = 60.0  # a stream that was not heard for so long gets no more of them
LIMITER_SECONDS = 0.005  # between two looks whether inserts may go on


class ReplayServer:
    """The writer: stores segments, applies priorities, owes receipts."""

    def __init__(
        self,
        store: StoreWriter,
        codec: Codec,
        board: SamplerBoard,
        limiter: RateLimiter,
        *,
        shard: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.shard = shard
        self._store = store
        self._codec = codec
        self._board = board
        self._limiter = limiter
        self._clock = clock
        self._heard: dict[int, float] = {}  # when a stream was heard last
        self.peers = {"experience": Peers(clock), "priorities": Peers(clock)}  # of the sockets that others send to
        self._refused: Counter[str] = Counter()
        self._histogram = PriorityHistogram(store, clock=clock)
        self._before = (clock(), store.num_inserted, 0, time.process_time())
        self.may_insert = True
        self.inserts_wanted = False  # samplers of another shard wait for inserts: none may wait here
        self.refused_connections: dict[str, int] = {}  # by door and reason

    def insert(self, messages: Sequence[Sequence[Frame]]) -> list[Receipt]:
        """Stores segments; returns a receipt for each stream that was heard."""
        owed = set()
        for frames in messages:
            try:
                segment = self._codec.decode_segment(frames, self.shard)
                outcome = self._store.insert(segment)
            except WireError as error:
                self._refuse("experience", frames, error.reason)
            except ValueError as error:
                self._refuse("experience", frames, "store")
                log.warning("refused: %s", error)
            else:
                if outcome is Outcome.UNKNOWN_ACTOR:
                    self.peers["experience"].blame(frames, outcome)  # The store has counted it.
                else:
                    owed.add(segment.stream.actor_id)
        self._heard.update(dict.fromkeys(owed, self._clock()))
        return [self._store.receipt(actor_id) for actor_id in sorted(owed)]

    def update_priorities(self, messages: Sequence[Sequence[Frame]]) -> None:
        """Applies new priorities, and with them the credit of the samplers."""
        for frames in messages:
            try:
                update = self._codec.decode_priorities(frames, self.shard)
            except WireError as error:
                self._refuse("priorities", frames, error.reason)
                continue
            self._store.update_priorities(update)
            if update.store_incarnation == self._store.store_incarnation:
                self._board.acknowledge(update.sampler, update.number)

    def _refuse(self, door: str, frames: Sequence[Frame], reason: str) -> None:
        self._refused[reason] += 1
        self.peers[door].blame(frames, reason)

    def receipts(self) -> list[Receipt]:
        """Receipts of all streams that live, to be repeated: a SUB may have missed one."""
        now = self._clock()
        self._heard = {actor_id: at for actor_id, at in self._heard.items() if now - at < STREAM_LIFE_SECONDS}
        return [self._store.receipt(actor_id) for actor_id in sorted(self._heard)]

    def check_limiter(self) -> bool:
        """Whether inserts may go on; False only with replay.inserts_wait."""
        keeps_ratio = self._board.limit(self._limiter).may_insert(self._store.num_inserted, self._board.num_drawn)
        self.may_insert = keeps_ratio or self.inserts_wanted
        return self.may_insert

    def status(self) -> dict[str, Any]:
        """What the heartbeats say; rates are over the time since the last one."""
        store, board, now = self._store, self._board, self._clock()
        inserted, drawn = store.num_inserted, board.num_drawn
        worked = time.process_time()
        then, inserted_then, drawn_then, worked_then = self._before
        seconds = max(now - then, 1e-3)
        self._before = (now, inserted, drawn, worked)
        counters = store.counters
        inserts, samples = (inserted - inserted_then) / seconds, (drawn - drawn_then) / seconds
        return {
            "num_inserted": inserted,
            "num_drawn": drawn,
            "store_incarnation": str(store.store_incarnation),
            "size": store.size,
            "bytes": store.bytes_used,
            "max_bytes": store.max_bytes,
            "inserts_per_second": inserts,
            "samples_per_second": samples,
            "busy_share": min(1.0, (worked - worked_then) / seconds),  # of the writer: what it waits takes no time
            "stale_priorities": counters.stale_priorities,
            "duplicate_segments": counters.duplicates,
            "refused": sum(self._refused.values()) + sum(counters.refused.values()),
            "refusals": {**self._refused, **counters.refused},
            "refused_connections": self.refused_connections,
            "ignored_messages": sum(peers.num_ignored for peers in self.peers.values()),
            "ignored_peers": sum(peers.forgive() for peers in self.peers.values()),
            "samplers_wait_for": board.waits_for,
            "inserts_wait": not self.may_insert,
            "rate": f"{inserts:,.0f} in/s, {samples:,.0f} out/s",
            "waiting": f"for {board.waits_for}" if board.waits_for else "",
            "priority_histogram": self._histogram.newest(),
        }


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
            warning = OpenDoorWarning(transport)
            while not stop.requested:
                await asyncio.sleep(POLL_SECONDS)
                context.check()
                server.refused_connections = context.refused_connections
                warning.check()

        async with asyncio.TaskGroup() as tasks:
            for work in (take_experience, take_priorities, repeat_receipts, watch_doors):
                tasks.create_task(work())


def open_store(
    path: Path, welcome: Welcome, snapshots: SnapshotFolder | None = None
) -> tuple[StoreWriter, SamplerBoard]:
    """Goes on with the run's store if it is there, else with its newest snapshot, else makes a new one.

    With it comes the board of those who draw from it.
    """
    config, schema, replay = welcome.config, welcome.schema, welcome.config.replay.per_shard()
    sizes: dict[str, Any] = {
        "capacity": replay.capacity,
        "max_bytes": replay.max_bytes,
        "num_streams": config.actor.num_actors,
        "priority_exponent": replay.priority_exponent,
        "min_priority": replay.min_priority,
    }
    if path.exists():
        store = StoreWriter.attach(path, schema, **sizes)
        log.info("goes on with %s: %d transitions", path, store.size)
        return store, SamplerBoard(board_rows(config), board_path(path))
    board_path(path).unlink(missing_ok=True)  # It counted what was drawn from another store.
    sizes["store_incarnation"] = secrets.randbits(62) + 1
    log.info("reserving %.1f GB in %s, and filling it if there is a snapshot", replay.max_bytes / 1e9, path)
    restored = restore(snapshots, path, schema, run_id=welcome.run_id, **sizes) if snapshots is not None else None
    store = StoreWriter.create(path, schema, **sizes) if restored is None else restored.store
    board = SamplerBoard(board_rows(config), board_path(path))
    if restored is not None:
        board.go_on_from(restored.num_drawn)  # Else the limiter would see samples to catch up with.
        log.info("restored %s: %d transitions, %d in all", path, store.size, store.num_inserted)
    else:
        log.info("made %s", path)
    return store, board


def reclaim(own: Path) -> None:
    """Removes what other runs have left in memory that crashed; where an owner or a learner beside it lives, it stays.

    The run's own shards stay too: the server of each goes on with what is there.
    """
    for path in own.parent.glob("apex-*.replay"):
        if not is_same_run(path, own) and not is_wanted(path):
            try:
                remove(path)
            except ConfigError:
                continue
            log.info("removed %s, which a run that ended badly had left", path)
    for board in own.parent.glob("apex-*.board"):
        store = board.with_suffix(".replay")
        if not store.exists() and not is_same_run(store, own) and not is_wanted(store):
            board.unlink(missing_ok=True)


def main(argv: Sequence[str] | None = None) -> int:
    """`apex replay`: the composition root."""
    parser = argparse.ArgumentParser(prog="apex replay", description="Keeps experience for the learner at HOST.")
    add_route_options(parser)
    parser.add_argument(
        "--shard", type=int, default=0, metavar="I", help="which of replay.num_shards, 0 ... R-1; default 0"
    )
    parser.add_argument(
        "--bind", default="", metavar="ADDRESS", help="interface to listen on; default: the learner's choice"
    )
    parser.add_argument(
        "--advertise", default="", metavar="HOST", help="how the others reach this host; default: found out"
    )
    parser.add_argument(
        "--snapshots", type=Path, metavar="DIR", help="folder for snapshots of the memory, and to go on from; else none"
    )
    arguments = parser.parse_args(argv)
    configure_logging("replay")
    try:
        route = read_route(arguments)
        with stop_on_signals() as stop:
            answer = call_in_child("hello", partial(greet, route, "replay", shard=arguments.shard), stop)
            if not answer:
                return FINISHED
            if arguments.bind:
                answer["config"]["transport"]["bind"] = arguments.bind
            return _run(read_welcome(answer), arguments.shard, arguments.advertise, arguments.snapshots, stop)
    except ChildDiedError as error:
        log.error("%s", error)
        return FAILED
    except ConfigError as error:
        complain(f"apex replay: {error}")
        return REFUSED


def _run(welcome: Welcome, shard: int, advertise: str, snapshots: Path | None, stop: Stop) -> int:
    config = welcome.config
    path = store_path(welcome.run_id, shard)
    reclaim(path)
    folder: SnapshotFolder | None = None
    if snapshots is not None and config.checkpoint.replay:
        own = snapshots if config.replay.num_shards == 1 else snapshots / f"shard-{shard}"
        folder = SnapshotFolder(own, pause=lambda step: stop.turn())  # To restore a large memory takes minutes.
    store, board = open_store(path, welcome, folder)
    board.rebase(store.num_inserted)
    limiter = make_limiter(config)
    # A learner that sees the same memory draws for itself.
    beside_the_learner = config.transport.shared_memory and welcome.memory == memory_id()
    seeds = np.random.SeedSequence([config.seed, store.num_inserted, shard]).spawn(config.replay.num_samplers)
    tasks = [SamplerTask(config, welcome.schema, welcome.run_id, shard, path, board, limiter, seed) for seed in seeds]
    children = [
        start_child(f"sampler-{index}", sample, index, task, welcome.endpoint("batches"))
        for index, task in enumerate(tasks if not beside_the_learner else [])
    ]
    copyist: Copyist | None = None
    if folder is not None:
        snapshotter = partial(
            Snapshotter, path, welcome.schema, folder, run_id=welcome.run_id, num_drawn=lambda: board.num_drawn
        )
        copyist = Copyist(snapshotter, config.checkpoint.replay_period)
        children.append(copyist.process)
    server = ReplayServer(store, Codec(welcome.run_id, welcome.schema), board, limiter, shard=shard)
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
        if copyist is not None and not copyist.take_last():
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


if __name__ == "__main__":
    sys.exit(main())
