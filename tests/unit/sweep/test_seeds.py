"""The option --seeds, and the table of several seeds."""

import pytest

from apex.cli import main
from apex.config.arguments import seeds
from apex.sweep import seeds as command
from apex.sweep.seeds import make_table
from apexreplay.errors import UsageError


@pytest.mark.parametrize(
    ("text", "found"), [("1-5", [1, 2, 3, 4, 5]), ("1,4,9", [1, 4, 9]), ("7", [7]), ("8-9,2", [8, 9, 2])]
)
def test_lists_of_seeds_are_read(text, found):
    assert seeds(text) == found


@pytest.mark.parametrize("text", ["", "5-1", "1,1", "1-3,2", "-1", "1-", "a", "1.5", "0-2147483647", "2147483648"])
def test_other_seeds_are_refused(text, capsys):
    assert main(["train", "--seeds", text]) == 2
    assert "--seeds" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--engine", "ray"], ["--prest", "cartpole"], ["--learner.batch-size", "x"]])
def test_options_are_checked_before_the_first_run(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--seeds", "1-2", "--preset", "cartpole", *words]) == 2
    assert not list(tmp_path.iterdir())


def test_a_run_with_the_common_name_is_not_touched(tmp_path, monkeypatch):
    """The option check comes before the first run, and must not continue a run."""
    asked = []
    monkeypatch.setattr(command, "read_start", lambda words: asked.append(words) or (_ for _ in ()).throw(KeyError))
    with pytest.raises(KeyError):
        command.main(["--seeds", "3-4", "--preset", "cartpole", "--name", "mine", "--continue"])
    assert asked[0][-2:] == ["--name", "mine-seed-3"]


def test_runs_without_a_name_cannot_be_continued():
    with pytest.raises(UsageError) as refused:
        command.main(["--seeds", "3-4", "--preset", "cartpole", "--continue"])
    assert "--name" in refused.value.remedy


def test_a_table_has_a_row_for_each_seed_and_their_median_and_range():
    lines = make_table("score", [4, 5, 6], {"winner": [10.0, 30.0, 25.04], "start": [1.0, float("inf"), 0.123456]})
    assert lines == [
        "| score | winner | start |",
        "| --- | --- | --- |",
        "| seed 4 | 10 | 1 |",
        "| seed 5 | 30 | inf |",
        "| seed 6 | 25.04 | 0.1235 |",
        "| median | 25.04 | 1 |",
        "| lowest | 10 | 0.1235 |",
        "| highest | 30 | inf |",
    ]
