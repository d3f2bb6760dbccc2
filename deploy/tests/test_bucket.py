"""The mirror of a run in its cluster's bucket: its objects, its tags, and the hosts that share it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import emulator
import pytest
from terraform_program import ROOT
from test_host import BEGUN, ENV, machine, metadata_service

from apex.cloud.host import command as host_command
from apex.cloud.host.bucket import BucketObjects
from apex.runs.checkpoints.checkpoint import note_newest
from apex.runs.mirror.mirror import Mirror
from apex.runs.mirror.objects import FsspecObjects, Objects
from apexreplay.errors import FINISHED, UsageError
from apexreplay.process.lifecycle import Stop


@pytest.fixture
def s3(aws: Callable[[str], Any]) -> Any:
    client = aws("s3")
    client.create_bucket(Bucket="weights")
    return client


def copy_of(s3: Any, home: Path) -> Mirror:
    return Mirror(BucketObjects(s3, "weights", "pong"), home / "runs/pong", home / "sent.json")


def write(home: Path, name: str, text: str = "x", mode: str = "w") -> None:
    path = home / "runs/pong" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open(mode) as file:
        file.write(text)


def make_run(home: Path) -> None:
    write(home, "manifest.json", "{}")
    save(home, 1)
    write(home, "curves/learner.jsonl", json.dumps({"steps": 1}) + "\n", mode="a")


def save(home: Path, updates: int) -> None:
    write(home, f"checkpoints/{updates:09d}/learner.safetensors", "w")
    write(home, f"checkpoints/{updates:09d}/manifest.json", "{}")
    note_newest(home / "runs/pong/checkpoints", updates)


def objects(s3: Any) -> set[str]:
    return {item["Key"].removeprefix("pong/") for item in s3.list_objects_v2(Bucket="weights").get("Contents", [])}


def test_superseded_checkpoints_and_old_versions_of_curves_expire(s3: Any, tmp_path: Path) -> None:
    def kinds(name: str) -> list[str]:
        tags = s3.get_object_tagging(Bucket="weights", Key=f"pong/{name}")["TagSet"]
        return [tag["Value"] for tag in tags if tag["Key"] == "Kind"]

    make_run(tmp_path)
    copy = copy_of(s3, tmp_path)
    copy.upload("i-1")
    first, second = (f"checkpoints/00000000{number}/learner.safetensors" for number in (1, 2))
    assert (kinds(first), kinds("manifest.json"), kinds("curves/learner.jsonl")) == ([], [], ["curve"])
    save(tmp_path, 2)
    copy.upload("i-1")
    assert (kinds(first), kinds(second)) == (["checkpoint"], [])
    bucket = (ROOT / "bucket/bucket.tf").read_text()
    rules = re.findall(r'key += "Kind".*\n +value = "(.*)"', bucket)
    assert rules == ["checkpoint", "curve"]
    curves = re.findall(r'  rule {\n    id     = "curves".*?\n  }\n', bucket, re.DOTALL)
    assert ("\n    expiration" in curves[0], "noncurrent_days = 1\n" in curves[0]) == (False, True)


@pytest.fixture(params=["bucket", "fsspec"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Objects:
    """The objects of a run in the emulator's bucket, as a cluster's host and as any other host accesses them."""
    endpoint = request.getfixturevalue("endpoint")
    s3, name = emulator.client("s3", endpoint), f"mirrors-{request.param}"
    s3.create_bucket(Bucket=name)
    if request.param == "bucket":
        return BucketObjects(s3, name, "pong")
    return fsspec_objects(name, endpoint, monkeypatch)


def fsspec_objects(bucket: str, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> FsspecObjects:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(variable, "emulated")
    return FsspecObjects(f"s3://{bucket}/pong")


def test_a_new_host_restores_the_run(store: Objects, tmp_path: Path) -> None:
    make_run(tmp_path / "old")
    old, new = (Mirror(store, tmp_path / name / "runs/pong", tmp_path / name / "sent.json") for name in ("old", "new"))
    assert not old.begin(BEGUN, "i-1")
    assert old.newest_update() == -1
    old.upload("i-1")
    write(tmp_path / "old", "curves/learner.jsonl", json.dumps({"steps": 2}) + "\n", mode="a")
    old.upload("i-1")
    (tmp_path / "new").mkdir()
    assert new.begin(BEGUN, "i-2")
    new.restore()
    for name in ("checkpoints/000000001/learner.safetensors", "curves/learner.jsonl", "checkpoints/newest.json"):
        assert (tmp_path / "new/runs/pong" / name).read_bytes() == (tmp_path / "old/runs/pong" / name).read_bytes()
    assert new.upload("i-2") == 0
    save(tmp_path / "new", 2)
    assert new.upload("i-2") == 3
    assert store.has("checkpoints/000000001/manifest.json") == isinstance(store, BucketObjects)
    with pytest.raises(RuntimeError, match="i-2"):
        old.upload("i-1")


def test_a_bucket_that_does_not_exist_is_refused(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"s3://absent/pong: .*does not exist"):
        fsspec_objects("absent", endpoint, monkeypatch).write("begun.json", b"{}")


def prepare(client: Any, settings: Any, own: str = "i-1") -> bool:
    with metadata_service(own=own) as metadata:
        return host_command.prepare_run(settings, client, metadata, Stop())


def test_the_hosts_of_one_cluster_share_a_run(aws: Any, s3: Any, tmp_path: Path) -> None:
    first, second = (machine(tmp_path, "learner", name=name) for name in ("first", "second"))
    earlier = machine(tmp_path, "learner", name="earlier", begun="2025-01-02T03:04:05Z")
    assert prepare(aws, earlier)
    for _ in range(2):  # The learner's program began, and restarted before it had created its run.
        assert prepare(aws, first), "the earlier cluster has made no run"
        assert objects(s3) == {"begun.json"}
        assert not first.run.exists()
    make_run(first.home)
    copy_of(s3, first.home).upload("i-1")
    assert prepare(aws, second, "i-2")
    assert (second.run / "checkpoints/000000001/learner.safetensors").exists()
    with pytest.raises(UsageError, match="s3://weights/pong"):
        prepare(aws, earlier)


def test_a_run_is_refused_without_a_bucket(
    aws: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_command, "BUCKET_SECONDS", 0.1)
    monkeypatch.setattr(host_command, "LOOK_SECONDS", 0.1)
    with pytest.raises(UsageError, match=r"s3://weights/pong.*NoSuchBucket"):
        prepare(aws, machine(tmp_path, "learner"))
    messages = [record for record in caplog.records if record.name == "apex"]  # boto3 also logs.
    assert len(messages) == 1


def test_an_inaccessible_bucket_is_tried_again(aws: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_command, "LOOK_SECONDS", 0.1)
    asked = []

    def client(service: str) -> Any:
        asked.append(service)
        if len(asked) == 3:
            aws("s3").create_bucket(Bucket="weights")
        return aws(service)

    assert prepare(client, machine(tmp_path, "learner"))
    assert len(asked) == 3


def test_only_a_learner_without_a_run_claims_the_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cluster.env").write_text(ENV)
    calls: list[str] = []
    monkeypatch.setattr(host_command, "aws_clients", lambda settings: None)
    monkeypatch.setattr(host_command, "prepare_run", lambda *_: bool(calls.append("prepare")))
    monkeypatch.setattr(host_command, "_become", lambda settings, role, only_print: calls.append(role))
    command = ["--etc", str(tmp_path), "--home", str(tmp_path), "role"]
    assert host_command.main([*command, "learner"]) == FINISHED  # A stop was requested while it waited.
    host_command.main([*command, "replay"])
    make_run(tmp_path)
    host_command.main([*command, "learner"])
    assert calls == ["prepare", "replay", "learner"]
