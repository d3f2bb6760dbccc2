"""A cluster that Terraform applies, running: every instance is a machine in namespaces with its address and groups.

The hosts boot from their user data and run the units' own commands, from the creation of keys to the learner's end.
The tests of the first cluster are steps of one run, in this order.
"""

from __future__ import annotations

import errno
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import emulator
import namespaces
import pytest
from namespaced_cluster import NamespacedCluster
from namespaced_run import (
    TENSORBOARD,
    Memory,
    Port,
    check_continuation,
    connected_from,
    find_late_streams,
    is_still,
    read_memory,
    read_rows,
    renewed,
    shown_curves,
    try_ports,
)
from namespaces import SECONDS, Machine, wait_until
from rules import MAY_REACH
from terraform_program import Terraform

from apex.config import Config, TransportConfig, flatten
from apex.config.presets import PRESETS
from apex.facts import EndReason
from apex.launch.status import ask
from apex.runs.checkpoints.paths import newest_update
from apex.runs.folder import RunFolder
from apex.transport.curve.key_store import Keys
from apex.transport.messages.run_status import RunStatus

NAME, PRESET = "cartpole-1", PRESETS["cartpole"].config
NUM_ACTORS, PER_HOST = 12, 4  # 3 hosts of 2 cores with 2 streams each
LEASE_SECONDS = 30.0  # until the actor ids of a dead host are free
AGAIN_SECONDS = 120.0  # until another host has them, on a busy machine
CUT_SECONDS = 10.0
LOST_SECONDS = 300.0  # of updates
SCORE = 200.0  # A random policy has about 22. The pods of test_kubernetes.py solve CartPole after the same loss.
NO_SETTINGS = ("environment.id", "actor.num_actors")  # variables of this cluster only
ADMIN, STRANGER = "203.0.113.7", "203.0.113.8"
SSH = 22
SOCKETS = ("experience", "priorities", "receipts", "parameters", "batches", "control")
END = "start --no-block apex-end.service"  # the learner's host ends the cluster

MISSING = namespaces.missing() or ("" if shutil.which("terraform") else "not installed: terraform")
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)


def preset_settings(**learner: Any) -> dict[str, dict[str, Any]]:
    """Returns the variable `settings`: what the preset has set, and other settings of the learner."""
    default, settings = flatten(Config()), {}
    for name, value in flatten(PRESET).items():
        section, _, setting = name.partition(".")
        if value != default[name] and name not in NO_SETTINGS:
            settings.setdefault(section, {})[setting] = value
    settings["learner"] |= {"device": "cpu", **learner}
    settings["run"]["stop_score"] = SCORE
    settings.setdefault("checkpoint", {})["period_seconds"] = 20  # as often as the hosts upload here
    return settings


CLUSTERS = {  # the variables of each, beside those that all have
    NAME: {"settings": preset_settings()},
    "cartpole-2": {"settings": preset_settings(num_loaders=2), "replay_host": "own", "actor_hosts": 1},
}


@pytest.fixture(scope="module")
def clusters(
    scratch: Path, new_terraform: Callable[..., Terraform], endpoint: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], NamespacedCluster]]:
    """Applies all clusters beside each other, which takes a minute, and then returns one by its name."""

    def apply(name: str) -> None:
        terraform = new_terraform(scratch / name)
        fixed = {"bucket": emulator.BUCKET, "actor_instance_types": ["c7i.large"], "streams_per_core": 2}
        variables = {"environment": "CartPole-v1", "admin_cidrs": [f"{ADMIN}/32"], **fixed, **CLUSTERS[name]}
        terraform.set(name=name, **variables)
        terraform.run("apply", "-auto-approve")

    def find(name: str) -> NamespacedCluster:
        applied[name].result()
        return NamespacedCluster(name, endpoint, tmp_path_factory.mktemp("hosts"))

    with ThreadPoolExecutor() as pool:
        applied = {name: pool.submit(apply, name) for name in CLUSTERS}
        yield find


class Run:
    """The run of a cluster."""

    def __init__(self, cluster: NamespacedCluster) -> None:
        self._cluster = cluster

    @property
    def path(self) -> Path:
        """Returns the run folder on the learner's host."""
        return self._cluster.learner.folder / "home/runs" / self._cluster.name

    @property
    def curve(self) -> Path:
        return self.path / "curves/learner.jsonl"

    def memory(self) -> Memory:
        """Returns the state of the replay memory, which is on the learner's host."""
        return read_memory(self._cluster.learner.root, self.path)

    def status(self) -> RunStatus:
        """Returns the output of `apex status` on the learner's host, with the key that this host created."""
        learner = self._cluster.learner
        endpoint, keys = TransportConfig().endpoint("control", learner.address), learner.folder / "home/keys"
        status = learner.within(lambda: ask(endpoint, SECONDS, Keys(keys, "observer")))
        assert status is not None, "the learner is silent"
        return status

    def are_leased(self) -> bool:
        actors = self.status().actors
        return actors.leased == actors.configured

    def until_update(self, update: int) -> None:
        wait_until(lambda: self.status().updates > update, "updates")


