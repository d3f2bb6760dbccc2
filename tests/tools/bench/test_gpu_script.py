"""`bench/gpu.sh` writes every figure into a file. A rehearsal runs without a GPU."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from support.waiting import until

from apexreplay.store.location import memory_folder
from bench.device import MUST_HOLD

SCRIPT = Path(__file__).parents[3] / "bench" / "gpu.sh"
FIGURES = {
    "learner": {"learner_updates_per_s", "learner_resident_updates_per_s", "learner_plain_updates_per_s"},
    "learner-batch-128": {"learner_updates_per_s", "learner_wait_share", "learner_gain", "learner_fed_share"},
    "actor": {"actor_steps_per_s", "bare_environment_steps_per_s", "actor_share_of_bare", "part_forward_us"},
    "device": {"survives_a_failed_lock", "waits_for_nothing", "publish_us", "snapshot_ready_ms"},
    "system": {"system_steps_per_s", "system_updates_per_s", "system_samples_per_s"},
}


def check(name, figures):
    """Compares the figures that follow from others."""
    if name == "actor":
        share = figures["actor_steps_per_s"] / figures["bare_environment_steps_per_s"]
        assert figures["actor_share_of_bare"] == pytest.approx(share, rel=1e-3)
    elif name == "learner":
        fed = figures["learner_updates_per_s"]
        assert figures["learner_gain"] == pytest.approx(fed / figures["learner_plain_updates_per_s"], rel=1e-3)
        assert figures["learner_fed_share"] == pytest.approx(fed / figures["learner_resident_updates_per_s"], rel=1e-3)
        assert 0 <= figures["learner_wait_share"] <= 1
    elif name == "system":
        samples = figures["system_updates_per_s"] * figures["batch_size"]
        assert figures["system_samples_per_s"] == pytest.approx(samples, rel=1e-3)
    else:
        assert {figures[name] for name in MUST_HOLD} == {1.0}


def start(tmp_path, *arguments, python=sys.executable):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environment = {**os.environ, "TMPDIR": str(scratch), "APEX_PYTHON": str(python)}
    nothing = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    with (tmp_path / "errors").open("wb") as errors:
        return subprocess.Popen(
            [SCRIPT, *arguments], **nothing, stderr=errors, cwd=tmp_path, env=environment, start_new_session=True
        )


def finish(script, seconds):
    """Returns the status of the script; ends its session."""
    try:
        return script.wait(seconds)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(script.pid, signal.SIGKILL)


def users_of(scratch):
    """Returns the ids of all processes whose temporary files go there."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"TMPDIR={scratch}\0".encode() in environment.read_bytes():
                found.append(environment.parent.name)
    return found


def runs_of(scratch):
    """Returns the ids of the present runs."""
    run_ids = set()
    with suppress(FileNotFoundError):  # A bench removes its folder at its end.
        for manifest in scratch.glob("apex-bench-*/*/manifest.json"):
            with suppress(OSError, ValueError):
                run_ids.add(json.loads(manifest.read_text())["run_id"])
    return run_ids


@pytest.mark.timeout(500)  # longer than the deadline below, which is longer than that of the script
def test_a_rehearsal_writes_every_file_and_leaves_nothing_else(tmp_path):
    scratch, out, run_ids = tmp_path / "scratch", tmp_path / "out", set()
    script = start(tmp_path, "--rehearse", str(out))
    try:
        deadline = time.monotonic() + 480
        while script.poll() is None and time.monotonic() < deadline:
            run_ids |= runs_of(scratch)
            time.sleep(0.05)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(script.pid, signal.SIGKILL)
        script.wait()
    assert script.returncode == 0, (tmp_path / "errors").read_text()

    assert {path.name for path in out.iterdir()} == {f"rehearsal-{name}.json" for name in FIGURES}
    for name, figures in FIGURES.items():
        measured = json.loads((out / f"rehearsal-{name}.json").read_text())
        assert measured["command"].startswith(f"python -m bench {name.partition('-')[0]} --"), measured
        assert measured["git"] is None or len(measured["git"]["commit"]) == 40
        assert measured["hardware"]["cores"] >= 1
        assert measured["versions"]["python"].startswith("3.")
        assert {figure for figure in figures if measured["figures"][figure] >= 0} == figures
        check(name.partition("-")[0], measured["figures"])
        if "batch" in name:
            assert measured["figures"]["batch_size"] == 128

    assert len(run_ids) == len(FIGURES) - 1  # All benchmarks but device create a run.
    memory = [path for run_id in run_ids for path in memory_folder().glob(f"apex-{run_id:016x}*")]
    assert memory == []
    until(lambda: not users_of(scratch), "end of all processes", seconds=10)
    assert list(scratch.glob("apex-*")) == []


STAND_IN = """#!/bin/sh
if [ "$1" != -m ]; then exec %s "$@"; fi
echo "a line before the figures"
if [ "$3" = learner ]; then echo "python -m bench: the GPU is on fire" >&2; exit 1; fi
echo '{"figure_of": "'"$3"'"}'
"""


def test_a_failed_bench_is_named_and_costs_no_other_figure(tmp_path):
    python, out = tmp_path / "python", tmp_path / "out"
    python.write_text(STAND_IN % sys.executable)
    python.chmod(0o755)
    script = start(tmp_path, "--rehearse", str(out), python=python)
    assert finish(script, 300) == 1
    last = (tmp_path / "errors").read_text().splitlines()[-1]
    assert "learner learner-batch-128" in last
    written = {path.name: json.loads(path.read_text())["figures"] for path in out.iterdir()}
    assert written == {f"rehearsal-{name}.json": {"figure_of": name} for name in ("actor", "device", "system")}


LEARNER = """#!/bin/sh
echo "$@"
if [ "$6" = breakout-gpu ]; then exit 1; fi
"""


@pytest.mark.parametrize(("arguments", "seed"), [(["learn"], 1), (["learn", "7"], 7)])
def test_a_failed_game_is_named_and_costs_no_other_game(tmp_path, arguments, seed):
    python = tmp_path / "python"
    python.write_text(LEARNER)
    python.chmod(0o755)
    environment = {**os.environ, "APEX_PYTHON": str(python)}
    answer = subprocess.run([SCRIPT, *arguments], capture_output=True, text=True, env=environment, timeout=300)
    games = ("pong", "breakout", "seaquest", "qbert")
    assert answer.stdout.splitlines() == [
        f"-m bench learning run --task {game}-gpu --system apex --seed {seed}" for game in games
    ]
    assert answer.returncode == 1
    assert "breakout" in answer.stderr


def test_the_sum_of_all_limits_is_less_than_eight_minutes():
    text = SCRIPT.read_text()
    limits = [int(limit) for limit in re.findall(r"^measure [\w-]+ (\d+) ", text, re.MULTILINE)]
    (grace,) = [int(seconds) for seconds in re.findall(r"--kill-after=(\d+) ", text)]
    assert len(limits) == len(FIGURES) - 1  # The device is measured by `check` and in a rehearsal only.
    assert sum(limits) + len(limits) * grace < 8 * 60


@pytest.mark.parametrize("arguments", [["--rehearse", ""], ["learn", "much"], ["everything"]])
def test_unknown_arguments_are_refused_with_the_usage(tmp_path, arguments):
    assert finish(start(tmp_path, *arguments), 10) == 1
    assert (tmp_path / "errors").read_text().startswith("usage: bench/gpu.sh ")
