"""A cluster that Terraform applies, running: every instance is a machine in namespaces with its address and groups.

The hosts boot from their user data and run the units' own commands, from the creation of keys to the learner's end.
There is one run, in which an actor host is lost, and the learner's host is first disconnected and then lost. Each test
checks one property of it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import emulator
import namespaces
import pytest
from namespaced_cluster import BUSY_SECONDS, NamespacedCluster
from namespaced_run import (
    ADMIN,
    END,
    SOCKETS,
    START_SECONDS,
    TENSORBOARD,
    Observations,
    check_continuation,
    connected_from,
    find_late_streams,
    observe_run,
    read_rows,
    status_of,
)
from namespaces import wait_until
from rules import MAY_REACH
from terraform_program import Terraform

from apex.config import Config, TransportConfig, flatten
from apex.config.presets import PRESETS
from apex.facts import EndReason
from apex.runs.folder import RunFolder

NAME, PRESET = "cartpole-1", PRESETS["cartpole"].config
NUM_ACTORS, PER_HOST = 12, 4  # 3 hosts of 2 cores with 2 streams each
ALONE_SECONDS = 30.0  # until the actor ids of a dead host are leased again
LOST_SECONDS = 300.0  # of updates
NO_SETTINGS = ("environment.id", "actor.num_actors")  # variables of this cluster only

MISSING = namespaces.missing() or ("" if shutil.which("terraform") else "not installed: terraform")
# The timeout is longer than the run's own deadlines.
pytestmark = [pytest.mark.skipif(bool(MISSING), reason=MISSING), pytest.mark.timeout(2400)]

Clusters = Callable[[str], NamespacedCluster]


def preset_settings(**learner: Any) -> dict[str, dict[str, Any]]:
    """Returns the variable `settings`: what the preset has set, and other settings of the learner."""
    default, settings = flatten(Config()), {}
    for name, value in flatten(PRESET).items():
        section, _, setting = name.partition(".")
        if value != default[name] and name not in NO_SETTINGS:
            settings.setdefault(section, {})[setting] = value
    settings["learner"] |= learner
    settings.setdefault("checkpoint", {})["period_seconds"] = 20  # as often as the hosts upload here
    return settings


CLUSTERS = {  # the variables of each, beside those that all have
    NAME: {"settings": preset_settings()},
    "cartpole-2": {"settings": preset_settings(num_loaders=2), "replay_host": "own", "actor_hosts": 1},
    "cartpole-3": {"environment": "crashing_environment:make", "actor_hosts": 1},
}


@pytest.fixture(scope="module")
def clusters(
    scratch: Path, installed: tuple[dict[str, str], Path], endpoint: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Clusters]:
    """Applies all clusters beside each other, which takes a minute, and then returns one by its name."""
    settings, data = installed

    def apply(name: str) -> None:
        terraform = Terraform(scratch / name, {**settings, **emulator.environment(endpoint)}, data)
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


@pytest.fixture(scope="module")
def observed(clusters: Clusters) -> Iterator[Observations]:
    """The whole run. Every wait has a deadline, and all machines end in any case."""
    with clusters(NAME) as cluster:
        yield observe_run(cluster)


def test_the_run_ends_normally_after_all_faults(observed: Observations, endpoint: str) -> None:
    assert RunFolder.open(observed.folder).end == EndReason("score", PRESET.run.stop_score)
    assert observed.learner.address != observed.connections.learner, "nobody had to find the new host"
    ended = {host.name: host.ended(f"apex@{host.role}.service") for host in observed.hosts.values()}
    assert set().union(*ended.values()) <= {"0", "75", "-15"}, ended  # For new keys, systemd restarts actors (SIGTERM).
    assert observed.learner.ended("apex@learner.service") == ["0"]
    found = emulator.client("s3", endpoint).list_objects_v2(Bucket=emulator.BUCKET, Prefix=f"{NAME}/c")
    names = {entry["Key"].removeprefix(f"{NAME}/") for entry in found["Contents"]}
    assert {"checkpoints/best.safetensors", "curves/learner.jsonl"} <= names
    assert sizes(NAME, endpoint) == {kind: 0 for kind in ("learner", "evaluator", "actor")}


def sizes(name: str, endpoint: str) -> dict[str, int]:
    """Returns the desired number of hosts of each kind."""
    groups = emulator.client("autoscaling", endpoint).describe_auto_scaling_groups()["AutoScalingGroups"]
    named = {group["AutoScalingGroupName"]: group["DesiredCapacity"] for group in groups}
    prefix = f"apex-{name}-"
    return {group.removeprefix(prefix): size for group, size in named.items() if group.startswith(prefix)}


def test_the_new_learner_continues_from_the_bucket(observed: Observations) -> None:
    lost, resumed_at = observed.learner_loss
    assert resumed_at > 0
    kept = [row for row in lost if row["scalars"]["learner/updates"] <= resumed_at]
    assert lost[-1]["time"] - kept[-1]["time"] <= LOST_SECONDS
    check_continuation(lost, read_rows(observed.folder / "curves/learner.jsonl"), resumed_at)


def test_a_port_is_open_only_to_the_machines_that_use_it(observed: Observations) -> None:
    connections, transport = observed.connections, TransportConfig()
    at = connections.learner  # Learner and replay server share a host.
    assert len(connections.open) == 7  # five hosts and two people
    for address, ports in connections.open.items():
        names = [name for name in SOCKETS if connections.roles.get(address) in MAY_REACH[name] and address != at]
        expected = {(at, transport.port(name)) for name in names}
        assert ports == expected | ({(at, TENSORBOARD)} if address == ADMIN else set()), address
    assert connections.strangers_curves == []
    # SSH, for which these hosts have no key pair: connections that get through are refused, and not ignored.
    assert set().union(*connections.refused.values()) == set()


def test_the_actor_ids_of_a_dead_host_are_leased_again(observed: Observations) -> None:
    before, after, dead_ids, seconds = observed.actor_loss
    assert seconds <= ALONE_SECONDS
    assert len(dead_ids) == PER_HOST
    assert len(after.streams) == NUM_ACTORS
    assert all(after.streams[actor_id].incarnation > before.streams[actor_id].incarnation for actor_id in dead_ids)


def test_a_disconnected_learner_host_continues_and_loses_nothing(observed: Observations) -> None:
    """All segments in flight arrived: each stream is stored beyond the window of that time, without a gap."""
    before, still, end, after = observed.disconnection
    assert still.num_inserted == end.num_inserted < after.num_inserted
    assert after.incarnation == observed.actor_loss.before.incarnation
    assert find_late_streams(before, after, PRESET.actor.window) == []


def test_a_replay_server_on_its_own_host_feeds_every_loader(clusters: Clusters, observed: Observations) -> None:
    """Another cluster runs after the end of the first; each loader has its own connection."""
    with clusters("cartpole-2") as cluster:
        cluster.add_new()
        (learner,), (replay,) = cluster.of("learner"), cluster.of("replay")
        cluster.boot(*cluster.hosts.values())
        wait_until(lambda: status_of(learner).updates > 20, "updates", START_SECONDS)
        port, loaders = TransportConfig().port("batches"), [learner.address] * 2
        wait_until(lambda: connected_from(replay, port) == loaders, "both loaders", BUSY_SECONDS)


def test_a_run_with_progress_or_at_its_limit_keeps_its_host(observed: Observations) -> None:
    assert observed.health == ["Healthy", "Healthy"]
    assert observed.learner.lines("home/systemctl").count(END) == 1, "the end of the run, and no other"


def test_a_learner_that_always_crashes_is_replaced_once_and_then_ends(clusters: Clusters, endpoint: str) -> None:
    """It crashes before it has made a run, so that the bucket has nothing but the mark."""
    health = []
    with clusters("cartpole-3") as cluster:
        cluster.add_new()
        for _ in range(2):
            (learner,) = cluster.of("learner")
            cluster.boot(learner)
            wait_until(lambda at=learner: at.ended("apex@learner.service"), "a crash", START_SECONDS)
            assert set(learner.ended("apex@learner.service")) == {"-9"}
            health.append(cluster.check_progress(learner))
            if END not in learner.lines("home/systemctl"):
                cluster.lose(learner)
                cluster.add_new()
        assert health == ["Unhealthy", "Healthy"]
        assert END in learner.lines("home/systemctl")
        learner.end_cluster()
    assert sizes("cartpole-3", endpoint) == {"learner": 0, "evaluator": 0, "actor": 0}


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
