"""`apex plot`: what the picture shows, what is printed, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.run_builders import ACTOR, make_run

from apex.cli import main
from apex.runs.plots.aggregate import Curve, CurveGroup
from apex.runs.plots.figure import COLORS, draw, save_picture

SCORES = [(5, 1_000, 10), (10, 2_000, 480)]
CSV = "seconds,steps,score\n6,1000,20\n20,3000,200\n"


def curve(*points):
    return Curve(*np.array(points, float).T)


GROUPS = [
    CurveGroup("ours", [curve((0, 0, 0), (10, 1_000, 400)), curve((0, 0, 20), (20, 3_000, 500))]),
    CurveGroup("theirs", [curve((0, 0, 10), (30, 1_000, 300))]),
]


def plot(capsys, *words):
    """Status, standard output by lines, standard error."""
    status = main(["plot", *map(str, words)])
    said = capsys.readouterr()
    return status, said.out.splitlines(), said.err


def write(path, text=CSV):
    path.write_text(text)
    return path


# --- the picture ----------------------------------------------------------------------------------------------------


def test_two_panels_show_the_same_scores_by_steps_and_by_wall_clock():
    figure = draw(GROUPS, "CartPole", 475.0)
    steps, clock = figure.axes
    assert steps.get_xlabel() == "steps (agent decisions)"
    assert clock.get_xlabel() == "wall clock (seconds)"
    theirs = [next(line for line in axes.lines if line.get_color() == COLORS[1]) for axes in (steps, clock)]
    assert [list(line.get_xdata()) for line in theirs] == [[0, 1_000], [0, 30]]
    assert [list(line.get_ydata()) for line in theirs] == [[10, 300]] * 2
    assert steps.get_ylim() == clock.get_ylim()


def test_the_legend_names_the_groups_and_a_sentence_says_what_line_and_band_are():
    figure = draw(GROUPS, "CartPole", None)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["ours · 2 seeds", "theirs"]
    title, how_to_read = (text.get_text() for text in figure.texts)
    assert title == "CartPole"
    assert "median of the seeds" in how_to_read
    assert "lowest to highest" in how_to_read
    assert "keep their last score" in how_to_read


def test_a_band_has_a_pale_part_where_a_seed_has_ended():
    bands = draw(GROUPS, "", None).axes[1].collections
    spans = [(band.get_paths()[0].vertices[:, 0].min(), band.get_paths()[0].vertices[:, 0].max()) for band in bands]
    assert spans == [(0, 10), (10, 20)]
    assert bands[0].get_alpha() > bands[1].get_alpha()


def test_the_threshold_is_a_dashed_line_with_its_number():
    for axes in draw(GROUPS, "", 475.0).axes:
        assert next(line for line in axes.lines if list(line.get_ydata()) == [475, 475]).is_dashed()
    assert [text.get_text() for text in draw(GROUPS, "", 475.0).axes[1].texts] == ["475"]


@pytest.mark.parametrize("scores", [[(0, 0, 0)], [(3, 7, -5.0)], [(0, 0, 3), (0, 0, 3)]])
def test_one_evaluation_is_a_picture_too(scores):
    low, high = draw([CurveGroup("one", [curve(*scores)])], "", None).axes[0].get_ylim()
    assert low <= scores[0][2] <= high
    assert low < high


def test_the_same_data_gives_the_same_file(tmp_path):
    files = [tmp_path / "a.svg", tmp_path / "b.svg"]
    for file in files:
        save_picture(file, GROUPS, "Cost $1_{ or $2", 475.0)  # Dollars, no formula.
    assert files[0].read_bytes() == files[1].read_bytes()
    assert files[0].read_bytes().startswith(b"<?xml")


# --- the command ----------------------------------------------------------------------------------------------------


def test_runs_and_curves_of_others_stand_in_one_picture(tmp_path, capsys):
    runs = [make_run(tmp_path, SCORES, seed=seed).path for seed in (1, 2)]
    file = write(tmp_path / "dqn.csv")
    out = tmp_path / "x.png"
    status, said, _ = plot(capsys, *runs, "--curve", f"DQN={file}", "--threshold", 475, "--out", out, "--json")
    assert status == 0
    assert said[:3] == [
        "apex: 2 seeds, last score 480 (480 ... 480), reached 475 after 0:10 (0:10 ... 0:10)",
        "DQN: 1 seed, last score 200, 475 reached by 0 of 1",
        f"picture: {out}",
    ]
    ours, theirs = json.loads(said[3])["groups"]
    assert (ours["label"], ours["seeds"], ours["last_scores"]) == ("apex", 2, [480, 480])
    assert (ours["reached_seconds"], ours["reached_steps"]) == (pytest.approx([10, 10]), [2_000, 2_000])
    assert (theirs["best_scores"], theirs["reached_seconds"]) == ([200], [None])
    assert out.read_bytes().startswith(b"\x89PNG")


def test_curves_of_others_need_no_run(tmp_path, capsys):
    one, two = write(tmp_path / "1.csv"), write(tmp_path / "2=b.csv", CSV.replace("200", "300"))
    words = ["--curve", f"DQN={one}", "--curve", f"DQN={two}", "--title", "T", "--threshold", 250]
    status, said, _ = plot(capsys, *words, "--out", tmp_path / "x.svg")
    assert (status, said[0]) == (0, "DQN: 2 seeds, last score 250 (200 ... 300), 250 reached by 1 of 2")
    assert (tmp_path / "x.svg").exists()


def test_scores_that_are_no_evaluations_are_told(tmp_path, capsys):
    run = make_run(tmp_path, SCORES, role="actor", tag=ACTOR)
    _, said, _ = plot(capsys, run.path, "--out", tmp_path / "x.svg")
    assert said[0] == "apex: 1 seed, training scores of actor 7, not evaluations, last score 480"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["RUN"], "the following arguments are required: --out"),
        (["RUN", "--out", "x.gif"], "--out must end in .png or .svg, got x.gif"),
        (["RUN", "--out", "none/x.png"], "there is no folder none"),
        (["RUN", "--out", "DIR.png"], "DIR.png is a folder"),
        (["--out", "x.png"], "nothing to plot: name a run, or pass --curve NAME=FILE.csv"),
        (["none", "--out", "x.png"], "none is not a run folder"),
        (["EMPTY", "--out", "x.png"], "has no scores yet"),
        (["RUN", "RUN", "--out", "x.png"], "is given 2 times"),
        (["--curve", "good.csv", "--out", "x.png"], "--curve must have the form NAME=FILE.csv, got 'good.csv'"),
        (["--curve", "=good.csv", "--out", "x.png"], "--curve must have the form NAME=FILE.csv, got '=good.csv'"),
        (["--curve", "A=bad.csv", "--out", "x.png"], "bad.csv, line 3: steps must be a number >= 0, got 'x'"),
        (["--curve", "A=good.csv", "--curve", "A=good.csv", "--out", "x.png"], "a file is given twice"),
        (["RUN", "--curve", "apex=good.csv", "--out", "x.png"], "--curve apex: a curve of the runs already has"),
        (["RUN", "--out", "x.png", "--threshold", "high"], "--threshold: must be a number, got 'high'"),
        (["RUN", "--out", "x.png", "--band"], "unrecognized arguments: --band"),
    ],
)
def test_a_users_mistake_is_one_sentence_and_status_2(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    make_run("runs", SCORES, name="RUN")
    make_run("runs", name="EMPTY")
    write(tmp_path / "good.csv")
    write(tmp_path / "bad.csv", "seconds,steps,score\n1,2,3\n4,x,6\n")
    (tmp_path / "DIR.png").mkdir()
    status, said, complaint = plot(capsys, *words)
    assert (status, said) == (2, [])
    assert message in complaint
    assert complaint.count("\n") == 1
    assert not (tmp_path / "x.png").exists()


def test_a_picture_that_cannot_be_written_is_a_sentence(tmp_path, capsys):
    out = tmp_path / "x.svg"
    out.symlink_to("/dev/full")
    status, _, complaint = plot(capsys, make_run(tmp_path, SCORES).path, "--out", out)
    assert status == 2
    assert "cannot write" in complaint
