"""One run of a cluster in namespaces, from the hosts' first boot to the learner's end, with three faults."""

from __future__ import annotations

import errno
import json
import re
import select
import socket
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import emulator
from namespaced_cluster import Host, NamespacedCluster
from namespaces import Network, Stopwatch, wait_until
from stored_streams import Memory, read_memory

from apex.config import TransportConfig
from apex.launch.status import ask
from apex.runs.folder import RunFolder
from apex.transport.curve.key_store import Keys
from apex.transport.messages.run_status import RunStatus

ADMIN, STRANGER = "203.0.113.7", "203.0.113.8"
SSH, TENSORBOARD = 22, 6006
SOCKETS = ("experience", "priorities", "receipts", "parameters", "batches", "control")
END = "start --no-block apex-end.service"  # the learner's host ends the cluster
CUT_SECONDS = 10.0
ANSWER_SECONDS = 2.0  # time for a connection to be answered
START_SECONDS, SCORE_SECONDS, BUSY_SECONDS = 240.0, 400.0, 120.0  # deadlines, measured by a Stopwatch

Door = tuple[str, int]  # address and port
Row = dict[str, Any]  # rows of a curve
Seen = TypeVar("Seen")


class Observations(NamedTuple):
    """The observations of a run."""

    hosts: dict[str, Host]  # hosts at the end, by id
    learner: Host  # the second learner host
    roles: dict[str, str]  # hosts at the beginning, by address
    at: str  # address of the first learner host
    open: dict[str, set[Door]]  # open ports, by the address of the connecting machine
    refused: dict[str, set[Door]]  # ports without a listener that are let through, likewise
    curves: dict[str, list[str]]  # runs that TensorBoard shows, by the address of the person
    dead_ids: set[int]
    heirless_seconds: float  # time from an actor host's death until all ids were leased again, by a Stopwatch
    before_death: Memory
    after_death: Memory
    before_cut: Memory
    in_cut: tuple[Memory, Memory]  # streams when nothing was in flight, and after the cable was reconnected
    after_cut: Memory
    rows_lost: list[Row]  # curve of the learner on the lost host
    rows: list[Row]  # the same curve at the end of the run
    resumed_at: int  # update of the checkpoint from which the new host continued
    updates_lost: int


