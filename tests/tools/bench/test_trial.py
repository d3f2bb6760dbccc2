"""`python -m bench learning trial`: designed experiments, with effects computed by hand."""

import json
import math
import os
import shlex
from types import SimpleNamespace

import pytest

from apexreplay.errors import UsageError
from bench.learning import command as learning
from bench.learning import trial
from bench.learning.design import Design, effects, read_design, render_design, t_quantile
from bench.learning.trial import FOLDER

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
    assert limit.conclusion == "none: the seeds differ too much"
    worse = {cell: [-score for score in scores] for cell, scores in SCORES.items()}
    assert effects(make_design(), worse)[0].conclusion == "lower"


def test_each_level_beside_the_first_has_an_effect():
    design = make_design({"a": [1, 2, 3]})
    found = effects(design, {(1,): [0.0, 1.0, 2.0], (2,): [4.0, 5.0, 6.0], (3,): [0.0, 1.0, 2.0]})
    assert [(each.level, each.value) for each in found] == [(2, 4.0), (3, 0.0)]
    reach = 2.4469 * math.sqrt(2 / 3)  # 6 degrees of freedom
    assert found[0].high == pytest.approx(4 + reach, abs=1e-3)


@pytest.mark.parametrize(("freedom", "value"), [(4, 2.7764), (8, 2.3060), (16, 2.1199), (100, 1.9840)])
def test_quantiles_of_t_are_those_of_its_table(freedom, value):
    assert t_quantile(0.975, freedom) == pytest.approx(value, rel=1e-3)
    assert t_quantile(0.025, freedom) == pytest.approx(-value, rel=1e-3)


def test_tables_name_cells_effects_and_missing_runs():
    lines = render_design(make_design(), SCORES)
    assert "| nothing | 2.0 (1.0, 2.0, 3.0) |" in lines
    assert "| learner.target_period 1000, learner.learning_rate_until_limit true | 7.0 (6.0, 7.0, 8.0) |" in lines
    assert "| learner.target_period 1000, not 100 | +4.00 (+2.67 to +5.33) | higher |" in lines
    some = render_design(make_design(), {(100, False): [1.0, 2.0]})
    assert some[-1] == "No effects yet: 10 of 12 runs are missing."
    assert "| learner.target_period 1000 | - |" in some


DESIGN = """
options = ["--env", "CartPole-v1"]
seeds = [7, 8, 9]
[factors]
"learner.target_period" = [100, 1000]
"""


class Commands:
    """Replaces `apex`: a run ends at once, and the score of its policy is its target period plus its seed."""

    def __init__(self, python):
        self.python = python

    def train(self, task, seed, minutes, further):
        return [self.python, "train", *task.options, "--seed", str(seed), *further]

    def read(self, folder, began):
        return SimpleNamespace(steps=500, updates=90)

    def evaluate(self, folder, episodes, seed, *, final):
        assert final
        scores = json.dumps({"scores": [seed - 1_000_000] * episodes, "epsilon": 0.001})
        return ["echo", scores]

    def show(self, command):
        return shlex.join(["apex", *command[1:]])


@pytest.fixture
def experiment(tmp_path, monkeypatch):
    """Runs the command in this process with a stand-in for Python; returns its status."""
    monkeypatch.setattr(trial, "ApexSystem", Commands)
    (tmp_path / "calm.toml").write_text(DESIGN)

    def run(*arguments, python="true"):
        words = ["--root", str(tmp_path), "trial", str(tmp_path / "calm.toml"), "--python", python, *arguments]
        return learning.main(words)

    return run


def runs_of(tmp_path):
    return [json.loads(line) for line in (tmp_path / FOLDER / "calm.jsonl").read_text().splitlines()]


def test_runs_are_made_by_turns_and_only_once(experiment, tmp_path, capsys):
    assert experiment() == 0
    runs = runs_of(tmp_path)
    commands = [f"apex train --env CartPole-v1 --learner.target_period={period} --seed {seed}"
                for seed in (7, 8, 9) for period in (100, 1000)]  # fmt: skip
    assert [run["command"] for run in runs] == commands
    assert {run["score"] for run in runs} == {7.0, 8.0, 9.0}
    assert [run["cores"] for run in runs] == [len(os.sched_getaffinity(0))] * 6
    assert "| nothing | 8.0 (7.0, 8.0, 9.0) |" in capsys.readouterr().out
    assert experiment(python="false") == 0  # Nothing is left to run.
    assert len(runs_of(tmp_path)) == 6


def test_a_changed_design_keeps_the_runs_that_it_has_in_common(experiment, tmp_path, capsys):
    assert experiment() == 0
    (tmp_path / "calm.toml").write_text(DESIGN.replace("1000", "500"))
    assert experiment("--jobs", "1") == 0
    assert len(runs_of(tmp_path)) == 9
    (tmp_path / "calm.toml").write_text(DESIGN.replace("[7,", "[6,"))
    assert experiment(python="false") == 1
    assert "No effects yet: 2 of 6 runs are missing." in capsys.readouterr().out


def test_jobs_share_the_cores(experiment, tmp_path):
    cores = len(os.sched_getaffinity(0))
    assert experiment("--jobs", str(cores)) == 0
    runs = runs_of(tmp_path)
    assert len({run["command"] for run in runs}) == 6
    assert {run["cores"] for run in runs} == {1}
    assert {run["others_share"] is None for run in runs} == {cores > 1}


def test_a_failed_run_is_not_recorded_and_the_others_are_made(experiment, tmp_path, capsys):
    script = tmp_path / "python"
    script.write_text('#!/bin/sh\ncase "$*" in *"period=1000 --seed 8"*) exit 3;; esac\n')
    script.chmod(0o755)
    assert experiment(python=str(script)) == 1
    assert len(runs_of(tmp_path)) == 5
    assert "--seed 8: the command ended with status 3" in capsys.readouterr().err


def test_no_run_starts_after_the_hours(experiment, tmp_path, capsys):
    assert experiment("--hours", "1e-9") == 0
    assert not (tmp_path / FOLDER).exists()
    assert "6 of 6 runs are missing" in capsys.readouterr().out


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
        (DESIGN.replace('"--env", ', ""), "--env"),
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
    (tmp_path / FOLDER / "calm.jsonl").write_text('{"command": "apex"}\n')
    assert experiment() == 2
    assert "calm.jsonl has a line that is no run" in capsys.readouterr().err
