"""A run whose host is lost goes on from its mirror, by the same command; SIGTERM to all its programs loses nothing."""

import json
import os
import shutil
import signal
from contextlib import suppress

import pytest
from support.programs import CALM, running_in
from support.waiting import until

from apex.runs.folder import RunFolder
from apex.runs.metrics.writer import read_curve
from apexreplay.errors import NEIGHBOUR_GONE
from apexreplay.store.location import discard, store_path

pytestmark = pytest.mark.timeout(900)


def test_the_same_command_continues_a_run_whose_host_was_lost(programs):
    folder, mirror = programs.folder / "runs/mine", programs.folder / "mirror"
    command = ["train", *CALM, *programs.offset, "--name", "mine", "--continue", "--run.mirror", str(mirror)]
    command += ["--run.no-tensorboard", "--checkpoint.period-seconds", "2", "--checkpoint.period", "10"]

    def saved():
        newest = mirror / "mine/checkpoints/newest.json"
        return json.loads(newest.read_text())["num_updates"] if newest.exists() else 0

    def has_stored():
        rows = read_curve(mirror / "mine/curves/replay.jsonl")
        return bool(rows) and rows[-1]["scalars"]["replay/num_inserted"] > 0

    programs.start("first", *command)
    until(lambda: has_stored() and saved() > 0 and (mirror / "mine/manifest.json").exists(), "a run", seconds=240.0)
    first = RunFolder.open(folder)
    programs.running["first"].send_signal(signal.SIGKILL)
    until(lambda: not running_in(programs.folder), "end of the first start", seconds=60.0)
    lost = saved()
    shutil.rmtree(programs.folder / "runs")
    until(lambda: discard(store_path(first.run_id)), "the memory to be left by its server")
    programs.start("second", *command)
    until(lambda: saved() > lost, "a newer checkpoint in the mirror", seconds=240.0)
    for process in running_in(programs.folder):  # as a scheduler may do
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGTERM)
    assert programs.wait("second") == NEIGHBOUR_GONE, "the run is not over"
    output = programs.output("second")
    assert f"restored runs/mine from {mirror}" in output
    assert f"resumes at update {lost:,}" in output
    assert "acknowledged transitions are missing" in output
    again = RunFolder.open(folder)
    assert again.run_id == first.run_id
    assert not store_path(first.run_id).exists(), "the last snapshot has the replay memory"
    assert "no last snapshot" not in (folder / "logs/replay.log").read_text()
    rows = read_curve(folder / "curves/learner.jsonl")
    updates = [row["scalars"]["learner/updates"] for row in rows if "learner/updates" in row["scalars"]]
    assert updates == sorted(updates)
    assert updates[0] < lost < updates[-1]
    assert read_curve(mirror / "mine/curves/learner.jsonl") == rows
