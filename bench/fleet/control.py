"""What many actor hosts cost the coordinator, and what its curves take on disk.

The coordinator is the learner's own process, with keys. A second process plays the hosts and replay servers: it sends
their hellos and heartbeats with games, and counts refusals. Hosts share CONNECTIONS connections.
"""

import json
import math
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil

from apex.config import ActorConfig, Config, LearnerConfig, ReplayConfig, RunConfig, TransportConfig
from apex.learning.coordinator.bottleneck import useful_shards
from apex.learning.coordinator.link import CoordinatorLink, TrainerReport, TrainerStart
from apex.learning.coordinator.server import run_coordinator
from apex.runs.folder import RunFolder
from apex.runtime.ports import choose_ports, is_free
from apex.transport.curve.key_store import read_keys
from apex.transport.messages import control
from apex.transport.messages.results import ActorScores, Scores
from apex.transport.messages.status import ActorStatus, LearnerStatus, Resources
from apex.types import Progress, Role
from apexreplay.errors import require
from apexreplay.facts import HexInt
from apexreplay.process.children import check_children, start_child, stop_children
from apexreplay.process.lifecycle import POLL_SECONDS, Stop
from apexreplay.transport.control_socket import ControlSocket
from apexreplay.transport.sockets import open_context
from apexreplay.wire.header import WIRE_VERSION
from apexreplay.wire.histogram import Histogram
from apexreplay.wire.json_codec import encode_control
from apexreplay.wire.status import ReplayStatus
from bench.fleet.receipts import SCHEMA
from bench.harness.command import Figures

CORES_PER_HOST = 8
STREAMS_PER_HOST = 16 * CORES_PER_HOST
MAX_STREAMS = 65_536
MAX_HOSTS = 1_900  # A run has at most 2,000 programs.
GAMES_PER_SECOND = 16  # of each host
CONNECTIONS = 16
REPLAY_SESSIONS = 1 << 32  # sessions of replay servers begin here; hosts have smaller ones
JOIN_SECONDS = 300.0
SETTLE_SECONDS = 3.0
ASK_SECONDS = 2.0


def measure_control(folder: Path, keys: str, num_hosts: int, seconds: float, stop: Stop) -> Figures:
    """Returns the coordinator's cores, its bytes of curves per hour, and the leases lost."""
    num_streams = min(STREAMS_PER_HOST, MAX_STREAMS // num_hosts)
    shards = useful_shards(CORES_PER_HOST * num_hosts)
    config = Config(
        actor=ActorConfig(num_actors=num_hosts * num_streams),
        replay=ReplayConfig(num_shards=shards, capacity=shards * 10_000, min_size_to_sample=512),
        transport=TransportConfig(keys=keys),
        learner=LearnerConfig(batch_size=512 - 512 % shards),
        run=RunConfig(folder=str(folder), name=f"hosts-{num_hosts}", tensorboard=False),
    )
    run = RunFolder.create(choose_ports(config, is_free, lambda sentence: None), SCHEMA, argv=[])
    pipe, coordinator_pipe = Pipe()
    ours, theirs = Pipe()
    coordinator = start_child("coordinator", run_coordinator, run, 1, coordinator_pipe, pipe, False)
    hosts = start_child("hosts", _play, run, keys, num_hosts, num_streams, theirs)
    coordinator_pipe.close()
    link = CoordinatorLink(pipe, config.replay, lambda *where: None, Progress())
    link.send(TrainerStart(1, 0, Progress()))
    try:
        process, joining = psutil.Process(coordinator.pid), _cpu(psutil.Process(coordinator.pid))
        _train(link, ours, time.monotonic() + JOIN_SECONDS, [coordinator, hosts], stop)
        require(ours.poll(), f"{num_hosts} hosts did not join within {JOIN_SECONDS:.0f} s")
        ours.recv_bytes()
        began, used, written = time.monotonic(), _cpu(process), _curve_bytes(run.path)
        joining = used - joining
        _train(link, None, began + seconds, [coordinator, hosts], stop)
        wall, used, written = time.monotonic() - began, _cpu(process) - used, _curve_bytes(run.path) - written
        ours.send_bytes(b"end")
        _train(link, ours, time.monotonic() + JOIN_SECONDS, [coordinator, hosts], stop)
        refused, answers = json.loads(ours.recv_bytes())
        return {
            "coordinator_cores": used / wall,
            "coordinator_join_cpu_s": joining,
            "coordinator_answers_per_s": answers / wall,
            "leases_lost": float(refused),
            "curve_bytes_per_hour": 3_600 * written / wall,
        }
    finally:
        stop_children([coordinator, hosts])


def _train(
    link: CoordinatorLink, pipe: Connection | None, until: float, children: Sequence[BaseProcess], stop: Stop
) -> None:
    """Reports as a trainer does, until the pipe has a message or the time is over."""
    report_at = 0.0
    while time.monotonic() < until and not (pipe is not None and pipe.poll()):
        if stop.poll():
            raise KeyboardInterrupt
        if time.monotonic() >= report_at:
            report_at = time.monotonic() + 1.0
            status = LearnerStatus(updates=int(report_at), updates_per_second=100.0, samples_per_second=51_200.0)
            link.send(TrainerReport(status))
        check_children(children)
        link.receive()
        time.sleep(POLL_SECONDS / 4)


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _curve_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for part in ("curves", "tensorboard") for path in (folder / part).rglob("*.*"))


