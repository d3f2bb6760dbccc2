"""A run and its mirror: which of them continues, who may write, and what happens if the mirror cannot be used."""

import dataclasses
import json
import os
import platform
import shutil
import signal
import time
from pathlib import Path

import pytest
from support.run_builders import make_run
from support.waiting import until

from apex import learner
from apex.config import RunConfig
from apex.config.codec import lay_over
from apex.environments.inspection import Inspector
from apex.errors import ConfigError, FencedError, MirrorError, StoppedError
from apex.facts import Ending, EndReason, Failure
from apex.launch import mirroring, train
from apex.launch.continuing import read_continue
from apex.launch.mirroring import Mirroring, bring_back, require_unused, upload_ended, with_absolute_mirror
from apex.launch.resume import reopen
from apex.runs.checkpoints.checkpoint import note_newest
from apex.runs.checkpoints.paths import NEWEST
from apex.runs.folder import RunFolder
from apex.runs.mirror.objects import FolderObjects, FsspecObjects
from apexreplay.errors import FINISHED, REFUSED, UsageError
from apexreplay.process.lifecycle import Stop
from apexreplay.store.location import store_path


@pytest.fixture(autouse=True)
def short_times(monkeypatch):
    monkeypatch.setattr(mirroring, "TRY_SECONDS", 0.2)
    monkeypatch.setattr(mirroring, "PAUSE_SECONDS", 0.02)


@pytest.fixture
def folder(tmp_path):
    return make_run(tmp_path / "runs", name="mine", run={"mirror": str(tmp_path / "mirror")})


@pytest.fixture
def run(folder):
    return folder.config.run


def checkpoint(folder, updates):
    path = folder.checkpoints / f"{updates:09d}"
    path.mkdir(parents=True)
    (path / "learner.safetensors").write_bytes(b"weights")
    (path / "manifest.json").write_text("{}")
    note_newest(folder.checkpoints, updates)


def upload(folder):
    return Mirroring(folder.config.run, folder, Stop()).finish(Ending(FINISHED))


def newest(run):
    return json.loads(FolderObjects(Path(run.mirror) / run.name).read("checkpoints/newest.json"))["num_updates"]


def test_a_run_comes_back_where_its_folder_is_missing(folder, run):
    checkpoint(folder, 7)
    assert upload(folder) == Ending(FINISHED)
    shutil.rmtree(folder.path)
    assert bring_back(run, Stop())
    again = RunFolder.open(folder.path)
    assert again.run_id == folder.run_id
    assert (again.checkpoints / "000000007/learner.safetensors").read_bytes() == b"weights"
    checkpoint(folder, 8)
    assert not bring_back(run, Stop()), "the folder is newer than the mirror"


def test_nothing_comes_back_from_an_empty_mirror(run, folder):
    shutil.rmtree(folder.path)
    assert not bring_back(run, Stop())
    assert not folder.path.exists()


def test_a_first_upload_that_was_killed_before_its_end_is_begun_again(folder, run, tmp_path):
    checkpoint(folder, 7)
    upload(folder)
    (Path(run.mirror) / "mine/manifest.json").unlink()
    shutil.rmtree(folder.path)
    assert not bring_back(run, Stop())
    again = make_run(tmp_path / "runs", name="mine", run={"mirror": run.mirror})
    assert upload(again) == Ending(FINISHED)
    assert (Path(run.mirror) / "mine/manifest.json").exists()


def test_the_newer_of_folder_and_mirror_continues(folder, run, tmp_path):
    checkpoint(folder, 7)
    upload(folder)
    shutil.copytree(folder.path, tmp_path / "other/mine")
    elsewhere = RunFolder.open(tmp_path / "other/mine")
    checkpoint(elsewhere, 9)
    Mirroring(run, elsewhere, Stop()).finish(Ending(FINISHED))
    with pytest.raises(UsageError, match="--continue"):
        upload(folder)
    assert newest(run) == 9
    assert bring_back(run, Stop())
    assert (folder.checkpoints / "000000009").exists()
    (aside,) = folder.path.parent.glob("mine.older-*")
    assert (aside / "checkpoints/000000007").exists()
    checkpoint(folder, 11)
    assert not bring_back(run, Stop())


