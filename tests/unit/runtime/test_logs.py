"""Logs: lines for people, entries for the live view."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from apex.facts import INTERRUPTED
from apex.runtime.logs import ENTRIES, EntryHandler, LogTail, RoleFormatter, log_to
from apex.sentences import describe, describe_end
from apexreplay.facts import Waiting
from apexreplay.process.spawn import spawn

WAIT = Waiting("receipts", who="actor 3", seconds=10.0)
PROGRAM = """
import logging, multiprocessing, os
from apex.runtime.logs import configure_logging
configure_logging("actor")
log = logging.getLogger("apex")
log.info("ready")
log.warning("%d late", 3)
child = multiprocessing.get_context("fork").Process(target=log.error, args=("gone",))
child.start()
child.join()
raise SystemExit("APEX_LOG_ENTRIES" in os.environ)
"""


def test_a_logged_record_becomes_its_sentence():
    record = logging.LogRecord("apex", logging.WARNING, "", 0, INTERRUPTED, None, None)
    assert RoleFormatter("learner").format(record).endswith(f" learner WARNING {describe_end(INTERRUPTED)}")
    assert record.msg == INTERRUPTED


def test_warnings_of_a_program_and_its_children_are_entries(tmp_path):
    tail = LogTail(tmp_path)
    with (tmp_path / "actor.log").open("wb") as output:
        program = spawn(
            [sys.executable, "-c", PROGRAM], output=output, environment={ENTRIES: str(tmp_path / "actor.jsonl")}
        )
    assert program.wait(60) == 0
    entries = [(name, entry.role, entry.level, entry.message) for name, entry in tail.entries()]
    assert entries == [("actor", "actor", "WARNING", "3 late"), ("actor", "actor", "ERROR", "gone")]
    assert [line.split(" ", 1)[1] for _, line in tail.lines()] == [
        "actor INFO ready",
        "actor WARNING 3 late",
        "actor ERROR gone",
    ]


@pytest.mark.parametrize("package", ["apex", "apexreplay"])
def test_a_wait_is_in_its_entry(tmp_path, package):
    tail, log = LogTail(tmp_path), logging.getLogger(package)
    with log_to(tmp_path / "launcher.log"):
        log.warning(WAIT)
    ((name, entry),) = tail.entries()
    assert (name, entry.waiting, entry.message) == ("launcher", WAIT, describe(WAIT))


def test_a_log_call_with_wrong_arguments_is_no_error_of_its_caller(tmp_path, monkeypatch):
    monkeypatch.setattr(logging, "raiseExceptions", False)  # as in every program
    handler = EntryHandler(tmp_path / "actor.jsonl", "actor")
    handler.handle(logging.LogRecord("user", logging.WARNING, "", 0, "bad state", ("x",), None))
    assert not (tmp_path / "actor.jsonl").exists()


def test_a_full_disk_loses_entries_and_nothing_else():
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    EntryHandler(Path("/dev/full"), "actor").emit(logging.LogRecord("apex", logging.ERROR, "", 0, "late", None, None))


def test_new_complete_lines_of_all_logs_are_read_once(tmp_path):
    old = tmp_path / "replay.log"
    old.write_text("earlier\nhalf a li")
    tail = LogTail(tmp_path)
    assert tail.lines() == []
    with old.open("a") as file:
        file.write("ne\nunfinished")
    (tmp_path / "actor.log").write_text("one\ntwo\n")
    assert tail.lines() == [("actor", "one"), ("actor", "two"), ("replay", "ne")]
    assert tail.lines() == []


def test_damaged_entries_are_skipped(tmp_path):
    tail = LogTail(tmp_path)
    (tmp_path / "actor.jsonl").write_text('{"time": 1.0, "ro\n{"a": 1}\n\xff\n', encoding="latin-1")
    assert tail.entries() == []


def test_the_program_logs_the_stack_of_each_thread_when_it_aborts():
    script = "from apex.runtime.logs import configure_logging; import os; configure_logging('actor'); os.abort()"
    ended = subprocess.run([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True, timeout=60)
    assert "most recent call first" in ended.stderr
