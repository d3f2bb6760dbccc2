"""One run of a cluster in namespaces, from the hosts' first boot to the learner's end, with three faults."""

from __future__ import annotations

import errno
import json
import re
import socket
import time
import urllib.request
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any, NamedTuple

import emulator
from namespaced_cluster import BUSY_SECONDS, Host, NamespacedCluster
from namespaces import Machine, Network, Stopwatch, wait_until
from stored_streams import Memory, read_memory

from apex.config import TransportConfig
from apex.launch.status import ask
from apex.runs.checkpoints.paths import newest_update
from apex.runs.folder import RunFolder
from apex.transport.curve.key_store import Keys
from apex.transport.messages.run_status import RunStatus

ADMIN, STRANGER = "203.0.113.7", "203.0.113.8"
SSH, TENSORBOARD = 22, 6006
SOCKETS = ("experience", "priorities", "receipts", "parameters", "batches", "control")
END = "start --no-block apex-end.service"  # the learner's host ends the cluster
CUT_SECONDS = 10.0
ANSWER_SECONDS = 2.0  # time for a connection to be answered
START_SECONDS, SCORE_SECONDS = 240.0, 400.0  # deadlines, measured by a Stopwatch

COUNTED = ("time", "steps", "learner/updates")  # increase in a curve

Port = tuple[str, int]  # address and number
Row = dict[str, Any]  # row of a curve


class Connections(NamedTuple):
    """The connections between machines, before the faults."""

    learner: str  # address of the first learner host
    roles: dict[str, str]  # hosts by address
    open: dict[str, set[Port]]  # open ports of other machines, by the address of the connecting machine
    refused: dict[str, set[Port]]  # ports without a listener that are let through, likewise
    strangers_curves: list[str]  # runs that TensorBoard shows to the stranger


class ActorLoss(NamedTuple):
    """The loss of an actor host, until another host had its actor ids."""

    before: Memory
    after: Memory
    dead_ids: set[int]
    seconds: float  # from the host's death until all ids were leased again, by a Stopwatch


class Disconnection(NamedTuple):
    """A disconnection of the host of learner and replay server."""

    before: Memory
    still: Memory  # when nothing was in flight
    end: Memory  # before the cable was reconnected
    after: Memory


class LearnerLoss(NamedTuple):
    """The loss of the learner's host with the replay memory, until another host continued the run."""

    rows: list[Row]  # curve of the learner on the lost host
    resumed_at: int  # update of the checkpoint from which the new host continued


class Observations(NamedTuple):
    """The observations of a run."""

    hosts: dict[str, Host]  # hosts at the end, by id
    learner: Host  # the second learner host
    folder: Path  # the run on that host
    connections: Connections
    actor_loss: ActorLoss
    disconnection: Disconnection
    learner_loss: LearnerLoss
    health: list[str]  # of the learner's host, if it had recorded its progress an hour ago: in the run, and at its end


def observe_run(cluster: NamespacedCluster) -> Observations:
    """Boots all hosts, loses an actor host, disconnects and then loses the learner's host, and waits for the run's end.

    Every wait has a deadline.
    """
    cluster.add_new()
    (evaluator,) = cluster.of("evaluator")
    admin, stranger = cluster.add_person("admin", ADMIN), cluster.add_person("stranger", STRANGER)
    # The evaluator boots last: without a score, the run cannot end early.
    cluster.boot(*(host for host in cluster.hosts.values() if host is not evaluator))
    run = Run(cluster)
    wait_until(lambda: run.status().updates > 20, "updates", START_SECONDS)
    wait_until(lambda: all(stream.contiguous for stream in run.memory().streams), "experience of all", BUSY_SECONDS)
    connections = run.connect_all(admin, stranger)
    actor_loss, disconnection, learner_loss = run.lose_actor(), run.disconnect_learner(), run.lose_learner()
    learner, checkpoints = run.learner, run.path / "checkpoints"
    health = [cluster.check_progress(learner)]
    cluster.boot(evaluator)
    wait_until(lambda: END in learner.lines("home/systemctl"), "the end of the run", SCORE_SECONDS)
    health.append(cluster.check_progress(learner, newest_update(checkpoints) or 0))
    learner.end_cluster()
    return Observations(cluster.hosts, learner, run.path, connections, actor_loss, disconnection, learner_loss, health)


