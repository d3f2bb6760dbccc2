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
from functools import partial
from pathlib import Path
from typing import Any

import emulator
import namespaces
import pytest
from namespaced_cluster import NamespacedCluster
from namespaced_run import (
    ADMIN,
    BUSY_SECONDS,
    SOCKETS,
    START_SECONDS,
    STRANGER,
    TENSORBOARD,
    Door,
    Observations,
    boot_hosts,
    connected_from,
    status_of,
    tell,
)
from namespaces import wait_until
from rules import MAY_REACH
from terraform_program import Terraform

from apex.config import Config, TransportConfig, flatten
from apex.config.presets import PRESETS

NAME = "cartpole-1"
NUM_ACTORS, PER_HOST = 12, 4  # 3 hosts of 2 cores with 2 streams each
HEIRLESS_SECONDS = 30.0
LOST_SECONDS = 300.0  # of updates
NO_SETTINGS = ("environment.id", "actor.num_actors")  # variables of this cluster only

MISSING = namespaces.missing() or ("" if shutil.which("terraform") else "not installed: terraform")

pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=MISSING),
    pytest.mark.timeout(2400),
]  # longer than the run's own deadlines


def preset_settings() -> dict[str, dict[str, Any]]:
    """Returns the preset as a value of the variable `settings`: the settings that differ from the defaults."""
    default, settings = flatten(Config()), {}
    for name, value in flatten(PRESETS["cartpole"].config).items():
        section, _, setting = name.partition(".")
        if value != default[name] and name not in NO_SETTINGS:
            settings.setdefault(section, {})[setting] = value
    return settings


@pytest.fixture(scope="module")
def apply(scratch: Path, installed: tuple[dict[str, str], Path], endpoint: str) -> Callable[..., str]:
    """Applies a cluster of this name with these additional variables; yields the AWS."""
    settings, data = installed

    def apply(name: str, **variables: Any) -> str:
        terraform = Terraform(scratch / name, {**settings, **emulator.environment(endpoint)}, data)
        terraform.set(
            name=name,
            admin_cidrs=[f"{ADMIN}/32"],
            bucket=emulator.BUCKET,
            environment="CartPole-v1",
            actor_instance_types=["c7i.large"],
            streams_per_core=2,
            **variables,
        )
        terraform.run("apply", "-auto-approve", "-input=false", "-no-color")
        return endpoint

    return apply


@pytest.fixture(scope="module")
def applied(apply: Callable[..., str]) -> str:
    """The AWS with the cluster."""
    return apply(NAME, settings=preset_settings())


@pytest.fixture(scope="module")
def observed(applied: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observations]:
    """The whole run. Every wait has a deadline, and all machines end in any case."""
    cluster = NamespacedCluster(applied, tmp_path_factory.mktemp("hosts"))
    try:
        yield tell(cluster, partial(emulator.client, endpoint=applied), NAME)
    except BaseException:
        print(cluster.logs())
        raise
    finally:
        cluster.close()  # Fails if a process remains; namespaces and memory files end with the last one.


def elsewhere(doors: dict[str, set[Door]]) -> dict[str, set[Door]]:
    """Returns the open ports by the address of the connecting machine, without that machine's own ports."""
    return {address: {door for door in found if door[0] != address} for address, found in doors.items()}


def test_a_lost_learner_host_is_replaced_and_the_run_ends_normally(observed: Observations) -> None:
    assert observed.learner.ended("apex@learner.service") == ["0"]
    assert f"reached the score {PRESETS['cartpole'].config.run.stop_score:g}" in observed.learner.logs()
    assert observed.learner.address != observed.at, "the new host has the old one's address: nobody had to find it"


def test_the_new_learner_continues_from_the_bucket(observed: Observations) -> None:
    assert observed.resumed_at > 0
    kept = [row for row in observed.rows_lost if row["scalars"]["learner/updates"] <= observed.resumed_at]
    seconds_lost = observed.rows_lost[-1]["time"] - kept[-1]["time"]
    print(f"resumed at update {observed.resumed_at}, lost {observed.updates_lost} updates, {seconds_lost:.0f} s")
    assert seconds_lost <= LOST_SECONDS


def test_curves_have_each_step_once(observed: Observations) -> None:
    """The curve has the rows of the lost host up to the checkpoint, then those of the new host, which continue."""
    times = [row["time"] for row in observed.rows]
    before = [row for row in observed.rows if row["time"] <= observed.rows_lost[-1]["time"]]
    assert before == observed.rows_lost[: len(before)]
    assert 0 < len(before) < len(observed.rows)
    assert times == sorted(set(times))
    for name in ("steps", "learner/updates"):
        counts = [row.get(name, row["scalars"].get(name)) for row in observed.rows]
        assert counts == sorted(counts), name