@pytest.fixture(scope="module")
def cluster(clusters: Callable[[str], NamespacedCluster]) -> Iterator[NamespacedCluster]:
    with clusters(NAME) as cluster:
        cluster.add_new()
        yield cluster


@pytest.fixture(scope="module")
def run(cluster: NamespacedCluster) -> Run:
    """The evaluator boots last: without a score, the run cannot end early."""
    cluster.boot(*(host for host in cluster.hosts.values() if host.role != "evaluator"))
    run = Run(cluster)
    run.until_update(20)
    wait_until(lambda: all(stream.contiguous for stream in run.memory().streams), "experience of all")
    return run


def test_a_port_is_open_only_to_the_machines_that_use_it(cluster: NamespacedCluster, run: Run) -> None:
    admin, stranger = cluster.add_person("admin", ADMIN), cluster.add_person("stranger", STRANGER)
    transport, at, hosts = TransportConfig(), cluster.learner.address, list(cluster.hosts.values())
    wait_until(lambda: shown_curves(admin, at), "curves for the admin")
    numbers = (*map(transport.port, SOCKETS), SSH, TENSORBOARD)

    def connect(machine: Machine) -> dict[int, set[Port]]:
        others = [host.address for host in hosts if host is not machine]
        return try_ports(machine, [(address, number) for address in others for number in numbers])

    machines = [*hosts, admin, stranger]
    with ThreadPoolExecutor(len(machines)) as pool:
        results = dict(zip((machine.address for machine in machines), pool.map(connect, machines), strict=True))
    roles = {host.address: host.role for host in hosts}
    assert len(results) == 7  # five hosts and two people
    for address, found in results.items():
        names = [name for name in SOCKETS if roles.get(address) in MAY_REACH[name] and address != at]
        expected = {(at, transport.port(name)) for name in names}
        assert found.get(0, set()) == expected | ({(at, TENSORBOARD)} if address == ADMIN else set()), address
        # SSH, for which these hosts have no key pair: connections that get through are refused, and not ignored.
        assert errno.ECONNREFUSED not in found, address
    assert shown_curves(stranger, at) == []


def test_the_actor_ids_of_a_dead_host_are_leased_again(cluster: NamespacedCluster, run: Run) -> None:
    before = run.memory()
    cluster.lose(cluster.of("actor")[-1])
    wait_until(lambda: not run.are_leased(), "the dead host's leases to end", LEASE_SECONDS)
    # It starts with priority over the other actors on the same cores, so that their load does not delay it.
    cluster.boot(*cluster.add_new(nice=0))
    wait_until(run.are_leased, "all ids to be leased", AGAIN_SECONDS)
    wait_until(lambda: len(renewed(before, run.memory())) >= PER_HOST, "the new host's experience")
    after = run.memory()
    dead_ids = renewed(before, after)
    assert (len(dead_ids), len(after.streams)) == (PER_HOST, NUM_ACTORS)
    assert all(after.streams[actor_id].incarnation > before.streams[actor_id].incarnation for actor_id in dead_ids)
    assert after.incarnation == before.incarnation


def test_a_disconnected_learner_host_continues_and_loses_nothing(cluster: NamespacedCluster, run: Run) -> None:
    """All segments in flight arrived: each stream is stored beyond the window of that time, without a gap."""
    before = run.memory()
    cluster.switch.cut(cluster.learner)
    time.sleep(CUT_SECONDS / 2)
    wait_until(lambda: is_still(run.memory), "all data from before the cut")
    still = run.memory()
    time.sleep(CUT_SECONDS / 2)
    assert run.memory().num_inserted == still.num_inserted
    cluster.switch.mend(cluster.learner)

    def late() -> list[str]:
        return find_late_streams(before, run.memory(), PRESET.actor.window)

    wait_until(lambda: not late(), "every stream to continue", why=late)
    assert run.memory().incarnation == before.incarnation
    wait_until(run.are_leased, "all ids to be leased")


