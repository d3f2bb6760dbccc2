"""The copy of a run in its bucket: its contents, its cost, and the restore on a new learner host."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_host import BEGUN, ENV, machine, metadata_service

from apex.cloud.host import command as host_command
from apex.cloud.host.bucket import RunBucket
from apex.config import Config, RunConfig
from apex.runs.checkpoints.checkpoint import note_newest
from apex.runs.folder import RunFolder
from apex.runs.metrics.writer import cut_curves
from apex.schema import Schema
from apexreplay.errors import FINISHED, UsageError
from apexreplay.process.lifecycle import Stop

GROWING = ("curves/", "tensorboard/")


@pytest.fixture
def s3(aws: Callable[[str], Any]) -> Any:
    client = aws("s3")
    client.create_bucket(Bucket="weights")
    return client


def copy_of(s3: Any, home: Path) -> RunBucket:
    return RunBucket(s3, "weights", home / "runs/pong", home / "sent.json")


def write(home: Path, name: str, text: str = "x", mode: str = "w") -> None:
    path = home / "runs/pong" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open(mode) as file:
        file.write(text)


def checkpoint(home: Path, updates: int, size: int = 1) -> None:
    write(home, f"checkpoints/{updates:09d}/learner.safetensors", "w" * size)
    write(home, f"checkpoints/{updates:09d}/manifest.json", "{}")
    note_newest(home / "runs/pong/checkpoints", updates)


def begun(s3: Any, home: Path, host: str = "i-1") -> RunBucket:
    """Creates a run and uploads it."""
    make_run(home)
    copy = copy_of(s3, home)
    copy.begin(BEGUN, host)
    copy.upload(host)
    return copy


def make_run(home: Path) -> None:
    write(home, "manifest.json", "{}")
    checkpoint(home, 1)
    for name in ("logs/learner.log", "checkpoints/replay/segments", "checkpoints/.partial/x", "epoch.json"):
        write(home, name)
    write(home, "curves/learner.jsonl", row(1), mode="a")
    write(home, "tensorboard/pong/events", "e1", mode="a")


def row(steps: int) -> str:
    return json.dumps({"steps": steps}) + "\n"


def objects(s3: Any) -> set[str]:
    return {item["Key"].removeprefix("pong/") for item in s3.list_objects_v2(Bucket="weights").get("Contents", [])}


def files(home: Path, *folders: str) -> dict[str, bytes]:
    run = home / "runs/pong"
    found = {path.relative_to(run).as_posix(): path for path in run.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if name.startswith(folders or "")}


def test_the_run_goes_to_the_bucket_and_stays_there(s3: Any, tmp_path: Path) -> None:
    make_run(tmp_path)
    copy = copy_of(s3, tmp_path)
    assert len(copy.only_here()) == 6
    copy.upload("i-1")
    whole = {"manifest.json", "checkpoints/newest.json"}
    whole |= {f"checkpoints/000000001/{name}" for name in ("manifest.json", "learner.safetensors")}
    assert {name for name in objects(s3) if not name.startswith("parts/")} == whole
    growing = {"parts/curves/learner.jsonl", "parts/tensorboard/pong/events"}
    assert {name.rpartition("/")[0] for name in objects(s3) - whole} == growing
    assert copy.upload("i-1") == 0
    (tmp_path / "runs/pong/checkpoints/000000001/learner.safetensors").unlink()
    assert copy.upload("i-1") == 0
    assert objects(s3) >= whole
    write(tmp_path, "tensorboard/pong/events", "more", mode="a")
    checkpoint(tmp_path, 2)
    assert set(copy.only_here()) == {
        "tensorboard/pong/events",
        "checkpoints/000000002/learner.safetensors",
        "checkpoints/000000002/manifest.json",
        "checkpoints/newest.json",
    }


def test_the_newest_checkpoint_is_recorded_only_after_its_files(tmp_path: Path) -> None:
    class Slow(MemoryBucket):
        """A checkpoint is written during the first upload."""

        def upload_file(self, path: str, bucket: str, key: str, ExtraArgs: Any = None) -> None:  # noqa: N803
            super().upload_file(path, bucket, key, ExtraArgs)
            if not (tmp_path / "runs/pong/checkpoints/000000002").exists():
                checkpoint(tmp_path, 2)

        def newest(self) -> int:
            return json.loads(self.objects["pong/checkpoints/newest.json"])["num_updates"]

    s3 = Slow()
    copy = begun(s3, tmp_path)
    assert s3.newest() == 1
    s3.uploads.clear()
    copy.upload("i-1")
    assert s3.newest() == 2
    assert [name for name, _ in s3.uploads if not name.startswith("parts/")] == [
        "checkpoints/000000002/learner.safetensors",
        "checkpoints/000000002/manifest.json",
        "checkpoints/newest.json",
    ]
    checkpoint(tmp_path, 3)
    shutil.rmtree(tmp_path / "runs/pong/checkpoints/000000003")
    copy.upload("i-1")
    assert s3.newest() == 2
    checkpoint(tmp_path, 4)
    copy.upload("i-1")
    assert s3.newest() == 4


def test_the_bucket_equals_the_run_folder_at_the_end(s3: Any, tmp_path: Path) -> None:
    make_run(tmp_path)
    copy = copy_of(s3, tmp_path)
    key = "pong/checkpoints/000000001/learner.safetensors"
    # All checkpoints but the last of a run may expire.
    for whole, expected in ((False, [{"Key": "Kind", "Value": "checkpoint"}]), (True, [])):
        copy.upload("i-1", whole=whole)
        assert s3.get_object_tagging(Bucket="weights", Key=key)["TagSet"] == expected
    assert s3.get_object_tagging(Bucket="weights", Key="pong/manifest.json")["TagSet"] == []
    assert copy.only_here() == []
    kept = {name: data for name, data in files(tmp_path).items() if name in objects(s3)}
    assert {"curves/learner.jsonl", "tensorboard/pong/events", "manifest.json"} <= set(kept)
    for name, data in kept.items():
        assert s3.get_object(Bucket="weights", Key=f"pong/{name}")["Body"].read() == data


def restored(s3: Any, home: Path) -> RunBucket:
    home.mkdir()
    copy = copy_of(s3, home)
    assert copy.begin(BEGUN, "i-2")
    copy.restore()
    return copy


def test_a_new_host_restores_the_curves_and_the_newest_checkpoint(s3: Any, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    copy = begun(s3, old)
    for number in range(2, 5):
        checkpoint(old, number)
        write(old, "curves/learner.jsonl", row(number), mode="a")
        copy.upload("i-1")
    after = restored(s3, new)
    left_out = ("logs/", "checkpoints/replay/", "checkpoints/.", "epoch.json")
    left_out += tuple(f"checkpoints/00000000{number}/" for number in range(1, 4))
    expected = {name: data for name, data in files(old).items() if not name.startswith(left_out)}
    assert {name: data for name, data in files(new).items() if not name.startswith("epoch.json")} == expected
    assert after.upload("i-2") == 0, "the bucket has all files already"
    # A replaced host uploads nothing.
    before = objects(s3)
    checkpoint(old, 9)
    with pytest.raises(RuntimeError, match="i-2"):
        copy.upload("i-1")
    assert objects(s3) == before


def test_a_restored_run_has_a_higher_number_of_its_start(s3: Any, tmp_path: Path) -> None:
    schema = Schema(frame_shape=(4,), frame_dtype="float32", stack=1, num_actions=2, n_step=3, codec="raw")
    config = Config(run=RunConfig(name="pong", folder=str(tmp_path / "old/runs")))
    folder = RunFolder.create(config, schema, argv=[])
    epochs = [folder.next_epoch(lambda: 1.8e9) for _ in range(3)]
    copy = copy_of(s3, tmp_path / "old")
    copy.begin(BEGUN, "i-1")
    copy.upload("i-1")
    restored(s3, tmp_path / "new")
    again = RunFolder.open(tmp_path / "new/runs/pong")
    assert again.run_id == folder.run_id
    assert again.next_epoch(lambda: 1.8e9 + 60.0) > max(epochs)


@pytest.mark.parametrize("seed", range(3))
def test_growing_files_are_restored_exactly_after_any_loss(tmp_path: Path, seed: int) -> None:
    """Compares with the files themselves, while rows are added and cut off and hosts lose their state."""
    rng, s3, home, steps = random.Random(seed), MemoryBucket(), tmp_path / "0", 0
    begun(s3, home, "i-2")
    for life in range(1, 30):
        event = rng.random()
        if event < 0.6:
            for _ in range(rng.randrange(4)):
                steps += 1
                write(home, "curves/learner.jsonl", row(steps), mode="a")
                write(home, f"tensorboard/pong/events.{life // 10}", "e" * rng.randrange(9), mode="a")
        elif event < 0.8:  # The learner restarted from an older checkpoint.
            steps = max(1, steps - rng.randrange(9))
            cut_curves(home / "runs/pong/curves", steps, updates=steps)
        elif event < 0.9:
            (home / "sent.json").unlink(missing_ok=True)
        else:
            home = tmp_path / str(life)
            restored(s3, home)
        copy_of(s3, home).upload("i-2")
        restored(s3, tmp_path / f"look-{life}")
        assert files(tmp_path / f"look-{life}", *GROWING) == files(home, *GROWING)


def test_objects_with_paths_outside_the_run_are_refused(s3: Any, tmp_path: Path) -> None:
    begun(s3, tmp_path / "old")
    s3.put_object(Bucket="weights", Key="pong/x/../../../evil", Body=b"x")
    with pytest.raises(UsageError, match="evil"):
        restored(s3, tmp_path / "new")
    assert not list(tmp_path.rglob("evil"))
    assert not (tmp_path / "new/runs/pong").exists()


class MemoryBucket:
    """Replaces the S3 client of a run's copy: keeps objects in memory and records uploads."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.uploads: list[tuple[str, int]] = []  # name and number of bytes

    def put_object(self, Bucket: str, Key: str, Body: bytes) -> None:  # noqa: N803  # boto3's names
        self.objects[Key] = Body
        self.uploads.append((Key.removeprefix("pong/"), len(Body)))

    def upload_file(self, path: str, bucket: str, key: str, ExtraArgs: Any = None) -> None:  # noqa: N803
        self.put_object(bucket, key, Path(path).read_bytes())

    def download_file(self, bucket: str, key: str, path: str) -> None:
        Path(path).write_bytes(self.objects[key])

    def get_object(self, Bucket: str, Key: str) -> dict[str, Any]:  # noqa: N803
        return {"Body": SimpleNamespace(read=lambda: self.objects[Key])}

    def list_objects_v2(self, Bucket: str, Prefix: str, MaxKeys: int = 0) -> dict[str, Any]:  # noqa: N803
        return {"Contents": [{"Key": key} for key in sorted(self.objects) if key.startswith(Prefix)]}

    def get_paginator(self, operation: str) -> Any:
        return SimpleNamespace(paginate=lambda **options: [self.list_objects_v2(**options)])