class Run:
    """A run of a cluster, and its faults."""

    def __init__(self, cluster: NamespacedCluster) -> None:
        self._cluster = cluster
        (self.learner,) = cluster.of("learner")
        self._num_actors = 0

    @property
    def path(self) -> Path:
        """Returns the run folder on the learner's host."""
        return self.learner.folder / "home/runs" / self._cluster.name

    def status(self) -> RunStatus:
        """See status_of."""
        return status_of(self.learner)

    def memory(self) -> Memory:
        """Returns the state of the replay memory, which is on the learner's host."""
        return read_memory(self.learner.root, self.path)

    def connect_all(self, admin: Machine, stranger: Machine) -> Connections:
        """Connects from each machine to the ports of all other hosts."""
        at, hosts = self.learner.address, list(self._cluster.hosts.values())
        wait_until(lambda: shown_curves(admin, at), "curves for the admin", BUSY_SECONDS)
        numbers = (*map(TransportConfig().port, SOCKETS), SSH, TENSORBOARD)

        def connect(machine: Machine) -> dict[int, set[Port]]:
            others = [host.address for host in hosts if host is not machine]
            return try_ports(machine, [(address, number) for address in others for number in numbers])

        machines = [*hosts, admin, stranger]
        with ThreadPoolExecutor(len(machines)) as pool:
            results = dict(zip((machine.address for machine in machines), pool.map(connect, machines), strict=True))
        return Connections(
            at,
            {host.address: host.role for host in hosts},
            {address: found.get(0, set()) for address, found in results.items()},
            {address: found.get(errno.ECONNREFUSED, set()) for address, found in results.items()},
            shown_curves(stranger, at),
        )

    def lose_actor(self) -> ActorLoss:
        """Kills an actor host, and boots the one that its group starts."""
        actors = self._cluster.of("actor")
        before, num_actors = self.memory(), self.status().actors.configured
        watch = Stopwatch()
        self._cluster.lose(actors[-1])
        wait_until(lambda: self.status().actors.leased < num_actors, "the dead host's leases to end", BUSY_SECONDS)
        # It starts with priority over the other actors on the same cores, so that their load does not delay it.
        self._cluster.boot(*self._cluster.add_new(nice=0))
        self._wait_for_leases()
        seconds, num_dead = watch.read(), num_actors // len(actors)
        wait_until(lambda: len(renewed(before, self.memory())) == num_dead, "the new host's experience", BUSY_SECONDS)
        after = self.memory()
        return ActorLoss(before, after, renewed(before, after), seconds)

    def disconnect_learner(self) -> Disconnection:
        """Disconnects the host of learner and replay server for a while."""
        before, window = self.memory(), RunFolder.open(self.path).config.actor.window
        self._cluster.switch.cut(self.learner)
        time.sleep(CUT_SECONDS / 2)
        wait_until(lambda: is_still(self.memory), "all data from before the cut", BUSY_SECONDS)
        still = self.memory()
        time.sleep(CUT_SECONDS / 2)
        end = self.memory()
        self._cluster.switch.mend(self.learner)

        def late() -> list[str]:
            return find_late_streams(before, self.memory(), window)

        wait_until(lambda: not late(), "every stream to continue", BUSY_SECONDS, late)
        after = self.memory()
        self._wait_for_leases()
        return Disconnection(before, still, end, after)

    def lose_learner(self) -> LearnerLoss:
        """Kills the learner's host with the replay memory, and boots the one that its group starts."""
        s3, name = self._cluster.client("s3"), self._cluster.name
        # The first upload may lack a checkpoint.
        files = [f"{name}/{file}" for file in ("checkpoints/newest.json", "manifest.json")]

        def is_uploaded() -> bool:
            return all(s3.list_objects_v2(Bucket=emulator.BUCKET, Prefix=file)["KeyCount"] for file in files)

        wait_until(is_uploaded, "apex-upload.timer", SCORE_SECONDS)
        curve = self.path / "curves/learner.jsonl"
        self._cluster.lose(self.learner)
        (self.learner,) = self._cluster.add_new()
        self._cluster.boot(self.learner)
        wait_until(lambda: resumed_at(self.learner), "the run to be resumed", START_SECONDS)
        first = resumed_at(self.learner)
        wait_until(lambda: self.status().updates > first, "updates of the new host", START_SECONDS)
        return LearnerLoss(read_rows(curve), first)

    def _wait_for_leases(self) -> None:
        def all_leased() -> bool:
            actors = self.status().actors
            return actors.leased == actors.configured

        wait_until(all_leased, "all ids to be leased", BUSY_SECONDS)