def test_the_new_learner_continues_from_the_bucket(cluster: NamespacedCluster, run: Run) -> None:
    s3, lost = cluster.client("s3"), cluster.learner
    # The first upload may lack a checkpoint.
    files = [f"{NAME}/{file}" for file in ("checkpoints/newest.json", "manifest.json")]
    wait_until(
        lambda: all(s3.list_objects_v2(Bucket=emulator.BUCKET, Prefix=file)["KeyCount"] for file in files),
        "apex-upload.timer",
    )
    curve = run.curve
    cluster.lose(lost)
    cluster.boot(*cluster.add_new())
    assert cluster.learner.address != lost.address, "nobody had to find the new host"

    def resumed_at() -> int:
        log = "\n".join(cluster.learner.lines("log/apex@learner.service"))
        return int(found[1]) if (found := re.search(r"resuming at update (\d+)", log)) else 0

    wait_until(resumed_at, "the run to be resumed")
    first, lost_rows = resumed_at(), read_rows(curve)
    run.until_update(first)
    wait_until(lambda: read_rows(run.curve)[-1]["scalars"]["learner/updates"] > first, "a row of the new host")
    kept = [row for row in lost_rows if row["scalars"]["learner/updates"] <= first]
    assert lost_rows[-1]["time"] - kept[-1]["time"] <= LOST_SECONDS
    check_continuation(lost_rows, read_rows(run.curve), first)


def test_the_run_ends_normally_after_all_faults(cluster: NamespacedCluster, run: Run, endpoint: str) -> None:
    """Neither a run with progress nor one at its limit has its host replaced."""
    learner = cluster.learner
    assert cluster.check_progress(learner) == "Healthy"
    cluster.boot(*cluster.of("evaluator"))
    wait_until(lambda: END in learner.lines("home/systemctl"), "the end of the run")
    assert cluster.check_progress(learner, newest_update(run.path / "checkpoints") or 0) == "Healthy"
    assert learner.lines("home/systemctl").count(END) == 1, "the end of the run, and no other"
    learner.end_cluster()
    assert RunFolder.open(run.path).end == EndReason("score", SCORE)
    ended = {host.name: host.ended(f"apex@{host.role}.service") for host in cluster.hosts.values()}
    assert set().union(*ended.values()) <= {"0", "75", "-15"}, ended  # For new keys, systemd restarts actors (SIGTERM).
    assert learner.ended("apex@learner.service") == ["0"]
    found = emulator.client("s3", endpoint).list_objects_v2(Bucket=emulator.BUCKET, Prefix=f"{NAME}/c")
    names = {entry["Key"].removeprefix(f"{NAME}/") for entry in found["Contents"]}
    assert {"checkpoints/best.safetensors", "curves/learner.jsonl"} <= names
    assert cluster.sizes() == {"learner": 0, "evaluator": 0, "actor": 0}


def test_a_learner_without_progress_is_replaced_once_and_then_ends(
    clusters: Callable[[str], NamespacedCluster],
) -> None:
    """It waits for the replay server, which has its own host here, so that the bucket has nothing but the mark.

    Then the run starts: each loader has its own connection to the replay server.
    """
    with clusters("cartpole-2") as cluster:
        cluster.add_new()
        (replay,) = cluster.of("replay")
        cluster.boot(cluster.learner)
        assert cluster.check_progress(cluster.learner) == "Unhealthy"
        cluster.lose(cluster.learner)
        cluster.boot(*cluster.add_new())
        learner = cluster.learner
        assert END not in learner.lines("home/systemctl")
        assert cluster.check_progress(learner) == "Healthy"
        assert END in learner.lines("home/systemctl")
        cluster.boot(*(host for host in cluster.hosts.values() if host is not learner))
        Run(cluster).until_update(20)
        port, loaders = TransportConfig().port("batches"), [learner.address] * 2
        wait_until(lambda: connected_from(replay, port) == loaders, "both loaders")
        learner.end_cluster()
        assert cluster.sizes() == {"learner": 0, "replay": 0, "evaluator": 0, "actor": 0}


def test_machines_end_with_the_tests_even_if_these_are_killed(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from namespaces import Machine\n"
        "machine = Machine('m', '10.0.0.1', ['sh', '-c', 'sleep 600 & sleep 600'], Path(sys.argv[1]))\n"
        "print(machine.processes, flush=True); time.sleep(600)"
    )
    folder = Path(__file__).parent
    tests = subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "log")], cwd=folder, stdout=subprocess.PIPE)
    with tests:
        assert tests.stdout is not None
        machine = int(tests.stdout.readline())
        assert machine in namespaces.process_namespaces()
        tests.kill()
    wait_until(lambda: machine not in namespaces.process_namespaces(), "the machine's end")