def test_an_incomplete_checkpoint_is_not_restored(tmp_path: Path) -> None:
    s3 = MemoryBucket()
    begun(s3, tmp_path / "old")
    del s3.objects["pong/checkpoints/000000001/manifest.json"]
    with pytest.raises(RuntimeError, match="checkpoint 1"):
        restored(s3, tmp_path / "new")


def test_the_uploads_of_a_day_are_little_more_than_the_stored_bytes(tmp_path: Path) -> None:
    """24 hours with all sizes divided by 1,000: 12 MB of events and 5 MB of rows per hour, checkpoints of 100 MB."""
    s3 = MemoryBucket()
    make_run(tmp_path)
    copy = copy_of(s3, tmp_path)
    for minute in range(0, 24 * 60, 2):
        write(tmp_path, "tensorboard/pong/events", "e" * 400, mode="a")
        for role in ("learner", "replay", "actor"):
            write(tmp_path, f"curves/{role}.jsonl", "r" * 55 + "\n", mode="a")
        write(tmp_path, "elapsed.json", f"{minute}")
        if minute % 60 == 0:
            write(tmp_path, "checkpoints/best.safetensors", f"{minute:027000d}")
        checkpoint(tmp_path, minute + 2, size=100_000)
        # The run keeps three checkpoints.
        shutil.rmtree(tmp_path / f"runs/pong/checkpoints/{minute - 4:09d}", ignore_errors=True)
        copy.upload("i-1")
    copy.upload("i-1", whole=True)
    curves = sum(map(len, files(tmp_path, *GROWING).values()))
    assert curves > 400_000
    assert sum(size for _, size in s3.uploads) <= 3 * sum(map(len, s3.objects.values()))
    assert sum(size for name, size in s3.uploads if name.removeprefix("parts/").startswith(GROWING)) <= 3 * curves


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