def test_continue_goes_on_from_the_mirror_without_the_replay_memory(folder, run):
    checkpoint(folder, 7)
    upload(folder)
    shutil.rmtree(folder.path)
    start = read_continue(folder.asked, [], accept=False, inspector=Inspector())
    assert (start.folder, start.restored_from, start.accept_changes) == (folder.path, run.mirror, True)
    again = read_continue(folder.asked, [], accept=False, inspector=Inspector())
    assert again.accept_changes, "the first try may have been killed before its first checkpoint"
    checkpoint(folder, 9)
    later = read_continue(folder.asked, [], accept=False, inspector=Inspector())
    assert (later.folder, later.restored_from, later.accept_changes) == (folder.path, "", False)


CHANGES = (
    ({"learner": {"learning_rate": 1e-5}}, False, "learning_rate"),
    ({"replay": {"max_bytes": 2**50}}, True, "memory"),
    ({"actor": {"num_processes": 4_000}}, True, "memory"),
)


@pytest.mark.parametrize(("changes", "accept", "named"), CHANGES)
def test_a_refused_command_leaves_the_run_to_the_host_that_trains_it(folder, run, changes, accept, named):
    checkpoint(folder, 7)
    upload(folder)
    shutil.rmtree(folder.path)
    before = (Path(run.mirror) / "mine/begun.json").read_text()
    with pytest.raises(UsageError, match=named):
        read_continue(lay_over(folder.asked, changes), [], accept=accept, inspector=Inspector())
    assert (Path(run.mirror) / "mine/begun.json").read_text() == before
    assert not folder.path.exists()


def test_a_restored_run_does_not_use_an_older_memory_of_this_host(folder, run):
    checkpoint(folder, 7)
    upload(folder)
    store = store_path(folder.run_id)
    store.write_bytes(b"transitions of an earlier start")
    begun = Path(run.mirror) / "mine/begun.json"
    for host, is_kept in ((platform.node(), True), ("another", False)):
        shutil.rmtree(folder.path)
        begun.write_text(json.dumps(json.loads(begun.read_text()) | {"host": f"process 7 on {host} (1234)"}))
        assert bring_back(run, Stop())
        assert store.exists() == is_kept


def test_a_run_without_a_name_continues_by_the_name_of_its_folder(tmp_path):
    folder = make_run(tmp_path / "runs", run={"mirror": str(tmp_path / "mirror")})
    checkpoint(folder, 7)
    upload(folder)
    shutil.rmtree(folder.path)
    named = dataclasses.replace(folder.asked, run=dataclasses.replace(folder.asked.run, name=folder.path.name))
    assert read_continue(named, [], accept=False, inspector=Inspector()).folder == folder.path


def test_a_run_that_is_over_in_the_mirror_is_over(folder):
    checkpoint(folder, 7)
    folder.end = EndReason("score", 475.0)
    upload(folder)
    shutil.rmtree(folder.path)
    assert read_continue(folder.asked, [], accept=False, inspector=Inspector()).is_over


def test_a_new_run_does_not_take_a_name_of_the_mirror(folder, run):
    require_unused(run, Stop())
    upload(folder)
    with pytest.raises(UsageError, match="mine"):
        require_unused(run, Stop())


def test_another_run_in_the_mirror_is_refused(folder, run, tmp_path):
    upload(folder)
    shutil.rmtree(folder.path)
    other = make_run(tmp_path / "runs", name="mine", run={"mirror": run.mirror})
    for use in (lambda: upload(other), lambda: bring_back(run, Stop())):
        with pytest.raises(UsageError, match="another run"):
            use()
    assert RunFolder.open(other.path).run_id == other.run_id


def test_checkpoints_are_uploaded_while_the_run_trains(folder, run):
    uploading = Mirroring(run, folder, Stop())
    checkpoint(folder, 7)
    until(lambda: (Path(run.mirror) / "mine/checkpoints/newest.json").exists(), "upload")
    checkpoint(folder, 8)
    until(lambda: newest(run) == 8, "upload")
    uploading.close()


