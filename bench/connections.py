"""`python -m bench connections`: many actors send to one replay server, each over its own connection.

Games are recorded once. Then every connection sends their segments repeatedly, as fast as its window permits, to a real
replay server. At the end every segment must be acknowledged, and every transition stored exactly once. Fairness is the
rate of the slowest connection divided by that of the fastest. Memory growth compares the median of the last minute with
that of the first; in runs of less than two minutes, the last tenth with the second tenth.
"""

import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from msgspec import Meta

from apex.config import Config
from apex.config.arguments import positive_float, value_of
from apex.config.role_command import role_command
from apex.environments.factory import describe
from apex.runs.folder import RunFolder
from apex.runtime.ports import choose_ports, is_free
from apex.transport.hello import Route, greet, split_address
from apex.transport.run_codec import RunCodec
from apex.types import Role
from apexreplay.client.reliable_sender import ReliableSender
from apexreplay.errors import require
from apexreplay.process.children import check_children, start_child, stop_children
from apexreplay.process.lifecycle import POLL_SECONDS, Stop
from apexreplay.store.file import open_file
from apexreplay.store.location import store_path
from apexreplay.transport.endpoints import ExperienceSender, ReceiptReceiver
from apexreplay.transport.sockets import open_context
from apexreplay.types import Cut, Stream
from bench.harness.command import Figures, make_parser, read_config, record_games, run_bench
from bench.harness.programs import Programs, control_address, map_stores, open_programs
from bench.harness.recording import Compressor, Recording
from bench.harness.report import ReportRow, print_rows
from bench.harness.segment_ledger import MOST_ACTORS, SegmentLedger, tag
from bench.replay_steps import read_memory

CAPACITY = 200_000  # transitions; the memory wraps within seconds, so that growth becomes visible
NUM_SENDERS = 2  # processes that share the connections
NUM_FRAMES = 20_000  # distinct frames that are recorded
DRAIN_SECONDS = 60.0  # time for the last acknowledgements after the measurement
# interval between two counts; at a million inserts per second, transitions would be overwritten uncounted
LOOK_SECONDS = 0.1
MEMORY_SECONDS = 1.0  # interval between two readings of the memory
LINES = [
    ReportRow("connections", "connections, each of one actor", "", digits=0, bar=128, stretch=256),
    ReportRow("connections_transitions_per_s", "transitions stored", "/s", digits=0),
    ReportRow("connections_fairness", "slowest connection relative to the fastest", "%", 100, 0, 80),
    ReportRow("connections_lost", "transitions lost", "", digits=0, bar=0, less_is_better=True),
    ReportRow("connections_twice", "transitions stored twice", "", digits=0, bar=0, less_is_better=True),
    ReportRow("connections_pending", "segments never acknowledged", "", digits=0, bar=0, less_is_better=True),
    ReportRow("connections_resent", "segments sent again", "", digits=0, less_is_better=True),
    ReportRow(
        "connections_memory_growth",
        "memory of replay, end relative to beginning",
        "%",
        100,
        1,
        1,
        less_is_better=True,
    ),
]


class Sent(NamedTuple):
    """Result of one process."""

    actors: list[int]  # actor ids, one for each connection
    segments: list[int]  # segments sent by each connection
    pending: int  # segments that were not acknowledged
    resent: int  # segments that were sent again


def main(argv: Sequence[str]) -> int:
    """Measures; returns status 1 if a transition was lost or stored twice, or a segment was not acknowledged."""
    parser = make_parser(
        "connections", "Sends segments over many connections at once. Other options are those of apex train."
    )
    count = value_of(Annotated[int, Meta(ge=2, le=MOST_ACTORS)])
    parser.add_argument("--connections", type=count, default=128, metavar="N", help="default 128")
    parser.add_argument("--minutes", type=positive_float, default=10.0, metavar="M", help="default 10")
    options, rest = parser.parse_known_args(argv)
    number = options.connections
    config = read_config(rest, parser.prog)
    return run_bench(
        lambda folder, stop: measure(config, folder, number, 60 * options.minutes, stop),
        lambda figures: print_rows(f"{config.environment.id}, {options.minutes:g} minutes", LINES, figures),
        as_json=options.json,
        passed=lambda figures: not any(figures[f"connections_{what}"] for what in ("lost", "twice", "pending")),
    )


