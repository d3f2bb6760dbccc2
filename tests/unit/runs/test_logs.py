"""`apex logs`: the logs of a run's programs are merged by time, and followed until the run ends."""

import os
import pty
import signal
import subprocess
import sys

import pytest
from support.run_builders import make_run
from support.waiting import until

from apex.runs.lock import hold
from apex.runs.logs import MAX_LINES, LogReader, main

ACTOR = """\
2026-01-31T23:59:59.100+01:00 actor ERROR failed
Traceback (most recent call last):
  File "maze.py", line 3, in step
ValueError: no exit
2026-02-01T00:00:01.000+01:00 actor INFO ends
"""
LEARNER = """\
2026-01-31T22:59:59.050+00:00 learner INFO begins
2026-01-31T22:59:59.200+00:00 learner WARNING late
2026-01-31T23:00:00.500+00:00 learner INFO unfinished"""


@pytest.fixture
def run(tmp_path):
    run = make_run(tmp_path, name="one")
    (run.logs / "actor.log").write_text(ACTOR)
    (run.logs / "learner.log").write_text(LEARNER)
    return run


def start(run, *options, output=subprocess.PIPE):
    """Starts `apex logs` as a program."""
    command = [sys.executable, "-m", "apex", "logs", str(run.path), *options]
    return subprocess.Popen(command, stdout=output, stderr=subprocess.PIPE, text=True)


def test_entries_of_all_logs_are_merged_by_time(run, capfd):
    assert main([str(run.path)]) == 0
    begins, late, unfinished = (f"learner     | {line}" for line in LEARNER.splitlines())
    failed, *traceback, ends = (f"actor       | {line}" for line in ACTOR.splitlines())
    assert capfd.readouterr().out.splitlines() == [begins, failed, *traceback, late, unfinished, ends]


@pytest.mark.parametrize(
    ("role", "words"),
    [("replay", ["old", "new", "other"]), ("replay-1", ["other"]), ("replay-0", ["old", "new"]), ("evaluator", [])],
)
def test_a_role_selects_its_programs_and_their_rotated_logs(run, capfd, role, words):
    for name, second, word in [("replay-0.log", 2, "new"), ("replay-0.log.1", 1, "old"), ("replay-1.log", 3, "other")]:
        (run.logs / name).write_text(f"2026-02-01T00:00:0{second}.000+00:00 replay INFO {word}\n")
    (run.logs / "replay-0.log.2.gz").write_bytes(b"\x1f\x8b")
    os.mkfifo(run.logs / "replay-2.log")
    assert main([str(run.path), "--role", role]) == 0
    assert [line.split()[-1] for line in capfd.readouterr().out.splitlines()] == words


def test_an_unknown_role_is_refused_with_the_known_ones(run, capfd):
    assert main([str(run.path), "--role", "actr"]) == 2
    assert "actor, evaluator, learner, replay, got 'actr'; did you mean actor?" in capfd.readouterr().err


def test_control_characters_and_invalid_bytes_are_only_text(run, capfd):
    (run.logs / "actor.log").write_bytes(b"\x1b[2Jgone\x9b\tback\rfront\xff\xc2\x9b\n")
    assert main([str(run.path), "--role", "actor"]) == 0
    assert capfd.readouterr().out == "actor       |  [2Jgone\ufffd       back front\ufffd \n"
    (run.logs / "\x1b]0;evil\x07[red].log").write_text("line\n")
    assert main([str(run.path), "--role", "actr"]) == 2
    assert main([str(run.path)]) == 0
    shown = capfd.readouterr()
    assert not {"\x1b", "\x07"} & set(shown.out + shown.err)
    assert "evil [red]" in shown.out


def test_a_terminal_gets_colors(run, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    control, terminal = pty.openpty()
    process = start(run, output=terminal)
    os.close(terminal)
    assert (process.communicate(timeout=60)[1], process.returncode) == ("", 0)
    shown = os.read(control, 65_536).decode()
    os.close(control)
    assert "\x1b[36mlearner     |\x1b[0m 2026-01-31T22:59:59.050+00:00" in shown


def test_the_last_entry_is_kept_back_while_its_log_grows(tmp_path):
    log, reader = tmp_path / "actor.log", LogReader(tmp_path / "actor.log")

    def read(more, *, whole=False):
        with log.open("a") as file:
            file.write(more)
        return [lines for _, _, lines in reader.read(whole=whole)]

    assert read("2026-02-01T00:00:00.000+00:00 actor ERROR failed\nTrace") == []
    assert read("back\n") == []
    assert read("") == [["2026-02-01T00:00:00.000+00:00 actor ERROR failed", "Traceback"]]
    assert read("one\n" * (MAX_LINES + 1)) == [["one"] * MAX_LINES]
    assert read("half", whole=True) == [["one", "half"]]
    log.write_text("new\n")  # truncated, as by a rotation
    assert read("", whole=True) == [["new"]]


@pytest.mark.programs
def test_following_ends_with_the_run(run):
    with hold(run.path):
        process = start(run, "--follow")
        assert process.stdout.readline() == f"learner     | {LEARNER.splitlines()[0]}\n"
        with (run.logs / "learner.log").open("a") as log:
            log.write(" no more\n2026-02-01T00:00:05.000+00:00 learner INFO last")
        (run.logs / "evaluator.log").write_text("2026-02-01T00:00:04.000+00:00 evaluator INFO new\n")
        assert any(" unfinished no more" in line for line in process.stdout)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert "learner INFO last\n" in output


@pytest.mark.programs
def test_following_ends_with_ctrl_c(run):
    with hold(run.path):
        process = start(run, "--follow")
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert (process.communicate(timeout=60)[1], process.returncode) == ("", 130)


@pytest.mark.programs
@pytest.mark.parametrize("options", [[], ["--follow"]])
def test_a_reader_that_leaves_ends_the_command(run, options):
    with (run.logs / "actor.log").open("a") as log:
        log.write("more\n" * 100_000)
    with hold(run.path):
        process = start(run, *options)
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(60) == 0
    assert process.stderr.read() == ""
    process.stderr.close()


@pytest.mark.programs
def test_a_reader_that_leaves_is_noticed_without_a_new_line(run):
    with hold(run.path):
        process = start(run, "--follow", "--role", "actor")
        for _ in range(4):
            process.stdout.readline()
        process.stdout.close()
        until(lambda: process.poll() is not None)
    assert (process.returncode, process.stderr.read()) == (0, "")
    process.stderr.close()
