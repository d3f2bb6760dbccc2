"""What a host is told at its first boot."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import NAME, Planned
from rules import user_data
from terraform_program import resources

from apex.config import Config, load_toml
from apex.config.sizing import Machine, bytes_per_transition, size_to_machine
from apex.transport.curve.key_store import lists_for
from apex.types import Schema

ROLES = ("replay", "learner", "evaluator", "actor")


@pytest.fixture(scope="module")
def told(planned: Planned) -> dict[str, str]:
    return user_data(resources(planned.first_plan["planned_values"]))


def files(text: str) -> dict[str, str]:
    return {file["path"]: file["content"] for file in yaml.safe_load(text)["write_files"]}


def config(role: str, told: dict[str, str], folder: Path) -> Config:
    path = folder / f"{role}.toml"
    path.write_text(files(told[role])[f"/etc/apex/{role}.toml"])
    return load_toml(path)


def test_every_role_is_told_before_anything_is_made(told: dict[str, str]) -> None:
    assert set(told) == set(ROLES)


@pytest.mark.parametrize("role", ROLES)
def test_cloud_init_accepts_it(role: str, told: dict[str, str], tmp_path: Path) -> None:
    sources = os.environ.get("APEX_CLOUD_INIT")
    if not sources:
        pytest.skip("no cloud-init: deploy/test.sh says why")
    path = tmp_path / "user-data"
    path.write_text(told[role])
    done = subprocess.run(
        [sys.executable, "-m", "cloudinit.cmd.main", "schema", "--config-file", str(path)],
        env={**os.environ, "PYTHONPATH": sources, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Valid cloud-config" in done.stdout


@pytest.mark.parametrize("role", ROLES)
def test_it_writes_two_files_and_starts_one_unit(role: str, told: dict[str, str]) -> None:
    document: dict[str, Any] = yaml.safe_load(told[role])
    assert set(files(told[role])) == {"/etc/apex/cluster.env", f"/etc/apex/{role}.toml"}
    assert document["runcmd"] == [["systemctl", "enable", "--now", "--no-block", f"apex@{role}.service"]]
    assert set(document) == {"package_update", "package_upgrade", "write_files", "runcmd"}
    assert not document["package_update"]
    assert not document["package_upgrade"]


@pytest.mark.parametrize("role", ROLES)
def test_the_host_knows_its_place(role: str, told: dict[str, str]) -> None:
    lines = files(told[role])["/etc/apex/cluster.env"].splitlines()
    assert dict(line.split("=") for line in lines) == {
        "APEX_CLUSTER": NAME,
        "APEX_ROLE": role,
        "APEX_REGION": "us-east-1",
        "APEX_BUCKET": "apex-test-checkpoints",
        "APEX_LEARNER": "10.77.0.11",
        "APEX_REPLAY": "10.77.0.10",
        "APEX_MAX_HOURS": "24",
        "APEX_ACTOR_GROUP": f"apex-{NAME}-actors",
    }


def test_the_learner_trains_what_was_asked(told: dict[str, str], tmp_path: Path) -> None:
    learner = config("learner", told, tmp_path)
    assert learner.environment.id == "ALE/Breakout-v5"
    assert (learner.learner.batch_size, learner.learner.optimizer, learner.learner.learning_rate) == (256, "adam", 1e-4)
    assert learner.run.stop_score == 18
    assert learner.run.name == NAME
    assert learner.actor.num_actors == 3 * 8 * 16
    assert (learner.transport.bind, learner.transport.keys) == ("10.77.0.11", "/var/lib/apex/keys")


def test_the_replay_memory_is_sized_by_its_own_host(told: dict[str, str], tmp_path: Path) -> None:
    learner = config("learner", told, tmp_path)
    assert learner.replay.host_bytes == 64 * 2**30  # an r7i.2xlarge; the learner's g6.2xlarge has half of it
    schema = Schema(frame_shape=(84, 84), frame_dtype="uint8", stack=4, num_actions=4, n_step=3, codec="lz4")
    sized = size_to_machine(learner, Machine(cores=8, memory_bytes=2**30, gpu=True), schema)
    assert sized.replay.max_bytes // bytes_per_transition(sized, schema) == learner.replay.capacity == 2_000_000


def test_actor_hosts_step_what_their_cores_bear(told: dict[str, str], tmp_path: Path) -> None:
    actor = config("actor", told, tmp_path).actor
    assert (actor.num_processes, actor.envs_per_process) == (8, 16)


@pytest.mark.parametrize(("role", "address"), [("replay", "10.77.0.10"), ("learner", "10.77.0.11")])
def test_who_binds_binds_the_address_that_is_fixed(
    role: str, address: str, told: dict[str, str], tmp_path: Path, planned: Planned
) -> None:
    assert config(role, told, tmp_path).transport.bind == address
    (host,) = (
        item for item in resources(planned.first_plan["planned_values"]) if item["address"] == f"aws_instance.{role}"
    )
    assert host["values"]["private_ip"] == address


@pytest.mark.parametrize("role", ROLES)
def test_no_socket_is_without_keys(role: str, told: dict[str, str], tmp_path: Path) -> None:
    assert config(role, told, tmp_path).transport.keys == "/var/lib/apex/keys"


@pytest.mark.parametrize("role", ROLES)
def test_a_host_may_read_the_keys_that_it_checks_and_write_its_own_alone(role: str, planned: Planned) -> None:
    (policy,) = (
        item["values"]["policy"]
        for item in resources(planned.first_plan["planned_values"])
        if item["type"] == "aws_iam_role_policy" and item.get("index") == role
    )
    statements = {item["Sid"]: item["Resource"] for item in yaml.safe_load(policy)["Statement"]}
    below = f"parameter/apex/{NAME}/keys/"
    expected = {other for other in lists_for(role) if other != "observer"}  # made on the learner's host
    assert {arn.split(below)[1].removesuffix("/*") for arn in statements["ReadOthersKeys"]} == expected
    assert statements["PublishOwnKey"].split(below)[1] == f"{role}/*"
