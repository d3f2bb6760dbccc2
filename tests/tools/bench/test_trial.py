"""`python -m bench learning trial`: designed experiments, with effects computed by hand."""

import json
import math
import os
import shlex
import subprocess
import tomllib
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from apexreplay.errors import UsageError
from bench.learning import command as learning
from bench.learning import records, trial
from bench.learning.design import Design, effects, read_design, render_design, t_quantile
from bench.learning.records import is_same_code
from bench.learning.trial import FOLDER, _Trial, share

ROOT = Path(__file__).parents[3]

PAIR = {"learner.target_period": [100, 1000], "learner.learning_rate_until_limit": [False, True]}
CARTPOLE = ["--env", "CartPole-v1"]


def make_design(factors=PAIR, **changes):
    return Design(options=CARTPOLE, seeds=[1, 2, 3], factors=factors, **changes)


def test_the_baseline_is_the_first_of_all_combinations():
    cells = make_design({"a": [1, 2, 3], "b": ["x", "y"]}).cells()
    assert cells == [(1, "x"), (1, "y"), (2, "x"), (2, "y"), (3, "x"), (3, "y")]


def test_half_of_the_combinations_change_an_even_number_of_factors():
    cells = make_design({name: [0, 1] for name in "abc"}, half=True).cells()
    assert cells == [(0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 0)]
    for one, other in ((0, 1), (0, 2), (1, 2)):  # Each pair of levels is in the same number of cells.
        assert len({(cell[one], cell[other]) for cell in cells}) == 4


def test_levels_become_options():
    options = make_design({**PAIR, "actor.n_step": [3, 1]}).settings((1000, False, 3))
    assert options[2:] == ["--learner.target_period=1000", "--learner.no-learning_rate_until_limit", "--actor.n_step=3"]


# Deviations from the mean of a cell are -1, 0 and 1, so the pooled variance of a seed is 8 / (4 * 2) = 1. An effect is
# the difference of two means of six seeds: its variance is 2 / 6. t has 8 degrees of freedom: 2.306.
SCORES = {
    (100, False): [1.0, 2.0, 3.0],
    (100, True): [2.0, 3.0, 4.0],
    (1000, False): [7.0, 6.0, 5.0],
    (1000, True): [6.0, 7.0, 8.0],
}


def test_effects_and_intervals_are_those_computed_by_hand():
    period, limit = effects(make_design(), SCORES)
    reach = 2.306 * math.sqrt(1 / 3)
    assert (period.factor, period.level, period.value) == ("learner.target_period", 1000, 4.0)
    assert (period.low, period.high) == pytest.approx((4 - reach, 4 + reach), abs=1e-3)
    assert period.conclusion == "higher"
    assert (limit.value, limit.low) == pytest.approx((1.0, 1 - reach), abs=1e-3)
    assert limit.conclusion == "none: the interval contains 0"
    worse = {cell: [-score for score in scores] for cell, scores in SCORES.items()}
    assert effects(make_design(), worse)[0].conclusion == "lower"


def test_effects_on_times_are_ratios():
    design = make_design(measure="seconds", minutes=50)
    times = {cell: [math.exp(score) for score in scores] for cell, scores in SCORES.items()}
    reach = 2.306 * math.sqrt(1 / 3)
    for ratio, effect in zip(effects(design, times), effects(make_design(), SCORES), strict=True):
        assert ratio[2:5] == pytest.approx([math.exp(each) for each in effect[2:5]])
        assert ratio.conclusion == effect.conclusion.replace("contains 0", "contains 1")
    lines = render_design(design, times)
    assert "| nothing | 7 (3, 7, 20) |" in lines
    low, high = math.exp(4 - reach), math.exp(4 + reach)
    change = "learner.target_period 1000, not 100"
    assert f"| {change} | {math.exp(4):.2f} ({low:.2f} to {high:.2f}) | higher |" in lines
    assert lines[-1].startswith("0 of 12 runs")
    assert render_design(make_design(measure="seconds", minutes=0.3), times)[-1].startswith("9 of 12 runs")


