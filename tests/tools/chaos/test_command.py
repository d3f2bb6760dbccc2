"""`python -m chaos`: real runs under faults, refusals, and the table of figures."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from apexreplay.store.location import memory_folder
from chaos import __main__
from chaos.report import Figure, recovery_figures

DEADLINE = 540.0
SMALL = ["--actors", "2", "--evaluator.no-enabled", "--replay.capacity", "50000", "--replay.min-size-to-sample", "200"]


ROOT = Path(__file__).parents[3]


def run_chaos(folder, *arguments):
    command = [sys.executable, "-m", "chaos", *arguments, "--run.folder", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, cwd=ROOT)


@pytest.mark.covers_programs
@pytest.mark.timeout(600)
def test_a_short_run_under_faults_loses_nothing_and_leaves_nothing(tmp_path):
    arguments = ["--minutes", "0.16", "--period", "2", "--seed", "898", "--faults", "kill,hangup,cut,garbage", "--json"]
    before = set(memory_folder().iterdir())
    ended = run_chaos(tmp_path, *arguments, *SMALL)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = json.loads(ended.stdout)
    figures = {figure["name"]: figure["value"] for figure in report["figures"]}
    assert report["passed"]
    assert figures["faults"] == 4
    assert figures["kill -9 of replay"] == 1
    assert figures["resumes after a launcher's death"] == 1
    assert figures["acknowledged, alive"] > 500
    for count in ("lost", "twice", "never sent"):
        assert figures[f"{count}, alive"] == figures[f"{count}, after the end"] == 0
    for fault in ("kill -9 replay", "SIGHUP launcher", "cut actor-learner", "garbage"):
        assert fault in ended.stderr
    assert set(memory_folder().iterdir()) <= before
    assert not [
        entry.name
        for entry in Path("/proc").iterdir()
        if entry.name.isdecimal() and entry.name != str(os.getpid()) and str(tmp_path).encode() in _command(entry)
    ]


@pytest.mark.timeout(600)
def test_kills_lose_nothing_with_and_without_waiting_inserts(tmp_path):
    ended = run_chaos(tmp_path, "--scenario", "kills", "--rounds", "1", "--json", *SMALL)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = json.loads(ended.stdout)
    assert report["passed"]
    figures = {}
    for figure in report["figures"]:
        part, _, name = figure["name"].partition(": ")
        figures.setdefault(part, {})[name] = figure["value"]
    waiting, free = figures.values()
    assert {name for name in waiting if name.startswith("kill -9 of")} == {"kill -9 of actor"}
    for victim in ("actor", "learner", "loader", "replay", "launcher"):
        assert free[f"kill -9 of {victim}"] == 1
    for part in (waiting, free):
        assert part["aborted programs"] == part["lost, after the end"] == part["twice, after the end"] == 0
        assert part["acknowledged, after the end"] > 100


def _command(entry):
    try:
        return (entry / "cmdline").read_bytes()
    except OSError:
        return b""


def test_hostile_and_saves_are_separate_programs(monkeypatch):
    for word in ("hostile", "saves"):
        tape = []
        program = types.SimpleNamespace(main=lambda argv, tape=tape: tape.append(argv) or 5)
        monkeypatch.setitem(sys.modules, f"chaos.{word}.command", program)
        assert __main__.main([word, "--count", "3"]) == 5
        assert tape == [["--count", "3"]]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--env", "CartPole-v1"],
        ["--faults", "flood"],
        ["--minutes", "0"],
        ["--scenario", "kills", "--minutes", "1"],
        ["--nonsense", "1"],
    ],
)
def test_a_mistake_is_refused_before_anything_starts(tmp_path, monkeypatch, capsys, arguments):
    monkeypatch.chdir(tmp_path)
    assert __main__.main(arguments) == 2
    name = "CartPole-v1" if "CartPole-v1" in arguments else arguments[-2]
    assert name in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("value", "bar", "reached"),
    [(2.0, "<= 2", True), (2.1, "<= 2", False), (80, ">= 80", True), (79, ">= 80", False), (None, "<= 2", False)],
)
def test_a_figure_meets_its_bar_or_misses_it(value, bar, reached):
    assert Figure("figure", value, bar=bar).reached is reached


def test_recoveries_that_never_came_count_as_the_longest():
    median, longest = recovery_figures({"replay": [1.0, None, 1.5]}, {"replay": 2.0})
    assert (median.value, median.reached, longest.value) == (1.5, True, None)
    median, _ = recovery_figures({"replay": [1.0, None, None]}, {"replay": 2.0})
    assert (median.value, median.reached) == (None, False)
    median, longest = recovery_figures({"replay": [1.0, 3.0, 2.5]}, {"replay": 2.0})
    assert (median.value, median.reached, longest.value) == (2.5, False, 3.0)
