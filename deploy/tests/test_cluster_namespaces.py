"""The cluster that Terraform applies, run: every instance is a machine in namespaces, with its address and its groups.

The hosts boot from their user data and run the units' own commands, from making keys to the learner's end. There is one
run, in which an actor host is lost, the learner's host is cut off, and then lost; each test is a claim about it.
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
    Told,
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
NO_SETTINGS = ("environment.id", "actor.num_actors")  # variables of their own

MISSING = namespaces.missing() or ("" if shutil.which("terraform") else "not installed: terraform")

pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=MISSING),
    pytest.mark.timeout(2400),
]  # beyond the run's own deadlines


def preset_settings() -> dict[str, dict[str, Any]]:
    """The preset as the variable `settings` has it: what differs from the defaults."""
    default, settings = flatten(Config()), {}
    for name, value in flatten(PRESETS["cartpole"].config).items():
        section, _, setting = name.partition(".")
        if value != default[name] and name not in NO_SETTINGS:
            settings.setdefault(section, {})[setting] = value
    return settings


@pytest.fixture(scope="module")
def apply(scratch: Path, installed: tuple[dict[str, str], Path], endpoint: str) -> Callable[..., str]:
    """Applies a cluster of this name, with these variables beside those of all; returns the AWS."""
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
    """The AWS, with the cluster."""
    return apply(NAME, settings=preset_settings())


@pytest.fixture(scope="module")
def told(applied: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    """The whole run. Every wait has a deadline, and whatever happens every machine ends."""
    cluster = NamespacedCluster(applied, tmp_path_factory.mktemp("hosts"))
    try:
        yield tell(cluster, partial(emulator.client, endpoint=applied), NAME)
    except BaseException:
        print(cluster.said())
        raise
    finally:
        cluster.close()  # Fails if a process is left; namespaces and memory files go with the last one.


def elsewhere(doors: dict[str, set[Door]]) -> dict[str, set[Door]]:
    """By whose address it was tried from, without that address's own doors."""
    return {address: {door for door in found if door[0] != address} for address, found in doors.items()}


def test_a_learner_host_that_is_lost_is_replaced_and_the_run_ends_well(told: Told) -> None:
    assert told.learner.ended("apex@learner.service") == ["0"]
    assert f"reached the score {PRESETS['cartpole'].config.run.stop_score:g}" in told.learner.said()
    assert told.learner.address != told.at, "the new host has the old one's address: nobody had to find it"


def test_the_new_learner_goes_on_from_the_bucket_and_loses_little(told: Told) -> None:
    assert told.resumed_at > 0
    kept = [row for row in told.rows_lost if row["scalars"]["learner/updates"] <= told.resumed_at]
    seconds_lost = told.rows_lost[-1]["time"] - kept[-1]["time"]
    print(f"resumed at update {told.resumed_at}, lost {told.updates_lost} updates, {seconds_lost:.0f} s")
    assert seconds_lost <= LOST_SECONDS


def test_curves_have_each_step_once(told: Told) -> None:
    """The rows of the lost host up to the checkpoint, as they were; then those of the new host, which count on."""
    times = [row["time"] for row in told.rows]
    before = [row for row in told.rows if row["time"] <= told.rows_lost[-1]["time"]]
    assert before == told.rows_lost[: len(before)]
    assert 0 < len(before) < len(told.rows)
    assert times == sorted(set(times))
    for name in ("steps", "learner/updates"):
        counts = [row.get(name, row["scalars"].get(name)) for row in told.rows]
        assert counts == sorted(counts), name


def test_its_weights_and_curves_are_kept(told: Told, applied: str) -> None:
    found = emulator.client("s3", applied).list_objects_v2(Bucket=emulator.BUCKET, Prefix=f"{NAME}/c")
    names = {entry["Key"].removeprefix(f"{NAME}/") for entry in found["Contents"]}
    assert {"checkpoints/best.safetensors", "curves/learner.jsonl"} <= names


def test_its_groups_are_at_zero(told: Told, applied: str) -> None:
    groups = emulator.client("autoscaling", applied).describe_auto_scaling_groups()["AutoScalingGroups"]
    assert {group["AutoScalingGroupName"]: group["DesiredCapacity"] for group in groups} == {
        f"apex-{NAME}-{kind}": 0 for kind in ("learner", "evaluator", "actor")
    }


def test_a_socket_is_open_to_the_roles_that_use_it_and_to_nobody_else(told: Told) -> None:
    transport = TransportConfig()
    bound = {name: (told.at, transport.port(name)) for name in SOCKETS}  # learner and replay server share a host
    found = elsewhere(told.open)
    assert len(found) == 7  # five hosts and two people
    for address, doors in found.items():
        expected = {bound[name] for name in SOCKETS if told.roles.get(address) in MAY_REACH[name]}
        expected = set() if address == told.at else expected
        assert {door for door in doors if door[1] != TENSORBOARD} == expected, address


def test_tensorboard_is_the_admins_alone(told: Told) -> None:
    door = told.at, TENSORBOARD
    assert {address for address, doors in elsewhere(told.open).items() if door in doors} == {ADMIN}
    assert told.curves.keys() == {ADMIN, STRANGER}
    assert told.curves[ADMIN] != []
    assert told.curves[STRANGER] == []


def test_nobody_is_let_through_where_nobody_listens(told: Told) -> None:
    """As to SSH, for which these hosts have no key pair: whoever got there would be refused, and hear of it."""
    assert set().union(*elsewhere(told.refused).values()) == set()


def test_the_ids_of_a_host_that_died_are_leased_again(told: Told) -> None:
    assert told.heirless_seconds <= HEIRLESS_SECONDS
    assert len(told.dead_ids) == PER_HOST
    assert len(told.after_death.streams) == NUM_ACTORS
    for actor_id, (before, after) in enumerate(zip(told.before_death.streams, told.after_death.streams, strict=True)):
        assert (after.incarnation > before.incarnation) == (actor_id in told.dead_ids)


def test_a_learner_host_that_was_cut_off_goes_on_and_has_lost_nothing(told: Told) -> None:
    """All that was under way came: each stream is stored up to a segment that no window held then, without a gap."""
    assert told.in_cut[0].num_inserted == told.in_cut[1].num_inserted
    before, after = told.before_cut, told.after_cut
    assert after.num_inserted > told.in_cut[1].num_inserted
    assert after.incarnation == told.before_death.incarnation
    window = PRESETS["cartpole"].config.actor.window
    for old, new in zip(before.streams, after.streams, strict=True):
        assert new.incarnation == old.incarnation
        assert new.contiguous > old.contiguous + window
        assert new.bitmap == 0


def test_no_program_failed(told: Told) -> None:
    ended = {host.name: host.ended(f"apex@{host.role}.service") for host in told.hosts.values()}
    assert set().union(*ended.values()) == {"0"}, ended


def test_a_replay_server_on_a_host_of_its_own_feeds_every_loader(
    apply: Callable[..., str], told: Told, tmp_path: Path
) -> None:
    """Of another cluster, after the end of the first: each loader has a port of its own."""
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
        print(cluster.said())
        raise
    finally:
        cluster.close()


def test_machines_end_with_the_tests_even_where_these_are_killed(tmp_path: Path) -> None:
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
