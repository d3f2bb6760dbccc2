"""What a unit makes of its guard, which `sh` plays. None of it needs Ray."""

from __future__ import annotations

import os
import sys
import types

import pytest

from apex.launch.ray import unit

pytestmark = pytest.mark.programs


@pytest.fixture
def guarded_by(tmp_path, monkeypatch):
    """Makes a shell script play the guard."""
    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(__file__=str(tmp_path / "ray" / "__init__.py")))

    def play(script):
        program = tmp_path / "python"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setattr(unit.sys, "executable", str(program))

    return play


@pytest.mark.timeout(20)
def test_a_guard_may_say_more_than_a_pipe_holds(guarded_by, tmp_path):
    guarded_by("head -c 200000 /dev/zero | tr '\\0' x >&2; echo >&2; echo the cause >&2; exit 3")
    assert unit.Unit().run("order\n", str(tmp_path)) == (3, "the cause")


def test_a_guard_outlives_the_process_group_of_its_unit(guarded_by, tmp_path):
    guarded_by("ps -o sid= -p $$ >&2")
    _, session = unit.Unit().run("order\n", str(tmp_path))
    assert int(session) != os.getsid(0)


def test_a_folder_that_this_host_lacks_or_may_not_enter_is_left_out(guarded_by, tmp_path, monkeypatch):
    guarded_by("pwd >&2")
    assert unit.Unit().run("order\n", str(tmp_path)) == (0, str(tmp_path))
    here = (0, os.getcwd())
    assert unit.Unit().run("order\n", str(tmp_path / "none")) == here
    monkeypatch.setattr(unit.os, "access", lambda path, mode: False)
    assert unit.Unit().run("order\n", str(tmp_path)) == here