def status_of(learner: Host) -> RunStatus:
    """Returns the output of `apex status` on the learner's host, with the key that this host created."""
    keys = learner.folder / "home/keys"
    endpoint = TransportConfig().endpoint("control", learner.address)
    status = learner.within(lambda: ask(endpoint, BUSY_SECONDS, Keys(keys, "observer")))
    assert status is not None, "the learner is silent"
    return status


def resumed_at(learner: Host) -> int:
    """Returns the update from which a learner continues; 0 before it has logged it."""
    log = "\n".join(learner.lines("log/apex@learner.service"))
    return int(found[1]) if (found := re.search(r"resuming at update (\d+)", log)) else 0


def read_rows(path: Path) -> list[Row]:
    """Returns the rows of a curve."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_continuation(lost: list[Row], rows: list[Row], resumed_at: int) -> None:
    """Checks that a curve has the rows of a lost host up to update `resumed_at`, and those of another continue them."""
    before = [row for row in rows if row["time"] <= lost[-1]["time"]]
    assert before == lost[: len(before)]
    assert 0 < len(before) < len(rows)
    times, steps, updates = ([row.get(name, row["scalars"].get(name)) for row in rows] for name in COUNTED)
    assert times == sorted(set(times))
    assert (steps, updates) == (sorted(steps), sorted(updates))
    assert updates[len(before) - 1] <= resumed_at <= updates[len(before)], "the rest was cut, and trained again"


def is_still(memory: Callable[[], Memory]) -> bool:
    """Returns whether nothing was stored for a second."""
    before = memory().num_inserted
    time.sleep(1.0)
    return memory().num_inserted == before


def connected_from(host: Host, port: int) -> list[str]:
    """Returns the addresses that are connected to a port of the host."""
    found = []
    for line in Path(f"/proc/{host.pid}/net/tcp").read_text().splitlines()[1:]:
        _, own, other, state, *_ = line.split()
        if int(own.split(":")[1], 16) == port and state == "01":  # established
            found.append(str(IPv4Address(socket.htonl(int(other.split(":")[0], 16)))))
    return found


def renewed(before: Memory, after: Memory) -> set[int]:
    """Returns the actors whose streams have a new incarnation."""
    streams = enumerate(zip(before.streams, after.streams, strict=True))
    return {actor_id for actor_id, (old, new) in streams if new.incarnation != old.incarnation}


def find_late_streams(before: Memory, now: Memory, window: int) -> list[str]:
    """Returns the streams that have not stored all segments in flight and more, without a gap or a new incarnation."""
    return [
        f"actor {actor_id} had {old} and has {new}"
        for actor_id, (old, new) in enumerate(zip(before.streams, now.streams, strict=True))
        if new.incarnation != old.incarnation or new.contiguous <= old.contiguous + window or new.bitmap
    ]


def try_ports(network: Network, ports: Iterable[Port]) -> dict[int, set[Port]]:
    """Connects to all ports at once; returns them by the result: 0 for a connection, else the number of the error."""

    def connect() -> dict[int, set[Port]]:
        with ExitStack() as stack:
            connections = {port: stack.enter_context(socket.socket()) for port in ports}
            for port, connection in connections.items():
                connection.setblocking(False)
                connection.connect_ex(port)
            time.sleep(ANSWER_SECONDS)
            found: dict[int, set[Port]] = {}
            for port, connection in connections.items():  # A second call returns the result of the first.
                found.setdefault(connection.connect_ex(port), set()).add(port)
            return found

    return network.within(connect)


def shown_curves(network: Network, address: str) -> list[str]:
    """Returns the runs that the TensorBoard at `address` shows to `network`; none without an answer."""

    def get() -> list[str]:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"http://{address}:{TENSORBOARD}/data/runs", timeout=ANSWER_SECONDS) as answer:
                return list(json.load(answer))
        except OSError:
            return []

    return network.within(get)