def test_the_bucket_keeps_weights_and_curves(observed: Observations, applied: str) -> None:
    found = emulator.client("s3", applied).list_objects_v2(Bucket=emulator.BUCKET, Prefix=f"{NAME}/c")
    names = {entry["Key"].removeprefix(f"{NAME}/") for entry in found["Contents"]}
    assert {"checkpoints/best.safetensors", "curves/learner.jsonl"} <= names


def test_all_groups_have_size_zero_after_the_run(observed: Observations, applied: str) -> None:
    groups = emulator.client("autoscaling", applied).describe_auto_scaling_groups()["AutoScalingGroups"]
    assert {group["AutoScalingGroupName"]: group["DesiredCapacity"] for group in groups} == {
        f"apex-{NAME}-{kind}": 0 for kind in ("learner", "evaluator", "actor")
    }


def test_a_socket_is_open_only_to_the_roles_that_use_it(observed: Observations) -> None:
    transport = TransportConfig()
    bound = {name: (observed.at, transport.port(name)) for name in SOCKETS}  # learner and replay server share a host
    found = elsewhere(observed.open)
    assert len(found) == 7  # five hosts and two people
    for address, doors in found.items():
        expected = {bound[name] for name in SOCKETS if observed.roles.get(address) in MAY_REACH[name]}
        expected = set() if address == observed.at else expected
        assert {door for door in doors if door[1] != TENSORBOARD} == expected, address


def test_only_the_admin_reaches_tensorboard(observed: Observations) -> None:
    door = observed.at, TENSORBOARD
    assert {address for address, doors in elsewhere(observed.open).items() if door in doors} == {ADMIN}
    assert observed.curves.keys() == {ADMIN, STRANGER}
    assert observed.curves[ADMIN] != []
    assert observed.curves[STRANGER] == []


def test_ports_without_a_listener_are_closed(observed: Observations) -> None:
    """SSH, for which these hosts have no key pair: connections that get through are refused, and not ignored."""
    assert set().union(*elsewhere(observed.refused).values()) == set()


def test_the_actor_ids_of_a_dead_host_are_leased_again(observed: Observations) -> None:
    assert observed.heirless_seconds <= HEIRLESS_SECONDS
    assert len(observed.dead_ids) == PER_HOST
    assert len(observed.after_death.streams) == NUM_ACTORS
    for actor_id, (before, after) in enumerate(
        zip(observed.before_death.streams, observed.after_death.streams, strict=True)
    ):
        assert (after.incarnation > before.incarnation) == (actor_id in observed.dead_ids)


def test_a_disconnected_learner_host_continues_and_loses_nothing(observed: Observations) -> None:
    """All segments in flight arrived: each stream is stored beyond the window of that time, without a gap."""
    assert observed.in_cut[0].num_inserted == observed.in_cut[1].num_inserted
    before, after = observed.before_cut, observed.after_cut
    assert after.num_inserted > observed.in_cut[1].num_inserted
    assert after.incarnation == observed.before_death.incarnation
    window = PRESETS["cartpole"].config.actor.window
    for old, new in zip(before.streams, after.streams, strict=True):
        assert new.incarnation == old.incarnation
        assert new.contiguous > old.contiguous + window
        assert new.bitmap == 0


def test_no_program_failed(observed: Observations) -> None:
    ended = {host.name: host.ended(f"apex@{host.role}.service") for host in observed.hosts.values()}
    assert set().union(*ended.values()) == {"0"}, ended


def test_a_replay_server_on_its_own_host_feeds_every_loader(
    apply: Callable[..., str], observed: Observations, tmp_path: Path
) -> None:
    """Another cluster runs after the end of the first; each loader has its own port."""
    name, settings = "cartpole-2", preset_settings()
    settings["learner"]["num_loaders"] = 2
    aws = partial(emulator.client, endpoint=apply(name, settings=settings, replay_host="own", actor_hosts=1))
    cluster = NamespacedCluster(aws("ec2").meta.endpoint_url, tmp_path)
    try:
        cluster.add_new()
        (learner,), (replay,) = cluster.of("learner"), cluster.of("replay")
        boot_hosts(cluster, aws("ssm"), name, *cluster.hosts.values())
        wait_until(lambda: status_of(learner).updates > 20, "updates", START_SECONDS)
        for loader in range(2):
            port = TransportConfig().port("batches", loader)
            wait_until(lambda at=port: replay.address in connected_from(learner, at), "a sampler", BUSY_SECONDS)
    except BaseException:
        print(cluster.logs())
        raise
    finally:
        cluster.close()


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
    namespaces.wait_until(lambda: machine not in namespaces.process_namespaces(), "the machine's end")
