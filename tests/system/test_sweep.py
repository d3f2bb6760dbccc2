"""Sweeps and several seeds, as the page of sweeps says, with short limits. Needs the extra sweep."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.programs import TINY, running_in
from support.waiting import until

from apex.command_line import parse_config
from apex.runs.folder import RunFolder
from apexreplay.store.location import find_stores, memory_folder, read_run_folder

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/guide/sweep.md").read_text()
FAST = [*TINY, "--stop-score", "none", "--max-minutes", "0", "--max-updates", "300", "--single-process"]
NUM_TRIALS = 3

pytestmark = pytest.mark.programs


def commands_of(name):
    """The commands of the page that begin with these words, without comments."""
    lines = [shlex.split(line, comments=True) for line in PAGE.splitlines() if line.startswith(name)]
    return [line[1:] for line in lines]


def start(folder, arguments, log):
    path = os.pathsep.join(each for each in sys.path if each)
    with open(folder / log, "w") as file:
        command = [sys.executable, "-m", "apex", *arguments]
        environment = {**os.environ, "PYTHONPATH": path}
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=file, stderr=subprocess.STDOUT)


@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of SQLAlchemy
def test_a_sweep_survives_ctrl_c_and_kill_and_compares_its_winner(tmp_path):
    optuna = pytest.importorskip("optuna", reason="needs the extra sweep")
    (toml,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "cartpole.toml").write_text(toml)
    (sweep,) = [words for words in commands_of("apex sweep") if "--trials" in words]
    command = [*sweep, "--trials", str(NUM_TRIALS), "--jobs", "1", *FAST]
    database = tmp_path / "sweeps/cartpole/study.db"

    def trials(*states):
        if not database.exists():
            return []
        try:
            study = optuna.load_study(study_name="cartpole", storage=f"sqlite:///{database}")
        except (KeyError, AssertionError, optuna.exceptions.StorageInternalError):
            return []  # The sweep creates it now.
        return [trial for trial in study.trials if not states or trial.state.name in states]

    def has_run(number):
        return (tmp_path / f"sweeps/cartpole/runs/trial-{number}/curves/learner.jsonl").exists()

    first = start(tmp_path, command, "first.log")
    try:
        until(lambda: has_run(0), "no run", seconds=240.0)
        first.send_signal(signal.SIGINT)
        assert first.wait(300) == 130, (tmp_path / "first.log").read_text()
        assert [trial.state.name for trial in trials()] == ["FAIL", "WAITING"]

        second = start(tmp_path, command, "second.log")
        until(lambda: trials("COMPLETE") and has_run(2), "no trial has finished", seconds=200.0)
        second.kill()
        second.wait()
    finally:
        first.kill()
    finished = {trial.number: trial.value for trial in trials("COMPLETE")}
    (killed,) = trials("RUNNING")
    until(lambda: not running_in(tmp_path), "a program is left", seconds=20.0)

    last = start(tmp_path, command, "last.log")
    assert last.wait(600) == 0, (tmp_path / "last.log").read_text()
    values = {trial.number: trial.value for trial in trials("COMPLETE")}
    assert finished.items() <= values.items()
    assert len(values) == NUM_TRIALS
    (repeated,) = [trial for trial in trials("COMPLETE") if trial.user_attrs.get("first") == killed.number]
    assert repeated.params == killed.params
    runs = tmp_path / "sweeps/cartpole/runs"
    assert {RunFolder.open(runs / f"trial-{i}").config.seed for i in (0, 2, 4)} == {1, 3, 5}
    assert [
        read_run_folder(store) for store in find_stores(memory_folder()) if str(tmp_path) in read_run_folder(store)
    ] == []

    table = (tmp_path / "sweeps/cartpole/table.md").read_text()
    assert re.findall(r"seed (\d+)", table) == ["10001", "10002", "10003", "10004", "10005"]
    assert "overlap" in table
    assert table in (tmp_path / "last.log").read_text()
    assert (tmp_path / "sweeps/cartpole/winner.png").stat().st_size > 10_000
    config = parse_config(["--config", str(tmp_path / "sweeps/cartpole/winner.toml")], prog="apex train")
    best = max(trials("COMPLETE"), key=lambda trial: trial.value)
    assert config.learner.learning_rate == best.params["learner.learning_rate"]
    assert (config.seed, config.run.folder, config.run.name, config.checkpoint.replay) == (1, "runs", "", True)

    again = start(tmp_path, command, "again.log")
    assert again.wait(300) == 0  # Nothing is left to train.
    assert table in (tmp_path / "again.log").read_text()
    other = start(tmp_path, [*command, "--seed", "5"], "other.log")
    assert other.wait(300) == 2
    assert "seed" in (tmp_path / "other.log").read_text()


@pytest.mark.timeout(900)
def test_seeds_are_trained_one_after_the_other_and_compared(tmp_path):
    (train,) = commands_of("apex train --preset")
    command = [*train, *FAST, "--seeds", "1,4"]
    run = start(tmp_path, command, "log")
    assert run.wait(450) == 0, (tmp_path / "log").read_text()
    runs = {path.name: RunFolder.open(path) for path in (tmp_path / "runs").iterdir() if path.is_dir()}
    assert {name: folder.config.seed for name, folder in runs.items()} == {"mine-seed-1": 1, "mine-seed-4": 4}
    lines = (tmp_path / "log").read_text().splitlines()
    rows = [re.split(r" *\| *", line)[1:-1] for line in lines if line.startswith("| ")]
    assert [row[0] for row in rows] == ["run", "---", "seed 1", "seed 4", "median", "lowest", "highest"]
    assert rows[0][1:] == ["score", "best", "minutes"]
    assert (tmp_path / "runs/mine.png").stat().st_size > 10_000
    again = start(tmp_path, command, "again")
    assert again.wait(300) == 2  # The name of the first run is taken.
    assert "mine-seed-1" in (tmp_path / "again").read_text()


@pytest.mark.timeout(600)
def test_the_example_of_ray_tune_ends_trials_early(tmp_path):
    for package in ("ray", "pandas", "pyarrow"):
        pytest.importorskip(package, reason="needs ray[tune]")
    path = os.pathsep.join(each for each in sys.path if each)
    command = [sys.executable, str(ROOT / "examples/ray_tune.py"), "--trials", "4", "--max-minutes", "0.2"]
    environment = {**os.environ, "PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0"}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = re.search(r"4 trials, (\d) ended early", ended.stdout)
    assert found, ended.stdout