def measure(config: Config, folder: Path, connections: int, seconds: float, stop: Stop) -> Figures:
    """All figures."""
    # The learner never trains and inserts never wait. Leases do not expire, because the senders send no heartbeats.
    config = replace(
        config,
        actor=replace(config.actor, num_actors=connections),
        replay=replace(config.replay, capacity=CAPACITY, min_size_to_sample=CAPACITY, inserts_wait=False, num_shards=1),
        evaluator=replace(config.evaluator, enabled=False),
        checkpoint=replace(config.checkpoint, replay=False),
        transport=replace(config.transport, port_offset=8_000, lease_seconds=86_400.0),
        run=replace(config.run, folder=str(folder), name="bench-connections", tensorboard=False, stop_score=None),
    )
    schema = describe(config.environment, config.actor.n_step)
    recording = record_games(folder / "recording", config, schema, NUM_FRAMES, stop)
    config = choose_ports(config, is_free, lambda sentence: None)
    run = RunFolder.create(config, schema, argv=[])
    children, pipes = _start_senders(config, recording, connections)
    try:
        with open_programs(folder, stop) as programs:
            programs.start("learner", role_command(Role.LEARNER, run_folder=run.path))
            server = programs.start("replay", role_command(Role.REPLAY, learner=control_address(config)))
            programs.wait_for(lambda: map_stores(run), "replay memory")
            ledger = SegmentLedger(open_file(store_path(run.run_id), schema.table, writable=False))
            for pipe in pipes:
                programs.wait_for(pipe.poll, "sender")
                pipe.recv_bytes()
            for pipe in pipes:
                pipe.send_bytes(json.dumps(seconds).encode())
            began = time.monotonic()
            memory = _watch(programs, ledger, server.pid, began + seconds)
            answers = []
            for pipe in pipes:
                while not pipe.poll(POLL_SECONDS):
                    programs.check()
                    check_children(children)
                    ledger.look()
                answers.append(Sent(*json.loads(pipe.recv_bytes())))
            seconds = time.monotonic() - began
            ledger.look()
            return _account(answers, recording, ledger, memory, seconds)
    finally:
        stop_children(children)


def _start_senders(config: Config, recording: Recording, connections: int) -> tuple[list[Any], list[Connection]]:
    """Starts the senders, before this process has sockets. Each joins the run, reports that, and waits for an order."""
    children, pipes = [], []
    for index in range(NUM_SENDERS):
        count = connections // NUM_SENDERS + (index < connections % NUM_SENDERS)
        ours, theirs = Pipe()
        children.append(start_child(f"sender-{index}", send, recording, control_address(config), count, theirs, ours))
        theirs.close()
        pipes.append(ours)
    return children, pipes


def _watch(programs: Programs, ledger: SegmentLedger, pid: int, until: float) -> list[float]:
    """Counts stored transitions; returns the memory of the replay server's processes, without the mapped file, over
    time.
    """
    memory: list[float] = []
    look_at = 0.0
    while (now := time.monotonic()) < until:
        programs.check()
        ledger.look()
        if now >= look_at:
            look_at = now + MEMORY_SECONDS
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            whole, shared = read_memory([pid, *map(int, children)])
            memory.append(float(whole - shared))
        time.sleep(min(LOOK_SECONDS, max(0.0, until - time.monotonic())))
    return memory


def list_sent(actor_id: int, num_segments: int, recording: Recording) -> Iterator[tuple[int, int]]:
    """Returns the tag and the number of transitions of each segment that a connection has sent."""
    for number in range(num_segments):
        yield tag(actor_id, number), len(recording.records_of(piece_of(actor_id, number, recording)))


def piece_of(actor_id: int, number: int, recording: Recording) -> int:
    """Returns the piece of the recording that a connection sends as this segment. Connections begin at different
    pieces.
    """
    return (actor_id + number) % len(recording.pieces)


