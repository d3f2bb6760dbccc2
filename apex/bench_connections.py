"""`apex bench connections`: as many actors as one replay server can be asked to bear, each on a connection of its own.

Real games are recorded once; then every connection sends their segments again and again, as fast as its window lets it,
to a real replay server. At the end the books must balance: every segment acknowledged, and as many transitions stored
as were sent, none lost and none twice. Fairness is the slowest connection against the fastest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from apex.bench_actor import read_config
from apex.bench_learner import record_games
from apex.bench_programs import Programs, address, map_stores, open_programs
from apex.bench_report import Line, print_rows
from apex.config import Config, require
from apex.environment import describe
from apex.experience_link import ExperienceLink
from apex.lifecycle import FAILED, FINISHED, POLL_SECONDS, Stop, stop_on_signals
from apex.ports import choose_ports, is_free
from apex.processes import ChildDiedError, check_children, start_child, stop_children
from apex.recording import Compressor, Recording
from apex.replay_timing import read_memory
from apex.run_folder import RunFolder
from apex.segments import Cut
from apex.session import Route, greet, read_welcome
from apex.sockets import open_context, split_address
from apex.store_layout import Store
from apex.transport import ExperienceSender, ReceiptReceiver
from apex.types import Stream
from apex.wire import Codec

CAPACITY = 200_000  # transitions: it wraps within seconds, so memory that grows shows
NUM_SENDERS = 2  # processes that the connections are spread over
DRAIN_SECONDS = 60.0  # for what is on its way when the time is up
LOOK_SECONDS = 1.0  # between two looks at the memory
LINES = [
    Line("connections", "connections, an actor each", "", digits=0, bar=128, stretch=256),
    Line("connections_transitions_per_s", "transitions stored", "/s", digits=0),
    Line("connections_fairness", "slowest connection against the fastest", "%", 100, 0, 80),
    Line("connections_lost", "transitions lost", "", digits=0, bar=0, less_is_better=True),
    Line("connections_twice", "transitions stored twice", "", digits=0, bar=0, less_is_better=True),
    Line("connections_pending", "segments never acknowledged", "", digits=0, bar=0, less_is_better=True),
    Line("connections_resent", "segments sent again", "", digits=0, less_is_better=True),
    Line(
        "connections_memory_growth", "replay's memory, last minute against first", "%", 100, 1, 1, less_is_better=True
    ),
]

Figures = dict[str, float]


class Sent(NamedTuple):
    """What one process has done."""

    transitions: list[int]  # of each of its connections
    pending: int  # segments that were not acknowledged
    resent: int  # segments


def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 1 if a transition was lost, or stored twice, or a segment never acknowledged."""
    parser = argparse.ArgumentParser(
        prog="apex bench connections",
        description="Sends from many connections at once. Other options are those of apex train.",
    )
    parser.add_argument("--connections", type=int, default=128, metavar="N", help="default 128")
    parser.add_argument("--minutes", type=float, default=10.0, metavar="M", help="default 10")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options, rest = parser.parse_known_args(argv)
    require(2 <= options.connections <= 4_096, f"--connections must be 2 ... 4096, got {options.connections}")
    require(options.minutes > 0, f"--minutes must be > 0, got {options.minutes}")
    config = read_config(rest, "apex bench connections")
    try:
        with stop_on_signals() as stop, tempfile.TemporaryDirectory(prefix="apex-bench-") as name:
            figures = measure(config, Path(name), options.connections, 60 * options.minutes, stop)
    except ChildDiedError as error:
        print(f"apex bench connections: {error}", file=sys.stderr)
        return FAILED
    print_rows(f"{config.environment.id}, {options.minutes:g} minutes", LINES, figures)
    if options.json:
        print(json.dumps(figures))
    unbalanced = any(figures[f"connections_{what}"] for what in ("lost", "twice", "pending"))
    return FAILED if unbalanced else FINISHED


def measure(config: Config, folder: Path, connections: int, seconds: float, stop: Stop) -> Figures:
    """All figures."""
    # Never trained from, never held up; nobody's lease ends, for the senders have no heartbeats.
    config = replace(
        config,
        actor=replace(config.actor, num_actors=connections),
        replay=replace(config.replay, capacity=CAPACITY, min_size_to_sample=CAPACITY, inserts_wait=False, num_shards=1),
        evaluator=replace(config.evaluator, enabled=False),
        checkpoint=replace(config.checkpoint, replay=False),
        transport=replace(config.transport, port_offset=7_000, lease_seconds=86_400.0),
        run=replace(config.run, folder=str(folder), name="bench-connections", tensorboard=False, stop_score=None),
    )
    schema = describe(config.environment, config.actor.n_step)
    recording = record_games(folder, config, schema, stop)
    config = choose_ports(config, is_free, lambda sentence: None)
    run = RunFolder.create(config, schema, argv=[])
    children, pipes = _start_senders(config, recording, connections)
    try:
        with open_programs(folder, stop) as programs:
            programs.start("learner", ["learner", "--run-folder", str(run.path)])
            server = programs.start("replay", ["replay", "--learner", address(config)])
            (store,) = programs.wait_for(lambda: map_stores(run), "replay memory")
            for pipe in pipes:
                programs.wait_for(pipe.poll, "sender")
                pipe.recv_bytes()
            for pipe in pipes:
                pipe.send_bytes(json.dumps(seconds).encode())
            began = time.monotonic()
            memory = _watch_memory(programs, server.pid, began + seconds)
            answers = []
            for pipe in pipes:
                while not pipe.poll(POLL_SECONDS):
                    programs.check()
                    check_children(children)
                answers.append(Sent(*json.loads(pipe.recv_bytes())))
            return _account(answers, store, memory, time.monotonic() - began)
    finally:
        stop_children(children)