def tell(cluster: NamespacedCluster, aws: Callable[[str], Any], name: str) -> Observations:
    """Boots all hosts, kills an actor host, disconnects the learner's host and kills it, and waits for the run's end.

    Every wait has a deadline. `aws` returns a client of a service.
    """
    ssm, s3 = aws("ssm"), aws("s3")
    cluster.add_new()
    (learner,), (evaluator,) = cluster.of("learner"), cluster.of("evaluator")
    people = {
        address: cluster.add_person(name, address) for name, address in (("admin", ADMIN), ("stranger", STRANGER))
    }

    boot = partial(boot_hosts, cluster, ssm, name)
    # The evaluator boots last: without a score, the run cannot end early.
    boot(*(host for host in cluster.hosts.values() if host is not evaluator))
    wait_until(lambda: status_of(learner).updates > 20, "updates", START_SECONDS)
    folder = RunFolder.open(learner.folder / "home/runs" / name)
    memory = partial(read_memory, learner.root, folder.path)
    wait_until(lambda: all(stream.contiguous for stream in memory().streams), "experience of all", BUSY_SECONDS)
    wait_until(lambda: shown(learner, learner.address), "curves in TensorBoard", BUSY_SECONDS)
    num_actors = status_of(learner).actors.configured

    def leased() -> int:
        return status_of(learner).actors.leased

    roles = {host.address: host.role for host in cluster.hosts.values()}
    knockers = {**{host.address: host for host in cluster.hosts.values()}, **people}
    ports = (*map(TransportConfig().port, SOCKETS), SSH, TENSORBOARD)
    doors = [(host.address, port) for host in cluster.hosts.values() for port in ports]
    answers = each(knockers, lambda network: knock(network, doors))
    at = learner.address
    curves: dict[str, list[str]] = {}

    def is_shown() -> bool:
        curves.update(each(people, lambda network: shown(network, at)))
        return bool(curves[ADMIN])

    wait_until(is_shown, "curves for the admin", BUSY_SECONDS)

    # An actor host dies, and the group starts another.
    dead = cluster.of("actor")[-1]
    num_heirless = num_actors // len(cluster.of("actor"))
    before_death = memory()
    watch = Stopwatch()
    cluster.lose(dead)
    wait_until(lambda: leased() < num_actors, "the dead host's leases to end", BUSY_SECONDS)
    # It starts with priority over the other actors on the same cores, so that their load does not delay it.
    boot(*cluster.add_new(nice=0))
    wait_until(lambda: leased() == num_actors, "all ids to be leased", BUSY_SECONDS)
    heirless_seconds = watch.read()
    lives = [stream.incarnation for stream in before_death.streams]
    wait_until(lambda: len(renewed(memory(), lives)) == num_heirless, "the new host's experience", BUSY_SECONDS)
    after_death = memory()

    # Disconnect the host of learner and replay server for a while.
    before_cut = memory()
    cluster.switch.cut(learner)
    time.sleep(CUT_SECONDS / 2)
    wait_until(partial(is_still, memory), "what had come before the cut", BUSY_SECONDS)
    still = memory()
    time.sleep(CUT_SECONDS / 2)
    in_cut = still, memory()
    cluster.switch.mend(learner)
    window = folder.config.actor.window

    def behind() -> list[str]:
        return find_late_streams(before_cut, memory(), window)

    wait_until(lambda: not behind(), "every stream to go on", BUSY_SECONDS, behind)
    after_cut = memory()
    wait_until(lambda: leased() == num_actors, "all ids to be leased", BUSY_SECONDS)

    # Lose the learner's host with the replay memory: its group starts another, which restores the run.
    files = [
        f"{name}/{file}" for file in ("checkpoints/newest.json", "manifest.json")
    ]  # The first upload may lack a checkpoint.

    def is_kept() -> bool:
        return all(s3.list_objects_v2(Bucket=emulator.BUCKET, Prefix=file)["KeyCount"] for file in files)

    wait_until(is_kept, "apex-upload.timer", SCORE_SECONDS)
    updates = status_of(learner).updates
    cluster.lose(learner)
    (learner,) = cluster.add_new()
    boot(learner)
    wait_until(lambda: resumed_at(learner), "the run to be resumed", START_SECONDS)
    went_on = resumed_at(learner)
    wait_until(lambda: status_of(learner).updates > went_on, "updates of the new host", START_SECONDS)

    # Now the evaluator plays, and the run ends.
    boot(evaluator)
    wait_until(lambda: END in learner.asked_of_systemd(), "the end of the run", SCORE_SECONDS)
    learner.start("apex-end.service")  # as systemctl does
    wait_until(lambda: learner.ended("apex-end.service"), "the end of the cluster", BUSY_SECONDS)
    return Observations(
        hosts=cluster.hosts,
        learner=learner,
        roles=roles,
        at=at,
        open={address: doors_with(found, 0) for address, found in answers.items()},
        refused={address: doors_with(found, errno.ECONNREFUSED) for address, found in answers.items()},
        curves=curves,
        dead_ids=renewed(after_death, lives),
        heirless_seconds=heirless_seconds,
        before_death=before_death,
        after_death=after_death,
        before_cut=before_cut,
        in_cut=in_cut,
        after_cut=after_cut,
        rows_lost=read_rows(folder.curves / "learner.jsonl"),
        rows=read_rows(learner.folder / "home/runs" / name / "curves/learner.jsonl"),
        resumed_at=went_on,
        updates_lost=updates - went_on,
    )