def test_each_level_beside_the_first_has_an_effect():
    design = make_design({"a": [1, 2, 3]})
    found = effects(design, {(1,): [0.0, 1.0, 2.0], (2,): [4.0, 5.0, 6.0], (3,): [0.0, 1.0, 2.0]})
    assert [(each.level, each.value) for each in found] == [(2, 4.0), (3, 0.0)]
    reach = 2.7764 * math.sqrt(2 / 3)  # 4 degrees of freedom
    assert found[0].high == pytest.approx(4 + reach, abs=1e-3)


def test_a_spread_in_one_cell_has_fewer_degrees_of_freedom():
    (effect,) = effects(make_design({"a": [1, 2]}), {(1,): [1.0, 1.0, 1.0], (2,): [0.0, 3.0, 6.0]})
    reach = 4.3027 * math.sqrt(9 / 3)  # The variance of the second cell is 9; 2 degrees of freedom.
    assert effect.high == pytest.approx(2 + reach, rel=1e-2)
    (effect,) = effects(make_design({"a": [1, 2]}), {(1,): [1.0] * 3, (2,): [3.0] * 3})
    assert (effect.low, effect.high) == (2.0, 2.0)


@pytest.mark.parametrize(("freedom", "value"), [(4, 2.7764), (8, 2.3060), (16, 2.1199), (100, 1.9840)])
def test_quantiles_of_t_are_those_of_its_table(freedom, value):
    assert t_quantile(0.975, freedom) == pytest.approx(value, rel=1e-3)
    assert t_quantile(0.025, freedom) == pytest.approx(-value, rel=1e-3)
    assert t_quantile(0.975, 2.0) == pytest.approx(4.3027, rel=1e-2)


def test_tables_name_cells_effects_and_missing_runs():
    lines = render_design(make_design(), SCORES)
    assert "| nothing | 2.00 (1.00, 2.00, 3.00) |" in lines
    assert "| learner.target_period 1000, learner.learning_rate_until_limit true | 7.00 (6.00, 7.00, 8.00) |" in lines
    assert "| learner.target_period 1000, not 100 | +4.00 (+2.67 to +5.33) | higher |" in lines
    some = render_design(make_design(), {(100, False): [1.0, None, 2.0]})
    assert some[-1] == "No effects yet: 10 of 12 runs are missing."
    assert "| nothing | 1.00, -, 2.00 |" in some
    assert "| learner.target_period 1000 | -, -, - |" in some


DESIGN = """
options = ["--env", "CartPole-v1", "--stop-score", "none", "--max-updates", "90"]
seeds = [7, 8, 9]
[factors]
"learner.target_period" = [100, 1000]
"""

TIMED = 'measure = "seconds"\nminutes = 9\n' + DESIGN.replace("none", "450").replace(', "--max-updates", "90"', "")


CODE = "c" * 40


class Commands:
    """Replaces `apex`: a run ends at once, and the score of its policy is its target period plus its seed."""

    def __init__(self, python):
        self.python = python

    def train(self, task, seed, minutes, further):
        return [self.python, "train", *task.options, "--seed", str(seed), *further]

    def read(self, folder, began):
        return SimpleNamespace(steps=500, updates=90, versions={"apex": "0.2.0"}, dormant_shares={"8000": 0.5})

    def evaluate(self, folder, episodes, seed, *, final):
        assert final
        (period,) = (folder / "period").read_text().split()
        scores = json.dumps({"scores": [int(period) + seed - 1_000_000] * episodes, "epsilon": 0.001})
        return ["echo", scores]

    def show(self, command):
        return shlex.join(["apex", *command[1:]])


TRAIN = """#!/bin/sh
for word; do case $word in --learner.target_period=*) echo "${word#*=}" > period;; esac; done
taskset --cpu-list --pid $$ >> %s
"""


@pytest.fixture
def experiment(tmp_path, monkeypatch):
    """Runs the command in this process with a stand-in for Python, whose end is given; returns its status."""
    monkeypatch.setattr(trial, "ApexSystem", Commands)
    monkeypatch.setattr(records, "describe_code", lambda *_: (CODE, False))
    monkeypatch.setattr(trial, "require_native_code", lambda: None)
    monkeypatch.setattr(trial, "EARLY_SECONDS", 0.0)
    monkeypatch.setattr(trial, "OTHERS_SHARE", 2.0)  # Other tests run beside this one.
    (tmp_path / "calm.toml").write_text(DESIGN)

    def run(*arguments, end=""):
        python = tmp_path / "python"
        python.write_text(TRAIN % (tmp_path / "cores") + end)
        python.chmod(0o755)
        return learning.main(
            ["--root", str(tmp_path), "trial", str(tmp_path / "calm.toml"), "--python", str(python), *arguments]
        )

    return run