def _account(
    answers: Sequence[Sent], recording: Recording, ledger: SegmentLedger, memory: list[float], seconds: float
) -> Figures:
    """Compares the sent segments with the stored ones."""
    connections = [pair for answer in answers for pair in zip(answer.actors, answer.segments, strict=True)]
    sent = [list(list_sent(actor_id, segments, recording)) for actor_id, segments in connections]
    transitions = [sum(count for _, count in rows) for rows in sent]
    balance = ledger.balance(chain.from_iterable(sent))
    first, last = compare_ends(memory)
    figures = {
        "connections": float(len(transitions)),
        "connections_transitions_per_s": ledger.num_transitions / seconds,
        "connections_fairness": min(transitions) / max(1, max(transitions)),
        "connections_lost": float(balance.lost),
        "connections_twice": float(balance.twice),
        "connections_pending": float(sum(answer.pending for answer in answers)),
        "connections_resent": float(sum(answer.resent for answer in answers)),
        "connections_memory_bytes": last,
        "connections_memory_growth": last / first - 1,
        "connections_seconds": seconds,
    }
    return {name: float(f"{value:.9g}") for name, value in figures.items()}


def compare_ends(memory: Sequence[float]) -> tuple[float, float]:
    """Returns the medians of the first and the last minute of readings that were taken every `MEMORY_SECONDS`.

    In less than two minutes: of the second and the last tenth, because the server starts during the first.
    """
    minute, tenth = round(60 / MEMORY_SECONDS), max(1, len(memory) // 10)
    if len(memory) >= 2 * minute:
        return statistics.median(memory[:minute]), statistics.median(memory[-minute:])
    return statistics.median(memory[tenth : 2 * tenth] or memory), statistics.median(memory[-tenth:])


# --- a process with several connections -------------------------------------------------------------------------------


class Connected:
    """One actor's connection, which sends the segments of a recording repeatedly."""

    def __init__(self, link: ReliableSender, actor_id: int, recording: Recording, cuts: Sequence[Cut]) -> None:
        """`cuts`: the pieces of the recording."""
        self._link = link
        self._recording = recording
        self._cuts = cuts
        self.actor_id = actor_id
        self.num_segments = 0

    @property
    def in_flight(self) -> int:
        """Number of segments that are not acknowledged."""
        return self._link.in_flight

    @property
    def num_resent(self) -> int:
        """Number of segments that were sent again."""
        return self._link.num_resent

    def pump(self) -> None:
        """Receives receipts; sends overdue segments again."""
        self._link.pump()

    def send(self) -> bool:
        """Sends the next segment; returns False if the window is full."""
        if self._link.blocked:
            return False
        cut = self._cuts[piece_of(self.actor_id, self.num_segments, self._recording)]
        self._link.send([cut], tag(self.actor_id, self.num_segments))
        self.num_segments += 1
        return True


def send(stop: Stop, recording: Recording, learner: str, count: int, pipe: Connection, bench_end: Connection) -> None:
    """The child's main function: opens `count` connections, each with its own sockets and stream."""
    bench_end.close()
    compressor = Compressor(recording)
    cuts = [Cut(0, recording.records_of(piece), compressor.blob(piece)) for piece in range(len(recording.pieces))]
    host, port = split_address(learner, 0)
    welcome = greet(Route(host, port), Role.ACTOR, stop, num_streams=count, needs_replay=True)
    if welcome is None:
        return
    require(len(welcome.streams) == count, f"{count} actor ids are needed, but only {len(welcome.streams)} are free")
    (replay,), window = welcome.replay, welcome.config.actor.send_window
    codec = RunCodec(welcome.run_id, welcome.schema)

    def connect(stream: Stream) -> Connected:
        sender = ExperienceSender(context, replay["experience"], num_messages=window)
        receipts = ReceiptReceiver(context, [replay["receipts"]], codec, [stream])
        return Connected(
            ReliableSender([stream], codec, [sender], receipts, window=window), stream.actor_id, recording, cuts
        )

    with open_context() as context:
        connections = [connect(stream) for stream in welcome.streams]
        pipe.send_bytes(b"ready")
        while not pipe.poll(POLL_SECONDS):
            if stop.poll():
                return
        seconds = json.loads(pipe.recv_bytes())
        sent = run(stop, connections, seconds)
        pipe.send_bytes(json.dumps(sent).encode())
        while not stop.poll():
            time.sleep(POLL_SECONDS)  # The sockets close after the results are read.


def run(stop: Stop, connections: Sequence[Connected], seconds: float) -> Sent:
    """Sends over all connections in turn for this time, then waits until all segments are acknowledged."""
    end = time.monotonic() + seconds
    while not stop.poll() and time.monotonic() < end:
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
        [connection.actor_id for connection in connections],
        [connection.num_segments for connection in connections],
        sum(connection.in_flight for connection in connections),
        sum(connection.num_resent for connection in connections),
    )
