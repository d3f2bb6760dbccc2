"""The mirror of a run: its contents, the order of uploads, and the restore on another host."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from apex.config import Config, RunConfig
from apex.errors import FencedError
from apex.runs.checkpoints.checkpoint import note_newest
from apex.runs.folder import RunFolder
from apex.runs.metrics.writer import cut_curves
from apex.runs.mirror.mirror import Mirror
from apex.runs.mirror.objects import FolderObjects, FsspecObjects, Objects, open_objects
from apex.schema import Schema
from apexreplay.errors import ForeignFileError, UsageError

BEGUN = "b80c1f6cd3d0a6f8"
GROWING = ("curves/", "tensorboard/")


class MemoryObjects:
    """Keeps objects in memory and records uploads. Deletes nothing, as a bucket that deletes by age."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.uploads: list[str] = []

    def names(self) -> list[str]:
        return sorted(self.objects)

    def has(self, name: str) -> bool:
        return name in self.objects

    def read(self, name: str) -> bytes:
        return self.objects[name]

    def write(self, name: str, data: bytes) -> None:
        self.objects[name] = data
        self.uploads.append(name)

    def upload(self, path: Path, name: str) -> None:
        self.write(name, path.read_bytes())

    def download(self, name: str, path: Path) -> None:
        path.write_bytes(self.objects[name])

    def delete(self, names: list[str]) -> None:
        pass