def test_a_checkpoint_that_is_noted_late_is_uploaded_when_it_is(folder, run):
    checkpoint(folder, 7)
    (folder.checkpoints / NEWEST).unlink()
    uploading = Mirroring(run, folder, Stop())
    time.sleep(0.2)  # ten looks for a new checkpoint
    note_newest(folder.checkpoints, 7)
    until(lambda: (Path(run.mirror) / "mine/checkpoints/newest.json").exists(), "upload of the checkpoint")
    uploading.close()


@pytest.mark.parametrize("failed", [False, True])
def test_the_older_of_two_writers_stops_its_run(folder, run, failed):
    stop = Stop()
    older = Mirroring(run, folder, stop)
    checkpoint(folder, 7)
    until(lambda: (Path(run.mirror) / "mine/checkpoints/newest.json").exists(), "upload")
    newer = Mirroring(run, folder, Stop())
    checkpoint(folder, 8)
    until(stop.poll, "the older run's end")
    before = Ending(1, "learner", Failure(role="learner", kind="exit", value=1)) if failed else Ending(FINISHED)
    ending = older.finish(before)
    if failed:
        assert ending == before, "the first cause stays"
    else:
        assert ending.status == REFUSED
        assert "process" in ending.failure.detail
    assert newer.finish(Ending(FINISHED)) == Ending(FINISHED)
    assert newest(run) == 8


def test_an_outage_of_the_mirror_costs_one_warning_and_no_training(folder, run, caplog, monkeypatch):
    uploading, broken = Mirroring(run, folder, Stop()), []
    write = FolderObjects.write

    def fail(self, name, data):
        broken.append(name)
        raise OSError("network")

    monkeypatch.setattr(FolderObjects, "write", fail)
    monkeypatch.setattr(mirroring, "PERIOD_SECONDS", 0.0)
    until(lambda: len(broken) > 2, "attempts")
    ending = uploading.finish(Ending(FINISHED))
    assert (ending.status, ending.role) == (1, "launcher")
    assert "network" in ending.failure.detail
    assert len([record for record in caplog.records if "each minute" in record.message]) == 1
    monkeypatch.setattr(FolderObjects, "write", write)
    folder.end = EndReason("score", 475.0)
    assert upload_ended(run, folder, Stop()) == Ending(FINISHED)
    assert (Path(run.mirror) / "mine/end.json").exists()
    assert (Path(run.mirror) / "mine/curves").exists() == any(folder.curves.iterdir())


def test_a_scheduler_repeats_a_start_whose_mirror_cannot_be_read(folder, run, monkeypatch):
    def fail(self, name):
        raise OSError("network")

    monkeypatch.setattr(FolderObjects, "has", fail)
    for use in (lambda: upload(folder), lambda: bring_back(run, Stop()), lambda: require_unused(run, Stop())):
        with pytest.raises(MirrorError, match="network") as error:
            use()
        assert error.value.exit_status == 1
    stop = Stop()
    stop.request()
    with pytest.raises(StoppedError):
        bring_back(run, stop)
    assert FencedError("").exit_status == REFUSED


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_mirror_below_a_file_is_refused_at_once(folder, run, tmp_path, place):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="file"):
        Mirroring(dataclasses.replace(run, mirror=str(tmp_path / place)), folder, Stop())


def test_a_mirror_without_permission_is_refused_at_once(folder, run, monkeypatch):
    def fail(self, name):
        raise PermissionError("denied")

    monkeypatch.setattr(FolderObjects, "has", fail)
    with pytest.raises(UsageError, match="denied"):
        bring_back(run, Stop())


def test_a_store_that_denies_access_is_asked_again(run, monkeypatch):
    """Its credentials may become valid within a minute."""
    has, tried = FsspecObjects.has, []

    def fail_once(self, name):
        if not tried:
            tried.append(name)
            raise PermissionError("denied")
        return has(self, name)

    monkeypatch.setattr(FsspecObjects, "has", fail_once)
    monkeypatch.setattr(mirroring, "open_objects", lambda url, name: FsspecObjects(f"memory://denied/{name}"))
    assert not bring_back(dataclasses.replace(run, mirror="s3://denied"), Stop())
    assert tried