def runs_of(tmp_path):
    return [json.loads(line) for line in (tmp_path / FOLDER / "calm.jsonl").read_text().splitlines()]


def test_runs_are_made_by_turns_and_only_once(experiment, tmp_path, capsys):
    assert experiment() == 0
    runs = runs_of(tmp_path)
    start = "apex train --env CartPole-v1 --stop-score none --max-updates 90"
    commands = [f"{start} --learner.target_period={period} --seed {seed}"
                for seed in (7, 8, 9) for period in (100, 1000)]  # fmt: skip
    assert [run["command"] for run in runs] == commands
    assert [run["score"] for run in runs] == [107.0, 1007.0, 108.0, 1008.0, 109.0, 1009.0]
    assert [run["cores"] for run in runs] == [len(os.sched_getaffinity(0))] * 6
    tables = capsys.readouterr().out
    assert "| nothing | 108.00 (107.00, 108.00, 109.00) |" in tables
    assert "| learner.target_period 1000, not 100 | +900.00" in tables
    assert experiment(end="exit 1") == 0  # Nothing is left to run.
    assert len(runs_of(tmp_path)) == 6


def test_times_until_a_score_can_be_compared(experiment, tmp_path, capsys):
    (tmp_path / "calm.toml").write_text(TIMED.replace("minutes = 9", "minutes = 0.001"))
    assert experiment(end="sleep 0.1\n") == 0
    assert all(run["seconds"] >= 0.1 for run in runs_of(tmp_path))
    assert "| nothing | 0 (0, 0, 0) |" in capsys.readouterr().out  # 0.06 s


def test_a_changed_design_keeps_the_runs_that_it_has_in_common(experiment, tmp_path, capsys):
    assert experiment() == 0
    (tmp_path / "calm.toml").write_text(DESIGN.replace("1000", "500"))
    assert experiment() == 0
    assert len(runs_of(tmp_path)) == 9
    (tmp_path / "calm.toml").write_text(DESIGN.replace("[7,", "[6,"))
    capsys.readouterr()
    assert experiment("--hours", "1e-9") == 0
    assert "No effects yet: 2 of 6 runs are missing." in capsys.readouterr().out


def test_jobs_have_as_many_cores_each():
    assert share([0, 1, 2], 2) == [[0], [1]]
    assert share([0, 1, 2, 3, 4, 5, 6], 3) == [[0, 1], [2, 3], [4, 5]]
    assert share([5], 1) == [[5]]


def test_a_program_that_cannot_start_is_no_failed_run(experiment, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Commands, "train", lambda *_: [str(tmp_path / "nowhere")])
    assert experiment() == 1
    assert "nowhere" in capsys.readouterr().err
    assert not (tmp_path / FOLDER).exists()


def test_a_file_that_cannot_be_written_ends_the_trial(experiment, tmp_path, capsys):
    (tmp_path / FOLDER).parent.mkdir(parents=True)
    (tmp_path / FOLDER).write_text("")  # a file in place of the folder, as a full disk refuses the write
    assert experiment() == 1
    errors = capsys.readouterr().err
    assert errors.count("apex train") == 1  # The next run is not started.
    assert "exists" in errors or "Not a directory" in errors


def test_a_run_during_which_the_commit_changed_is_not_recorded(experiment, tmp_path, capsys, monkeypatch):
    answers = iter([CODE, CODE, CODE, CODE, "d" * 40])  # before the first run; before and after each run
    monkeypatch.setattr(records, "describe_code", lambda *_: (next(answers), False))
    monkeypatch.setattr(records, "is_same_code", lambda commit, other, folders: False)
    assert experiment() == 2
    assert "the code has changed during the run" in capsys.readouterr().err
    assert len(runs_of(tmp_path)) == 1


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_runs_at_the_same_time_have_cores_of_their_own(experiment, tmp_path, capsys):
    assert experiment("--jobs", "2") == 0
    runs = runs_of(tmp_path)
    assert len({run["command"] for run in runs}) == 6
    assert {run["others_share"] for run in runs} == {None}
    used = {line.partition(": ")[2] for line in (tmp_path / "cores").read_text().splitlines()}
    assert len(used) == 2
    (tmp_path / "calm.toml").write_text(DESIGN.replace("seeds", "minutes = 1\nseeds"))
    assert experiment("--jobs", "2") == 2
    assert "with a time limit" in capsys.readouterr().err