@pytest.fixture(params=["folder", "memory", "fsspec"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Objects]:
    if request.param == "memory":
        yield MemoryObjects()
    elif request.param == "folder":
        yield FolderObjects(tmp_path / "mirror/pong")
    else:
        objects = FsspecObjects("memory://weights/pong")
        yield objects
        objects.delete(objects.names())


def copy_of(store: Objects, home: Path) -> Mirror:
    return Mirror(store, home / "runs/pong", home / "sent.json")


def write(home: Path, name: str, text: str = "x", mode: str = "w") -> None:
    path = home / "runs/pong" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open(mode) as file:
        file.write(text)


def checkpoint(home: Path, updates: int, size: int = 1) -> None:
    write(home, f"checkpoints/{updates:09d}/learner.safetensors", "w" * size)
    write(home, f"checkpoints/{updates:09d}/manifest.json", "{}")
    note_newest(home / "runs/pong/checkpoints", updates)


def begun(store: Objects, home: Path, host: str = "i-1") -> Mirror:
    """Creates a run and uploads it."""
    make_run(home)
    copy = copy_of(store, home)
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


def files(home: Path, *folders: str) -> dict[str, bytes]:
    run = home / "runs/pong"
    found = {path.relative_to(run).as_posix(): path for path in run.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if name.startswith(folders or "")}


def test_the_run_goes_to_the_mirror_and_stays_there(store: Objects, tmp_path: Path) -> None:
    make_run(tmp_path)
    copy = copy_of(store, tmp_path)
    assert len(copy.only_here()) == 7
    copy.upload("i-1")
    copied = {
        "manifest.json",
        "epoch.json",
        "checkpoints/newest.json",
        "curves/learner.jsonl",
        "tensorboard/pong/events",
    }
    copied |= {f"checkpoints/000000001/{name}" for name in ("manifest.json", "learner.safetensors")}
    assert set(store.names()) == copied
    assert {name: store.read(name) for name in copied}.items() <= files(tmp_path).items()
    assert (copy.upload("i-1"), copy.only_here()) == (0, [])
    (tmp_path / "runs/pong/checkpoints/000000001/learner.safetensors").unlink()
    assert copy.upload("i-1") == 0
    assert set(store.names()) == copied
    write(tmp_path, "tensorboard/pong/events", "more", mode="a")
    checkpoint(tmp_path, 2)
    assert set(copy.only_here()) == {
        "tensorboard/pong/events",
        "checkpoints/000000002/learner.safetensors",
        "checkpoints/000000002/manifest.json",
        "checkpoints/newest.json",
    }


def test_the_newest_checkpoint_is_recorded_only_after_its_files(tmp_path: Path) -> None:
    class Slow(MemoryObjects):
        """A checkpoint is written during the first upload."""

        def upload(self, path: Path, name: str) -> None:
            super().upload(path, name)
            if not (tmp_path / "runs/pong/checkpoints/000000002").exists():
                checkpoint(tmp_path, 2)

        def newest(self) -> int:
            return json.loads(self.objects["checkpoints/newest.json"])["num_updates"]

    store = Slow()
    copy = begun(store, tmp_path)
    assert store.newest() == 1
    store.uploads.clear()
    write(tmp_path, "curves/learner.jsonl", row(2), mode="a")
    copy.upload("i-1")
    assert store.newest() == 2
    assert store.uploads == [
        "curves/learner.jsonl",
        "checkpoints/000000002/learner.safetensors",
        "checkpoints/000000002/manifest.json",
        "checkpoints/newest.json",
    ]
    checkpoint(tmp_path, 3)
    shutil.rmtree(tmp_path / "runs/pong/checkpoints/000000003")
    copy.upload("i-1")
    assert store.newest() == 2
    checkpoint(tmp_path, 4)
    copy.upload("i-1")
    assert store.newest() == 4


def restored(store: Objects, home: Path) -> Mirror:
    home.mkdir()
    copy = copy_of(store, home)
    assert copy.begin(BEGUN, "i-2")
    copy.restore()
    return copy


def test_a_new_host_restores_the_curves_and_the_newest_checkpoint(store: Objects, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    copy = begun(store, old)
    for number in range(2, 5):
        checkpoint(old, number)
        write(old, "curves/learner.jsonl", row(number), mode="a")
        copy.upload("i-1")
    after = restored(store, new)
    left_out = ("logs/", "checkpoints/replay/", "checkpoints/.")
    left_out += tuple(f"checkpoints/00000000{number}/" for number in range(1, 4))
    expected = {name: data for name, data in files(old).items() if not name.startswith(left_out)}
    assert files(new) == expected
    assert (new / "runs/pong/logs").is_dir()
    assert after.upload("i-2") == 0, "the mirror has all files already"
    # A replaced host uploads nothing.
    before = set(store.names())
    checkpoint(old, 9)
    with pytest.raises(FencedError, match="i-2"):
        copy.upload("i-1")
    assert set(store.names()) == before


def test_a_restored_run_has_a_higher_number_of_its_start(store: Objects, tmp_path: Path) -> None:
    schema = Schema(frame_shape=(4,), frame_dtype="float32", stack=1, num_actions=2, n_step=3, codec="raw")
    config = Config(run=RunConfig(name="pong", folder=str(tmp_path / "old/runs")))
    folder = RunFolder.create(config, schema, argv=[])
    epochs = [folder.next_epoch(lambda: 1.8e9) for _ in range(3)]
    copy = copy_of(store, tmp_path / "old")
    copy.begin(BEGUN, "i-1")
    copy.upload("i-1")
    restored(store, tmp_path / "new")
    again = RunFolder.open(tmp_path / "new/runs/pong")
    assert again.run_id == folder.run_id
    assert again.next_epoch(lambda: 1.8e9 + 60.0) > max(epochs)


@pytest.mark.parametrize("seed", range(3))
def test_growing_files_are_restored_exactly_after_any_loss(tmp_path: Path, seed: int) -> None:
    """Compares with the files themselves, while rows are added and cut off and hosts lose their state."""
    rng, store, home, steps = random.Random(seed), MemoryObjects(), tmp_path / "0", 0
    begun(store, home, "i-2")
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
            restored(store, home)
        copy_of(store, home).upload("i-2")
        restored(store, tmp_path / f"look-{life}")
        assert files(tmp_path / f"look-{life}", *GROWING) == files(home, *GROWING)


def test_objects_with_paths_outside_the_run_are_refused(tmp_path: Path) -> None:
    store = MemoryObjects()
    begun(store, tmp_path / "old")
    store.write("x/../../../evil", b"x")
    with pytest.raises(UsageError, match="evil"):
        restored(store, tmp_path / "new")
    assert not list(tmp_path.rglob("evil"))
    assert not (tmp_path / "new/runs/pong").exists()


def test_a_checkpoint_is_deleted_after_the_newer_one_is_recorded(tmp_path: Path) -> None:
    objects, deleted = FolderObjects(tmp_path / "mirror/pong"), []

    class Watched(FolderObjects):
        def delete(self, names: list[str]) -> None:
            deleted.append((sorted(names), json.loads(self.read("checkpoints/newest.json"))["num_updates"]))
            super().delete(names)

    make_run(tmp_path)
    copy = copy_of(Watched(tmp_path / "mirror/pong"), tmp_path)
    copy.upload("i-1")
    checkpoint(tmp_path, 2)
    copy.upload("i-1")
    old = [f"checkpoints/000000001/{name}" for name in ("learner.safetensors", "manifest.json")]
    assert [entry for entry in deleted if entry[0]] == [(old, 2)]
    assert not set(old) & set(objects.names())
    assert not (tmp_path / "mirror/pong/checkpoints/000000001").exists()


def test_a_writer_replaced_during_an_upload_records_no_checkpoint(tmp_path: Path) -> None:
    class Replaced(MemoryObjects):
        def upload(self, path: Path, name: str) -> None:
            super().upload(path, name)
            if name == "checkpoints/000000002/manifest.json":
                copy_of(self, tmp_path / "new").begin(BEGUN, "i-2")

    store = Replaced()
    copy = begun(store, tmp_path)
    checkpoint(tmp_path, 2)
    with pytest.raises(FencedError):
        copy.upload("i-1")
    assert copy.newest_update() == 1


def test_keys_of_the_run_stay_on_their_host(tmp_path: Path) -> None:
    write(tmp_path, "keys/learner.secret")
    write(tmp_path, "run.lock")
    store = MemoryObjects()
    begun(store, tmp_path)
    assert not [name for name in store.names() if "keys" in name or "lock" in name]


def test_another_run_of_the_same_name_is_refused(store: Objects, tmp_path: Path) -> None:
    begun(store, tmp_path)
    with pytest.raises(UsageError, match="another run"):
        copy_of(store, tmp_path).begin("other", "i-1")


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun(FolderObjects(tmp_path / "mirror/pong"), tmp_path)
    assert (tmp_path / "mirror/pong").stat().st_mode & 0o077 == 0
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ForeignFileError):
        restored(FolderObjects(tmp_path / "mirror/pong"), tmp_path / "new")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(UsageError, match="pip install gcsfs"):
        open_objects("gs://weights/runs", "pong")


def test_another_mirror_gets_the_whole_run(tmp_path: Path) -> None:
    begun(MemoryObjects(), tmp_path / "old")
    write(tmp_path / "old", "curves/learner.jsonl", row(2), mode="a")
    other = FolderObjects(tmp_path / "other/pong")
    copy = copy_of(other, tmp_path / "old")
    assert "checkpoints/000000001/learner.safetensors" in copy.only_here()
    copy.begin(BEGUN, "i-1")
    copy.upload("i-1")
    restored(other, tmp_path / "new")
    assert files(tmp_path / "new", "curves/", "checkpoints/0") == files(tmp_path / "old", "curves/", "checkpoints/0")


def test_a_host_that_continues_after_another_uploads_its_own_files(tmp_path: Path) -> None:
    store = FolderObjects(tmp_path / "mirror/pong")
    first = begun(store, tmp_path / "a")
    checkpoint(tmp_path / "a", 3)
    write(tmp_path / "a", "curves/learner.jsonl", row(3), mode="a")  # This host loses its network.
    other = restored(store, tmp_path / "b")
    checkpoint(tmp_path / "b", 2)
    write(tmp_path / "b", "curves/learner.jsonl", row(1_000) * 3, mode="a")
    write(tmp_path / "b", "curves/learner-0001.jsonl", row(2_000))
    write(tmp_path / "b", "epoch.json", "b")
    other.upload("i-2")
    first.begin(BEGUN, "i-1")
    first.upload("i-1")
    restored(store, tmp_path / "look")
    assert files(tmp_path / "look", "curves/", "epoch.json") == files(tmp_path / "a", "curves/", "epoch.json")
    assert (tmp_path / "look/runs/pong/checkpoints/000000003/learner.safetensors").exists()


def test_a_checkpoint_that_the_next_start_deleted_is_uploaded_again(tmp_path: Path) -> None:
    class Outage(FolderObjects):
        def upload(self, path: Path, name: str) -> None:
            if name == "checkpoints/000000002/manifest.json":
                raise OSError("network")
            super().upload(path, name)

    begun(FolderObjects(tmp_path / "mirror/pong"), tmp_path)
    checkpoint(tmp_path, 2)
    with pytest.raises(OSError, match="network"):
        copy_of(Outage(tmp_path / "mirror/pong"), tmp_path).upload("i-1")
    for _ in range(2):  # The first of the two starts is killed.
        copy = copy_of(FolderObjects(tmp_path / "mirror/pong"), tmp_path)
        copy.begin(BEGUN, "i-1")
    copy.upload("i-1")
    restored(FolderObjects(tmp_path / "mirror/pong"), tmp_path / "new")
    assert files(tmp_path / "new", "checkpoints/000000002/") == files(tmp_path, "checkpoints/000000002/")


def test_a_checkpoint_whose_upload_was_killed_is_deleted_by_the_next_start(store: Objects, tmp_path: Path) -> None:
    begun(store, tmp_path)
    store.write("checkpoints/000000002/learner.safetensors", b"half")
    copy_of(store, tmp_path).begin(BEGUN, "i-2")
    kept = "deletes nothing" if isinstance(store, MemoryObjects) else ""
    assert store.has("checkpoints/000000002/learner.safetensors") == bool(kept)
    assert store.has("checkpoints/000000001/learner.safetensors")


def test_names_that_are_gone_or_look_like_patterns_delete_nothing_else(store: Objects) -> None:
    if isinstance(store, MemoryObjects):
        return
    for name in ("checkpoints/a1", "checkpoints/a*"):
        store.write(name, b"x")
    store.delete(["checkpoints/a*", "checkpoints/gone", "gone/too"])
    assert store.names() == ["checkpoints/a1"]


def test_the_end_of_a_run_that_goes_on_leaves_the_mirror(tmp_path: Path) -> None:
    store = FolderObjects(tmp_path / "mirror/pong")
    write(tmp_path, "end.json", "{}")
    copy = begun(store, tmp_path)
    assert store.has("end.json")
    (tmp_path / "runs/pong/end.json").unlink()
    copy.upload("i-1")
    assert not store.has("end.json")


def test_an_incomplete_checkpoint_is_not_restored(tmp_path: Path) -> None:
    store = MemoryObjects()
    begun(store, tmp_path / "old")
    del store.objects["checkpoints/000000001/manifest.json"]
    with pytest.raises(RuntimeError, match="checkpoint 1"):
        restored(store, tmp_path / "new")


@pytest.mark.parametrize("is_file", [True, False], ids=["the file", "the bucket"])
def test_a_missing_file_is_skipped_and_a_missing_bucket_is_an_error(tmp_path: Path, *, is_file: bool) -> None:
    class Late(MemoryObjects):
        def upload(self, path: Path, name: str) -> None:
            if name.endswith("late.jsonl"):
                if is_file:
                    path.unlink()
                raise FileNotFoundError("no such bucket or file")
            super().upload(path, name)

    store = Late()
    copy = begun(store, tmp_path)
    write(tmp_path, "curves/late.jsonl")
    if is_file:
        assert copy.upload("i-1") == 0
    else:
        with pytest.raises(FileNotFoundError, match="no such bucket"):
            copy.upload("i-1")


def test_a_file_of_a_curve_is_uploaded_until_the_next_one_begins(tmp_path: Path) -> None:
    store = MemoryObjects()
    copy = begun(store, tmp_path)
    store.uploads.clear()
    for number in (1, 2):
        for steps in range(3):
            write(tmp_path, f"curves/learner-{number:04d}.jsonl", row(steps), mode="a")
            copy.upload("i-1")
    assert store.uploads == [*3 * ["curves/learner-0001.jsonl"], *3 * ["curves/learner-0002.jsonl"]]


def test_a_full_disk_of_the_run_folder_is_named_in_a_restore(tmp_path: Path) -> None:
    class FullDisk(MemoryObjects):
        def download(self, name: str, path: Path) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    write(tmp_path, "manifest.json", "{}")
    store = FullDisk()
    copy_of(store, tmp_path).upload("i-1")
    home = tmp_path / "new"
    home.mkdir()
    with pytest.raises(UsageError, match=f"{home / 'runs/pong'}: No space") as error:
        copy_of(store, home).restore()
    assert "disk" in error.value.remedy
    assert list((home / "runs").iterdir()) == []


def test_a_folder_of_runs_that_cannot_be_written_is_named_in_a_restore(tmp_path: Path) -> None:
    write(tmp_path, "manifest.json", "{}")
    store = MemoryObjects()
    copy_of(store, tmp_path).upload("i-1")
    (tmp_path / "new").mkdir()
    (tmp_path / "new/runs").touch()
    with pytest.raises(UsageError, match=f"{tmp_path / 'new/runs/pong'}: ") as error:
        copy_of(store, tmp_path / "new").restore()
    assert "run.folder" in error.value.remedy


def test_a_full_disk_of_the_run_folder_stops_no_upload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    write(tmp_path, "manifest.json", "{}")
    store = MemoryObjects()
    monkeypatch.setattr("apex.runs.mirror.mirror.replace_file", fail)
    assert copy_of(store, tmp_path).upload("i-1") == 1
    assert store.names() == ["manifest.json"]
