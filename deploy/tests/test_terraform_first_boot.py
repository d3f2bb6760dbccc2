"""The images and the user data of a host's first boot."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import emulator
import pytest
import yaml
from conftest import NAME, Cluster
from rules import user_data
from terraform_program import Plan, resources

from apex.cloud.host.settings import read_settings
from apex.config import Config, load_toml
from apex.runtime.hardware import Machine
from apex.schema import Schema
from apex.sizing import bytes_per_transition, size_to_machine
from apex.transport.curve.key_store import lists_for

pytestmark = pytest.mark.xdist_group("cluster")
KINDS = {"learner": ("learner", "replay"), "evaluator": ("evaluator",), "actor": ("actor",)}
TOML = {"learner", "actor"}  # roles with settings of their own


@pytest.fixture(scope="module")
def documents(cluster: Cluster) -> dict[str, str]:
    return user_data(resources(cluster.first_plan["planned_values"]))


@pytest.fixture(scope="module")
def apart(cluster: Cluster, scratch: Path) -> Plan:
    """The plan of a new cluster whose replay server has its own host.

    There are a newer CPU image that was built alone, and a newer GPU image that is not available.
    """
    ec2 = emulator.client("ec2", cluster.endpoint)
    newer = emulator.register_images(cluster.endpoint, "fedcba9")
    ec2.disable_image(ImageId=newer[1])
    terraform = cluster.terraform.copy(scratch / "apart")
    (terraform.folder / "terraform.tfstate").unlink()
    plan = terraform.plan("-var=replay_host=own")
    for image in newer:
        ec2.deregister_image(ImageId=image)
    return plan


def files(text: str) -> dict[str, str]:
    return {file["path"]: file["content"] for file in yaml.safe_load(text)["write_files"]}


def config(role: str, documents: dict[str, str], folder: Path) -> Config:
    path = folder / f"{role}.toml"
    path.write_text(files(documents[role])[f"/etc/apex/{role}.toml"])
    return load_toml(path)


def test_both_images_are_of_one_commit(cluster: Cluster, apart: Plan) -> None:
    templates = [item for item in resources(apart["planned_values"]) if item["type"] == "aws_launch_template"]
    used = {item["values"]["image_id"] for item in templates}
    images = emulator.client("ec2", cluster.endpoint).describe_images(ImageIds=[*used])["Images"]
    tags = [{tag["Key"]: tag["Value"] for tag in image["Tags"]} for image in images]
    assert {(tag["Role"], tag["Commit"]) for tag in tags} == {("cpu", emulator.COMMIT), ("gpu", emulator.COMMIT)}


@pytest.mark.parametrize("kind", KINDS)
def test_cloud_init_accepts_the_user_data(kind: str, documents: dict[str, str], tmp_path: Path) -> None:
    sources = os.environ.get("APEX_CLOUD_INIT")
    if not sources:
        pytest.skip("no cloud-init: deploy/test.sh says why")
    path = tmp_path / "user-data"
    path.write_text(documents[kind])
    done = subprocess.run(
        [sys.executable, "-m", "cloudinit.cmd.main", "schema", "--config-file", str(path)],
        env={**os.environ, "PYTHONPATH": sources, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Valid cloud-config" in done.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_boot_writes_settings_and_starts_the_units(
    kind: str, documents: dict[str, str], tmp_path: Path
) -> None:
    assert set(documents) == set(KINDS)
    document: dict[str, Any] = yaml.safe_load(documents[kind])
    toml = {f"/etc/apex/{role}.toml" for role in TOML & set(KINDS[kind])}
    assert set(files(documents[kind])) == {"/etc/apex/cluster.env"} | toml
    units = [f"apex@{role}.service" for role in KINDS[kind]]
    assert document["runcmd"] == [["systemctl", "enable", "--now", "--no-block", *units]]
    assert set(document) == {"package_update", "package_upgrade", "write_files", "runcmd"}
    assert {document["package_update"], document["package_upgrade"]} == {False}
    text = files(documents[kind])["/etc/apex/cluster.env"]
    (tmp_path / "cluster.env").write_text(text)
    settings = read_settings(tmp_path)
    assert (settings.cluster, settings.roles, settings.role) == (NAME, KINDS[kind], kind)
    assert (settings.region, settings.bucket) == ("us-east-1", "apex-test-checkpoints")
    assert settings.group(kind) == f"apex-{NAME}-{kind}"
    assert abs(datetime.fromisoformat(settings.begun) - datetime.now(UTC)) < timedelta(hours=1)
    assert "APEX_MAX_HOURS=24\n" in text
    assert settings.stall_minutes == 60


def test_learner_and_actors_have_the_requested_settings(documents: dict[str, str], tmp_path: Path) -> None:
    learner = config("learner", documents, tmp_path)
    assert learner.environment.id == "ALE/Breakout-v5"
    assert (learner.learner.batch_size, learner.learner.optimizer, learner.learner.learning_rate) == (256, "adam", 1e-4)
    assert learner.run.stop_score == 18
    assert learner.learner.device == "cuda"
    assert learner.actor.num_actors == 3 * 8 * 16
    actor = config("actor", documents, tmp_path).actor
    assert (actor.num_processes, actor.envs_per_process) == (8, 16)  # as many streams as the cores can step


def test_the_replay_memory_is_sized_by_the_learners_host_or_by_its_own(
    documents: dict[str, str], tmp_path: Path, apart: Plan
) -> None:
    assert config("learner", documents, tmp_path).replay.host_bytes == 0
    learner = config("learner", user_data(resources(apart["planned_values"])), tmp_path)
    assert learner.replay.host_bytes == 64 * 2**30  # an r7i.2xlarge; the learner's g6.2xlarge has half of its memory
    schema = Schema(frame_shape=(84, 84), frame_dtype="uint8", stack=4, num_actions=4, n_step=3, codec="lz4")
    sized = size_to_machine(learner, Machine(cores=8, memory_bytes=2**30, gpu=True), schema).config
    assert sized.replay.max_bytes // bytes_per_transition(sized, schema) == learner.replay.capacity == 2_000_000


@pytest.mark.parametrize("kind", KINDS)
def test_a_host_may_read_needed_keys_and_write_only_its_own(kind: str, cluster: Cluster) -> None:
    (policy,) = (
        item["values"]["policy"]
        for item in resources(cluster.first_plan["planned_values"])
        if item["type"] == "aws_iam_role_policy" and item.get("index") == kind
    )
    statements = {item["Sid"]: item["Resource"] for item in yaml.safe_load(policy)["Statement"]}
    below = f"parameter/apex/{NAME}/keys/"

    def roles(sid: str) -> set[str]:
        found = statements[sid] if isinstance(statements[sid], list) else [statements[sid]]
        return {arn.split(below)[1].removesuffix("/*") for arn in found}

    # The host creates its own keys and those of the observer there.
    assert roles("ReadOthersKeys") == {other for role in KINDS[kind] for other in lists_for(role)} - {
        *KINDS[kind],
        "observer",
    }
    assert roles("PublishOwnKeys") == set(KINDS[kind])