# --- the process of the hosts -----------------------------------------------------------------------------------------


def _play(stop: Stop, run: RunFolder, keys: str, num_hosts: int, num_streams: int, pipe: Connection) -> None:
    """Joins as all hosts and replay servers, reports that, and sends their heartbeats until the pipe has a message."""
    endpoint = run.config.transport.endpoint("control")
    with open_context(read_keys(keys, Role.REPLAY)) as of_replay, open_context(read_keys(keys, Role.ACTOR)) as context:
        replay = ControlSocket(of_replay, endpoint, control.decode_answer)
        fences = [
            _ask(replay, _hello(Role.REPLAY, REPLAY_SESSIONS + shard, shard=shard), stop).fence
            for shard in range(run.config.replay.num_shards)
        ]
        hosts = Hosts(run.run_id, [ControlSocket(context, endpoint, control.decode_answer) for _ in range(CONNECTIONS)])
        replay_at, settled_at = 0.0, math.inf
        while not stop.poll() and not pipe.poll():
            now = time.monotonic()
            if now >= replay_at:
                replay_at = now + 1.0
                for shard, fence in enumerate(fences):
                    replay.send(_replay_beat(run.run_id, shard, fence, int(now)))
                while replay.receive(0.0) is not None:
                    pass
            if len(hosts.leases) < num_hosts:
                hosts.join(num_streams, stop)
            elif settled_at == math.inf:
                settled_at = now + SETTLE_SECONDS
            elif now >= settled_at:
                settled_at = 2 * JOIN_SECONDS + now
                hosts.num_answers = 0
                pipe.send_bytes(b"joined")
            while hosts.beat(time.monotonic()) and not stop.poll():
                pass
            time.sleep(0.0005)
        lost = sum(num_streams - len(held) for held in hosts.leases)
        pipe.send_bytes(json.dumps([hosts.num_refused + lost, hosts.num_answers]).encode())
        while not stop.poll():
            time.sleep(POLL_SECONDS)