def test_a_failed_run_is_not_repeated_and_the_others_are_made(experiment, tmp_path, capsys):
    fails = 'case "$*" in *"period=1000 --seed 8"*) exit 3;; esac\n'
    assert experiment(end=fails) == 1
    assert [run.get("failure") for run in runs_of(tmp_path)] == [None] * 3 + ["the command ended with status 3"] + [
        None
    ] * 2
    assert experiment() == 1
    captured = capsys.readouterr()
    assert "--seed 8: the command ended with status 3" in captured.err
    assert "| learner.target_period 1000 | 1007.00, -, 1009.00 |" in captured.out
    assert len(runs_of(tmp_path)) == 6


def test_a_run_that_fails_at_once_ends_the_trial(experiment, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(trial, "EARLY_SECONDS", 60.0)
    assert experiment(end="exit 3\n") == 1
    errors = capsys.readouterr().err
    assert errors.count("apex train") == 1
    assert "status 3" in errors
    assert not (tmp_path / FOLDER).exists()


def test_a_stopped_run_is_not_recorded(experiment, tmp_path, capsys):
    ends = f'case "$*" in *"period=1000 --seed 7"*) kill -INT {os.getpid()}; exec sleep 60;; esac\n'
    assert experiment(end=ends) == 130
    assert len(runs_of(tmp_path)) == 1
    assert "No effects yet: 5 of 6 runs are missing." in capsys.readouterr().out


def test_no_run_starts_after_the_hours(experiment, tmp_path, capsys):
    assert experiment("--hours", "1e-9") == 0
    assert not (tmp_path / FOLDER).exists()
    assert "6 of 6 runs are missing" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "design", "cause"),
    [
        ({"describe_code": lambda *_: (CODE, True)}, "", "the code differs from its commit"),
        ({"is_same_code": lambda one, other: False}, "", f"of commit {CODE}, which has other code"),
        ({"describe_machine": lambda: {"cpu": "Z80"}}, "minutes = 9", "had another processor"),
    ],
)
def test_runs_of_different_circumstances_are_not_mixed(
    experiment, tmp_path, capsys, monkeypatch, changes, design, cause
):
    (tmp_path / "calm.toml").write_text(f"{design}\n{DESIGN}")
    assert experiment() == 0
    *lines, _ = (tmp_path / FOLDER / "calm.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / FOLDER / "calm.jsonl").write_text("".join(lines))
    for name, change in changes.items():
        monkeypatch.setattr(records if name == "describe_code" else trial, name, change)
    assert experiment() == 2
    assert cause in capsys.readouterr().err
    assert len(runs_of(tmp_path)) == 5


def test_runs_with_more_cores_are_not_mixed_with_others(experiment, tmp_path, capsys):
    assert experiment() == 0
    _, *rest = runs_of(tmp_path)
    lines = [json.dumps(run | {"cores": 96}) for run in rest]
    (tmp_path / FOLDER / "calm.jsonl").write_text("\n".join(lines))
    assert experiment() == 2
    assert "the runs there had 96 cores each" in capsys.readouterr().err


def test_a_busy_machine_ends_no_run_that_counts_updates(experiment, tmp_path, monkeypatch):
    monkeypatch.setattr(trial, "OTHERS_SHARE", -1.0)
    assert experiment() == 0
    (tmp_path / "calm.toml").write_text("minutes = 9\n" + DESIGN.replace("1000", "500"))
    assert experiment() == 1
    assert "other processes used" in runs_of(tmp_path)[-1]["failure"]


def test_commits_with_the_same_packages_have_the_same_code(tmp_path):
    def git(*words):
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    def commit(name, text):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        git("add", ".")
        git("commit", "-qm", text)
        return git("rev-parse", "HEAD").strip()

    git("init", "-q")
    first, page, code = commit("apex/a.py", "1"), commit("docs/a.md", "2"), commit("apexreplay/a.py", "3")
    assert is_same_code(first, first, tmp_path)
    assert is_same_code(first, page, tmp_path)
    assert not is_same_code(page, code, tmp_path)
    with pytest.raises(OSError, match="cannot compare"):
        is_same_code(code, "0" * 40, tmp_path)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("seeds = 1", "seeds"),
        (DESIGN.replace(", 9", ""), "seeds"),
        (DESIGN.replace("9]", "8]"), "seeds has a value twice: 7, 8, 8"),
        (DESIGN.replace("1000", "100"), "learner.target_period has a value twice"),
        (DESIGN.replace(", 1000", ""), "learner.target_period has only one value, 100"),
        (DESIGN.replace("seeds", "half = true\nseeds"), "half needs three or more"),
        (DESIGN.replace("seeds", "minutes = 0\nseeds"), "minutes"),
        (DESIGN.replace("seeds", "limit = 0\nseeds"), "limit"),
        (DESIGN.replace('"--max-updates", "90"', ""), "the runs have no limit"),
        (DESIGN.replace('"--stop-score", "none", ', ""), "end at a score"),
        (TIMED.replace("450", "none"), "seconds need"),
        (TIMED.replace("minutes", "#"), "no limit"),
        (TIMED.replace('"450"', '"450", "--max-updates", "90"'), "seconds need"),
        (f'measure = "steps"\n{DESIGN}', "measure"),
        (DESIGN.replace('"--env", ', ""), "--env"),
        (DESIGN.replace("1000", "100.0"), "has a value twice: 100, 100.0"),
        (DESIGN.replace("1000", '"100"'), "has a value twice"),
        (DESIGN.replace("1000", "[1]"), "factors"),
        (DESIGN.replace("1000", "0"), "target_period"),
        (DESIGN.replace("[7,", "[-7,"), "seeds"),
        (DESIGN.replace("target_period", "target-period"), "learner.target-period is no setting"),
        (DESIGN.replace("learner.target_period", "run.max_updates"), "run.max_updates cannot be a factor"),
        (DESIGN.replace("learner.target_period", "seed"), "seed cannot be a factor"),
        ("[", "calm.toml"),
    ],
)
def test_a_file_that_is_no_design_is_refused(tmp_path, text, cause):
    path = tmp_path / "calm.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=cause):
        read_design(path)