def _start_senders(config: Config, recording: Recording, connections: int) -> tuple[list[Any], list[Connection]]:
    """Before this process has sockets. They wait for a learner, then say that they are ready, then for the word."""
    children, pipes = [], []
    for index in range(NUM_SENDERS):
        count = connections // NUM_SENDERS + (index < connections % NUM_SENDERS)
        ours, theirs = Pipe()
        children.append(start_child(f"sender-{index}", send, recording, address(config), count, theirs, ours))
        theirs.close()
        pipes.append(ours)
    return children, pipes


def _watch_memory(programs: Programs, pid: int, until: float) -> list[float]:
    """Bytes of the replay server's processes without the mapped file, now and then."""
    memory = []
    while time.monotonic() < until:
        programs.check()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        whole, shared = read_memory([pid, *map(int, children)])
        memory.append(float(whole - shared))
        time.sleep(min(LOOK_SECONDS, max(0.0, until - time.monotonic())))
    return memory


def _account(answers: Sequence[Sent], store: Store, memory: list[float], seconds: float) -> Figures:
    """Compares what was sent with what is stored."""
    transitions = [count for answer in answers for count in answer.transitions]
    sent, stored = sum(transitions), store.num_inserted
    tenth = max(1, len(memory) // 10)
    first, last = statistics.median(memory[tenth : 2 * tenth] or memory), statistics.median(memory[-tenth:])
    figures = {
        "connections": float(len(transitions)),
        "connections_transitions_per_s": stored / seconds,
        "connections_fairness": min(transitions) / max(1, max(transitions)),
        "connections_lost": float(max(0, sent - stored)),
        "connections_twice": float(max(0, stored - sent)),
        "connections_pending": float(sum(answer.pending for answer in answers)),
        "connections_resent": float(sum(answer.resent for answer in answers)),
        "connections_memory_bytes": last,
        "connections_memory_growth": last / first - 1,
        "connections_seconds": seconds,
    }
    return {name: float(f"{value:.9g}") for name, value in figures.items()}


# --- a process of connections -----------------------------------------------------------------------------------------


class Connected:
    """One actor's connection, which sends a recording's segments round and round, from a place of its own."""

    def __init__(self, link: ExperienceLink, cuts: Sequence[Cut], first: int) -> None:
        self._link = link
        self._cuts = cuts
        self._next = first
        self.num_transitions = 0

    @property
    def in_flight(self) -> int:
        """Segments that are not acknowledged."""
        return self._link.in_flight

    @property
    def num_resent(self) -> int:
        """Segments that were sent again."""
        return self._link.num_resent

    def pump(self) -> None:
        """Takes receipts; sends again what is overdue."""
        self._link.pump()

    def send(self) -> bool:
        """Sends the next segment; False while the window is full."""
        if self._link.blocked:
            return False
        cut = self._cuts[self._next % len(self._cuts)]
        self._next += 1
        self._link.send([cut], 0)
        self.num_transitions += len(cut.records)
        return True


def send(stop: Stop, recording: Recording, learner: str, count: int, pipe: Connection, bench_end: Connection) -> None:
    """The child's main function: `count` connections, each with its own sockets and stream."""
    bench_end.close()
    compressor = Compressor(recording)
    cuts = [Cut(0, recording.records_of(piece), compressor.image(piece)) for piece in range(len(recording.pieces))]
    host, port = split_address(learner, 0)
    answer = greet(Route(host, port), "actor", stop, num_streams=count, needs_replay=True)
    if not answer:
        return
    welcome = read_welcome(answer)
    require(len(welcome.streams) == count, f"{count} actor ids were asked for, but {len(welcome.streams)} are free")
    (replay,), window = welcome.replay, welcome.config.actor.window
    codec = Codec(welcome.run_id, welcome.schema)

    def connect(index: int, stream: Stream) -> Connected:
        sender = ExperienceSender(context, replay["experience"], num_messages=window)
        receipts = ReceiptReceiver(context, [replay["receipts"]], codec, [stream])
        return Connected(ExperienceLink([stream], codec, [sender], receipts, window=window), cuts, index)

    with open_context() as context:
        connections = [connect(index, stream) for index, stream in enumerate(welcome.streams)]
        pipe.send_bytes(b"ready")
        while not pipe.poll(POLL_SECONDS):
            if stop.requested:
                return
        seconds = json.loads(pipe.recv_bytes())
        sent = run(stop, connections, seconds)
        pipe.send_bytes(json.dumps(sent).encode())
        while not stop.requested:
            time.sleep(POLL_SECONDS)  # Sockets close when the books are done.


def run(stop: Stop, connections: Sequence[Connected], seconds: float) -> Sent:
    """Sends for so long, in turn, then waits until all is acknowledged."""
    end = time.monotonic() + seconds
    while not stop.requested and time.monotonic() < end:
        sent = False
        for connection in connections:
            connection.pump()
            sent |= connection.send()
        if not sent:
            time.sleep(0.001)
    while any(connection.in_flight for connection in connections) and time.monotonic() < end + DRAIN_SECONDS:
        for connection in connections:
            connection.pump()
        time.sleep(0.01)
    return Sent(
        [connection.num_transitions for connection in connections],
        sum(connection.in_flight for connection in connections),
        sum(connection.num_resent for connection in connections),
    )
