"""Tests of `apex plot`: the picture, the printed lines, the JSON, and refused arguments."""

import json

import pytest
from support.run_builders import ACTOR, make_run

import apex
from apex.cli import main

SCORES = [(5, 1_000, 10), (10, 2_000, 480)]
CSV = "seconds,steps,score\n6,1000,20\n20,3000,200\n"


def plot(capsys, *arguments):
    """Returns the status, the lines of standard output, and standard error."""
    status = main(["plot", *map(str, arguments)])
    out, err = capsys.readouterr()
    return status, out.splitlines(), err


def write(path, text=CSV):
    path.write_text(text)
    return path


def test_runs_and_csv_files_are_drawn_in_one_picture(tmp_path, capsys):
    runs = [make_run(tmp_path, SCORES, seed=seed).path for seed in (1, 2)]
    file = write(tmp_path / "dqn.csv")
    out = tmp_path / "x.png"
    status, lines, _ = plot(capsys, *runs, "--curve", f"DQN={file}", "--threshold", 475, "--out", out, "--json")
    assert status == 0
    assert lines[:3] == [
        "apex: 2 seeds, last score 480 (480 ... 480), reached 475 after 0:00:10 (0:00:10 ... 0:00:10)",
        "DQN: 1 seed, last score 200, 475 reached by 0 of 1",
        f"picture: {out}",
    ]
    ours, theirs = json.loads(lines[3])["groups"]
    assert (ours["label"], ours["seeds"], ours["last_scores"]) == ("apex", 2, [480, 480])
    assert (ours["reached_seconds"], ours["reached_steps"]) == (pytest.approx([10, 10]), [2_000, 2_000])
    assert (theirs["best_scores"], theirs["reached_seconds"]) == ([200], [None])
    assert out.read_bytes().startswith(b"\x89PNG")


def test_function_draws_one_run_or_several(tmp_path, capsys):
    runs = [make_run(tmp_path, SCORES, seed=seed).path for seed in (1, 2)]
    one = apex.plot(runs[0], tmp_path / "one.png", title="T", threshold=475)
    both = apex.plot(runs, str(tmp_path / "both.svg"))
    assert (one, both) == (tmp_path / "one.png", tmp_path / "both.svg")
    assert one.read_bytes().startswith(b"\x89PNG")
    plot(capsys, *runs, "--out", tmp_path / "same.svg")
    assert (tmp_path / "same.svg").read_text() == both.read_text()
    with pytest.raises(apex.UsageError, match=r"x\.pdf"):
        apex.plot(runs, "x.pdf")


def test_csv_files_need_no_run(tmp_path, capsys):
    one, two = write(tmp_path / "1.csv"), write(tmp_path / "2=b.csv", CSV.replace("200", "300"))
    arguments = ["--curve", f"DQN={one}", "--curve", f"DQN={two}", "--title", "T", "--threshold", 250]
    status, lines, _ = plot(capsys, *arguments, "--out", tmp_path / "x.svg")
    assert (status, lines[0]) == (0, "DQN: 2 seeds, last score 250 (200 ... 300), 250 reached by 1 of 2")
    assert (tmp_path / "x.svg").exists()


def test_training_scores_are_marked_as_such(tmp_path, capsys, monkeypatch):
    run = make_run(tmp_path, SCORES, role="actor", tag=ACTOR)
    monkeypatch.chdir(tmp_path)
    _, lines, _ = plot(capsys, run.path, "--json")
    assert (tmp_path / "curves.png").exists()
    (group,) = json.loads(lines[-1])["groups"]
    assert "actor 7" in group["note"]
    assert group["note"] in lines[0]


def test_without_a_run_the_newest_is_drawn(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_run("runs", SCORES, name="RUN")
    status, lines, error = plot(capsys, "--out", "x.png")
    assert (status, lines[-1]) == (0, "picture: x.png")
    assert "runs/RUN" in error


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["RUN", "--out", "x.gif"], ["--out", "x.gif"]),
        (["RUN", "--out", "none/x.png"], ["--out none/x.png"]),
        (["RUN", "--out", "DIR.png"], ["--out", "DIR.png"]),
        (["none", "--out", "x.png"], ["none"]),
        (["EMPTY", "--out", "x.png"], ["EMPTY", "no scores"]),
        (["RUN", "RUN", "--out", "x.png"], ["RUN", "2 times"]),
        (["--curve", "good.csv", "--out", "x.png"], ["NAME=FILE.csv", "'good.csv'"]),
        (["--curve", "=good.csv", "--out", "x.png"], ["NAME=FILE.csv", "'=good.csv'"]),
        (["--curve", "A=bad.csv", "--out", "x.png"], ["bad.csv, line 3", "'x'"]),
        (["--curve", "A=good.csv", "--curve", "A=good.csv", "--out", "x.png"], ["--curve A", "twice"]),
        (["RUN", "--curve", "apex=good.csv", "--out", "x.png"], ["--curve apex", "already"]),
        (["RUN", "--out", "x.png", "--threshold", "high"], ["--threshold", "'high'"]),
        (["RUN", "--out", "x.png", "--band"], ["--band"]),
    ],
)
def test_refused_arguments_are_named_in_one_line(tmp_path, monkeypatch, capsys, arguments, names):
    monkeypatch.chdir(tmp_path)
    make_run("runs", SCORES, name="RUN")
    make_run("runs", name="EMPTY")
    write(tmp_path / "good.csv")
    write(tmp_path / "bad.csv", "seconds,steps,score\n1,2,3\n4,x,6\n")
    (tmp_path / "DIR.png").mkdir()
    status, lines, error = plot(capsys, *arguments)
    assert (status, lines) == (2, [])
    assert all(name in error for name in names)
    assert error.count("\n") == 1
    assert not (tmp_path / "x.png").exists()


def test_picture_that_cannot_be_written_is_refused(tmp_path, capsys):
    out = tmp_path / "x.svg"
    out.symlink_to("/dev/full")
    status, _, error = plot(capsys, make_run(tmp_path, SCORES).path, "--out", out)
    assert status == 2
    assert f"--out: cannot write {out}" in error