def test_a_damaged_file_of_runs_is_refused(experiment, tmp_path, capsys):
    (tmp_path / FOLDER).mkdir(parents=True)
    (tmp_path / FOLDER / "calm.jsonl").write_text('{"score": 1}\n')
    assert experiment() == 2
    assert "calm.jsonl has a line that is no run" in capsys.readouterr().err
    (tmp_path / FOLDER / "calm.jsonl").unlink()
    assert experiment() == 0
    first, *rest = (tmp_path / FOLDER / "calm.jsonl").read_text().splitlines()
    for lines, cause in (
        ([first, first], "has a run twice"),
        ([first.replace("107.0", "NaN")], "score nan"),
        ([first.replace('"cores"', '"core"')], "cores"),
    ):
        (tmp_path / FOLDER / "calm.jsonl").write_text("\n".join([*lines, *rest]))
        capsys.readouterr()
        assert experiment() == 2
        assert cause in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted((ROOT / FOLDER).glob("*.jsonl")), ids=lambda path: path.stem)
def test_committed_runs_are_those_of_a_committed_design(path):
    file = ROOT / "bench/learning/trials" / f"{path.stem}.toml"
    design = msgspec.convert(tomllib.loads(file.read_text()), Design)  # `read_design` needs the environment's package.
    runs = _Trial(design, path, "python")
    missing = [seed for seeds in runs.scores().values() for seed in seeds if seed is None]
    assert missing == []
    assert len(path.read_text().splitlines()) == len(design.cells()) * len(design.seeds)


def test_a_design_without_minutes_passes_no_limit_of_time():
    assert "--max-minutes" not in _Trial(make_design(), ROOT / "none.jsonl", "python")._show(((100, False), 1))
    shown = _Trial(make_design(minutes=3), ROOT / "none.jsonl", "python")._show(((100, False), 1))
    assert shown.endswith("--seed 1 --max-minutes 3")