def test_a_last_upload_without_permission_is_repeated(folder, run, monkeypatch):
    uploading, write, tried = Mirroring(run, folder, Stop()), FolderObjects.write, []

    def fail_once(self, name, data):
        if tried:
            return write(self, name, data)
        tried.append(name)
        raise PermissionError("an expired token")

    uploading.close()
    monkeypatch.setattr(FolderObjects, "write", fail_once)
    assert uploading.finish(Ending(FINISHED)) == Ending(FINISHED)
    assert tried


def test_a_long_restore_and_a_long_last_upload_send_heartbeats(folder, run, monkeypatch):
    ticks, slow = [], []

    def delayed(function):
        def call(*arguments, **options):
            before = len(ticks)
            until(lambda: len(ticks) > before + 2, "heartbeats")
            slow.append(function.__name__)
            return function(*arguments, **options)

        return call

    monkeypatch.setattr(mirroring, "POLL_SECONDS", 0.01)
    checkpoint(folder, 7)
    stop = Stop(lambda: ticks.append(1))
    uploading = Mirroring(run, folder, stop)
    uploading.close()
    monkeypatch.setattr(FolderObjects, "upload", delayed(FolderObjects.upload))
    stop.request()
    assert uploading.finish(Ending(FINISHED)) == Ending(FINISHED)
    shutil.rmtree(folder.path)
    monkeypatch.setattr(FolderObjects, "download", delayed(FolderObjects.download))
    assert bring_back(run, Stop(lambda: ticks.append(1)))
    assert {"upload", "download"} <= set(slow)


def test_the_mirror_of_a_run_may_change(folder, tmp_path):
    _, config = reopen(str(folder.path), ["--run.mirror", str(tmp_path / "elsewhere")])
    assert config.run.mirror == str(tmp_path / "elsewhere")


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_start_that_is_stopped_while_it_waits_for_its_mirror_is_repeated(signum, status, folder, run, monkeypatch):
    def fail(self, name):
        os.kill(os.getpid(), signum)
        raise OSError("network")

    monkeypatch.setattr(mirroring, "TRY_SECONDS", 0.0)  # Even if no time is left, the stop decides.
    monkeypatch.setattr(FolderObjects, "has", fail)
    where = ["--name", "mine", "--run.folder", str(folder.path.parent), "--run.mirror", run.mirror]
    assert train.main(["--preset", "cartpole", "--continue", *where]) == status


def test_a_mirror_is_the_same_from_every_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert with_absolute_mirror(RunConfig(mirror="m")).mirror == str(tmp_path / "m")
    for kept in ("", "s3://bucket/runs", "/m"):
        assert with_absolute_mirror(RunConfig(mirror=kept)).mirror == kept


@pytest.mark.parametrize(
    "url", ["ftp://host/runs", "s3://", "s3:///", "s3://key:secret@bucket/runs", "az://runs?sig=secret"]
)
def test_a_wrong_url_is_refused(url):
    with pytest.raises(ConfigError) as error:
        RunConfig(mirror=url)
    assert "s3://" in error.value.problem
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("place", ["runs", "runs/mine", "runs/mine/copies"])
def test_a_run_is_not_copied_into_itself(tmp_path, place):
    folder = make_run(tmp_path / "runs", name="mine", run={"mirror": str(tmp_path / place)})
    with pytest.raises(UsageError, match="own folder"):
        upload(folder)
    assert not list(folder.path.rglob("begun.json"))


def test_a_run_in_one_process_has_no_mirror(tmp_path):
    with pytest.raises(ConfigError, match="single_process"):
        dataclasses.replace(RunConfig(single_process=True), mirror=str(tmp_path))


def test_a_learner_that_is_started_by_hand_refuses_a_mirror(tmp_path, capsys):
    assert learner.main(["--preset", "cartpole", "--run.mirror", str(tmp_path)]) == REFUSED
    assert "apex train" in capsys.readouterr().err