def boot_hosts(cluster: NamespacedCluster, ssm: Any, name: str, *new: Host) -> None:
    """Boots hosts, and updates the keys of the others, for which apex-keys.timer would need up to a minute."""
    for host in new:
        host.boot()
    paths = [f"/apex/{name}/keys/{host.role}/{host.id}" for host in new]
    wait_until(lambda: not ssm.get_parameters(Names=paths)["InvalidParameters"], "the keys of hosts", BUSY_SECONDS)
    for host in cluster.hosts.values():
        if host.is_up:
            host.start("apex-keys.service")


def status_of(learner: Host) -> RunStatus:
    """Returns the output of `apex status` on the learner's host, with the key that this host created."""
    keys = learner.folder / "home/keys"
    endpoint = TransportConfig().endpoint("control", learner.address)
    status = learner.within(lambda: ask(endpoint, BUSY_SECONDS, Keys(keys, "observer")))
    assert status is not None, "the learner is silent"
    return status


def resumed_at(learner: Host) -> int:
    """Returns the update from which a learner continues; 0 before it has logged it."""
    found = re.search(r"resuming at update (\d+)", learner.log_of("apex@learner.service"))
    return int(found[1]) if found else 0


def read_rows(path: Path) -> list[Row]:
    """Returns the rows of a curve."""
    return [json.loads(line) for line in path.read_text().splitlines()]


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


def renewed(memory: Memory, lives: list[int]) -> set[int]:
    """Returns the actors with a new incarnation since then."""
    return {i for i, stream in enumerate(memory.streams) if stream.incarnation != lives[i]}


def find_late_streams(before: Memory, now: Memory, window: int) -> list[str]:
    """Returns the streams that have not stored all segments in flight and more, without a gap or a new incarnation."""
    return [
        f"actor {actor_id} had {old} and has {new}"
        for actor_id, (old, new) in enumerate(zip(before.streams, now.streams, strict=True))
        if new.incarnation != old.incarnation or new.contiguous <= old.contiguous + window or new.bitmap
    ]


def each(networks: Mapping[str, Network], look: Callable[[Network], Seen]) -> dict[str, Seen]:
    """Connects from each machine to all addresses at once, and returns the results."""
    with ThreadPoolExecutor(len(networks)) as pool:
        return dict(zip(networks, pool.map(look, networks.values()), strict=True))


def knock(network: Network, doors: Iterable[Door]) -> dict[Door, int]:
    """Connects from `network` to all addresses: 0 for a connection, else the error; addresses without an answer are
    missing.
    """

    def knock_at_all() -> dict[Door, int]:
        answers, waiting, poller = {}, {}, select.poll()
        for door in doors:
            knocker = socket.socket()
            knocker.setblocking(False)
            answers[door] = knocker.connect_ex(door)
            waiting[knocker.fileno()] = door, knocker
            if answers[door] == errno.EINPROGRESS:
                poller.register(knocker, select.POLLOUT)
        until = time.monotonic() + ANSWER_SECONDS
        while (left := until - time.monotonic()) > 0:
            for descriptor, _ in poller.poll(1000 * left):
                door, knocker = waiting[descriptor]
                answers[door] = knocker.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                poller.unregister(descriptor)
        for _, knocker in waiting.values():
            knocker.close()
        return {door: answer for door, answer in answers.items() if answer != errno.EINPROGRESS}

    return network.within(knock_at_all)


def doors_with(answers: dict[Door, int], answer: int) -> set[Door]:
    """Returns the addresses with this result."""
    return {door for door, found in answers.items() if found == answer}


def shown(network: Network, address: str) -> list[str]:
    """Returns the runs that the TensorBoard at `address` shows to `network`; none without an answer."""

    def get() -> list[str]:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"http://{address}:{TENSORBOARD}/data/runs", timeout=ANSWER_SECONDS) as answer:
                return list(json.load(answer))
        except OSError:
            return []

    return network.within(get)
