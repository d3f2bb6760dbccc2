"""A unit runs a guard, which `sh` replaces here. None of it needs Ray."""

import os
import sys
import threading
import types

import pytest
from support.waiting import until

from apex.facts import Ending, Failure, LogEntry
from apex.launch.ray import unit
from apex.launch.ray.order import Report

pytestmark = pytest.mark.programs


@pytest.fixture
def guarded_by(tmp_path, monkeypatch):
    """Replaces the guard by a shell script."""
    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(__file__=str(tmp_path / "ray" / "__init__.py")))

    def play(script):
        program = tmp_path / "python"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setattr(unit.sys, "executable", str(program))

    return play


@pytest.mark.timeout(20)
def test_a_unit_returns_the_entries_and_the_ending_of_its_guard(guarded_by, tmp_path, capsys):
    lines = [Report("learner", f"line {number}") for number in range(1_000)]
    entry = LogEntry(time=0.0, role="learner", level="WARNING", message="slow")
    kept = [Report("learner", entry=entry), Report(config_toml="seed = 1")]
    last = Report(ending=Ending(7, "learner", Failure(role="learner", kind="exit", value=7)))
    (tmp_path / "reports").write_text("".join(report.encode() for report in [*lines, *kept, last]))
    guarded_by(f"cat {tmp_path}/reports; head -c 200000 /dev/zero >&2; exit 7")
    status, report, unread = unit.Unit().run("order\n", str(tmp_path))
    assert (status, Report.decode(report)) == (7, last)
    assert [Report.decode(line) for line in unread] == kept
    assert capsys.readouterr().out.splitlines()[-1] == "learner: line 999"  # for Ray's own logs


def run_with(guarded_by, folder, command):
    """The output of a command that runs in place of the guard."""
    guarded_by(f'printf \'{{"log": "guard", "config_toml": "%s"}}\\n\' $({command})')
    _, _, reports = unit.Unit().run("order\n", str(folder))
    return Report.decode(reports[0]).config_toml


def test_a_guard_has_a_session_of_its_own(guarded_by, tmp_path):
    assert int(run_with(guarded_by, tmp_path, "ps -o sid= -p $$")) != os.getsid(0)


def test_a_folder_that_is_missing_or_not_accessible_is_left_out(guarded_by, tmp_path, monkeypatch):
    assert run_with(guarded_by, tmp_path, "pwd") == str(tmp_path)
    assert run_with(guarded_by, tmp_path / "none", "pwd") == os.getcwd()
    monkeypatch.setattr(unit.os, "access", lambda path, mode: False)
    assert run_with(guarded_by, tmp_path, "pwd") == os.getcwd()


@pytest.mark.timeout(20)
def test_a_new_order_ends_the_guard_of_an_order_that_was_lost(guarded_by, tmp_path):
    guarded_by(f"echo started >> {tmp_path}/started; cat > /dev/null")
    one = unit.Unit()
    first, second = (threading.Thread(target=one.run, args=["order\n", str(tmp_path)]) for _ in range(2))
    first.start()
    until((tmp_path / "started").exists)
    second.start()
    first.join()
    until(lambda: (tmp_path / "started").read_text().count("started") == 2)
    assert second.is_alive()
    one.stop()
    second.join()