class Hosts:
    """The hosts that have joined. Each sends heartbeats as often as the coordinator wants them."""

    def __init__(self, run_id: int, sockets: Sequence[ControlSocket[control.Answer]]) -> None:
        self.leases: list[list[control.Lease]] = []  # of each host
        # The heartbeat of each host, encoded again only if the pace changes, so that this process keeps up.
        self._beats: list[tuple[int, list[bytes]]] = []
        self.num_refused = self.num_answers = 0
        self.pace = 1.0
        self._run_id = run_id
        self._sockets = sockets
        self._due: deque[tuple[float, int]] = deque()  # time and host, in this order

    def join(self, num_streams: int, stop: Stop) -> None:
        """Joins as one more host."""
        host = len(self.leases)
        hello = _hello(Role.ACTOR, host, num_streams=num_streams)
        self.leases.append(_ask(self._sockets[host % CONNECTIONS], hello, stop).streams)
        self._beats.append((0, []))
        self._due.appendleft((0.0, host))

    def beat(self, now: float) -> bool:
        """Sends a heartbeat that is due, if any, and reads answers; returns whether it has sent one."""
        if not self._due or self._due[0][0] > now:
            return False
        at, host = self._due.popleft()
        self._due.append((max(at + self.pace, now + self.pace / 2) if at else now + self.pace, host))
        num_games = round(GAMES_PER_SECOND * self.pace)
        if self._beats[host][0] != num_games:
            beat = _actor_beat(self._run_id, host, self.leases[host], num_games)
            self._beats[host] = num_games, encode_control(beat, self._run_id)
        socket = self._sockets[host % CONNECTIONS]
        socket.send_frames(self._beats[host][1])
        while (answer := socket.receive(0.0)) is not None:
            self.num_answers += 1
            self.num_refused += isinstance(answer, control.RefusedAnswer)
            if isinstance(answer, control.StateAnswer):
                self.pace = answer.pace
        return True


def _ask(socket: ControlSocket[control.Answer], hello: control.Hello, stop: Stop) -> control.WelcomeAnswer:
    while not stop.poll():
        socket.send(hello)
        until = time.monotonic() + ASK_SECONDS
        while (answer := socket.receive(0.1)) is not None or time.monotonic() < until:
            if isinstance(answer, control.WelcomeAnswer):
                return answer
    raise KeyboardInterrupt


def _hello(role: Role, session: int, **wishes: int) -> control.Hello:
    fields = {"shard": 0, "num_streams": 0} | wishes
    return control.Hello(wire=WIRE_VERSION, session=session, role=role, host=f"host-{session}", pid=1, **fields)


def _actor_beat(run_id: int, host: int, leases: list[control.Lease], num_games: int) -> control.ActorHeartbeat:
    rows = min(num_games, len(leases))  # An actor's games are one row.
    games = [ActorScores(leases[(host + i) % len(leases)].actor_id, num_games // rows, 9.0, 900) for i in range(rows)]
    rate = 106.0 * len(leases)
    status = ActorStatus(
        waiting=None, num_steps=rate, steps_per_second=rate, wait_share=0.0, parameter_bytes_per_second=1e6
    )
    return control.ActorHeartbeat(
        session=host,
        run_id=HexInt(run_id),
        host=f"host-{host}",
        pid=1,
        shard=0,
        streams=leases,
        endpoints={},
        resources=Resources(cores=CORES_PER_HOST, memory_bytes=10**9),
        status=status,
        scores=Scores(games),
    )


def _replay_beat(run_id: int, shard: int, fence: int, beat: int) -> control.ReplayHeartbeat:
    edges = [float(2**i) for i in range(-10, 11)]
    status = ReplayStatus(
        waiting=None,
        num_inserted=100_000 * beat,
        num_steps=100_000 * beat,
        num_drawn=10_000 * beat,
        store_incarnation="7",
        size=10_000,
        bytes=10**7,
        max_bytes=10**7,
        inserts_per_second=1e5,
        inserted_steps_per_second=1e5,
        samples_per_second=1e4,
        busy_share=0.5,
        stale_priorities=0,
        duplicate_segments=0,
        refused=0,
        refusals={},
        refused_connections={},
        samplers_wait_for="",
        inserts_wait=False,
        priority_histogram=Histogram(counts=[float(beat + i) for i in range(20)], edges=edges),
    )
    return control.ReplayHeartbeat(
        session=REPLAY_SESSIONS + shard,
        run_id=HexInt(run_id),
        host=f"replay-{shard}",
        pid=1,
        shard=shard,
        streams=[],
        endpoints={
            name: f"tcp://10.0.0.2:{21_001 + i}" for i, name in enumerate(("experience", "priorities", "receipts"))
        },
        resources=Resources(cores=1.0, memory_bytes=10**9),
        status=status,
        fence=fence,
    )
