"""The run monitor: requests statuses, and shows them with the warnings of all programs."""

from pathlib import Path

import msgspec
import pytest
from support.messages import make_run_status

from apex.facts import INTERRUPTED, EndReason, LogEntry, ProgramEvent
from apex.launch import monitor
from apex.launch.monitor import RunMonitor, StatusClient
from apex.launch.terminal.dashboard import History
from apex.runtime.logs import LogTail
from apex.sentences import describe, describe_disk, describe_entry
from apex.transport.messages.control import RefusedAnswer, StatusRequest
from apexreplay.facts import Waiting
from apexreplay.process.limits import Space, read_space

STOPPING = [ProgramEvent(role, "stopping") for role in ("actor", "replay")]


class Tape:
    """A view that records, a clock, and a source of statuses."""

    def __init__(self, statuses=()):
        self.statuses = list(statuses)
        self.events = []
        self.now = 0.0

    def clock(self):
        return self.now

    def source(self):
        return self.statuses.pop(0) if self.statuses else None

    def show(self, status, history):
        self.events.append(("show", status and status.phase, history.silent_seconds))

    def note(self, sentence):
        self.events.append(("note", sentence))


def make_watch(tape, folder=Path("nowhere")):
    return RunMonitor(tape.source, tape, LogTail(folder).entries, History(), tape.clock)


def test_a_status_is_shown_at_once_and_silence_once_a_second():
    tape = Tape([None, None, make_run_status(phase="training")])
    watch = make_watch(tape)
    for tape.now in (0.0, 0.5, 0.6, 0.7, 1.5, 1.6, 2.6):
        watch.tick()
    assert tape.events == [
        ("show", None, 0.0),
        ("show", "training", 0.0),
        ("show", "training", pytest.approx(1.0)),
        ("show", "training", pytest.approx(2.0)),
    ]


def test_a_run_that_failed_is_not_shown_as_interrupted():
    watch = make_watch(Tape([make_run_status(phase="finished", end=INTERRUPTED)]))
    watch.tick(failed=True)
    assert watch.status.end == EndReason("failed")
    assert not watch.status.end.is_limit  # It can be resumed.


def test_a_supervisor_message_is_shown_at_once():
    tape = Tape()
    make_watch(tape).show_event(STOPPING[0])
    assert tape.events == [("note", describe(STOPPING[0])), ("show", None, 0.0)]


def write_entry(folder, message, waiting=None, role="replay", name="replay"):
    entry = LogEntry(time=0.0, role=role, level="WARNING", message=message, waiting=waiting)
    with (folder / f"{name}.jsonl").open("ab") as file:
        file.write(msgspec.json.encode(entry) + b"\n")
    return describe_entry(entry)


def test_warnings_of_programs_are_shown(tmp_path):
    tape = Tape()
    watch = make_watch(tape, tmp_path)
    text = write_entry(tmp_path, "slow")
    write_entry(tmp_path, "slow", name="units", role="actor 3")
    watch.tick()
    assert tape.events[0] == ("note", text)
    assert "units actor 3 WARNING slow" in tape.events[1][1]


def test_a_repeated_message_is_shown_once():
    history = History()
    watch = RunMonitor(Tape().source, Tape(), LogTail(Path("nowhere")).entries, history)
    for event in (*STOPPING, STOPPING[0]):
        watch.show_event(event)
    assert [note.text for note in history.notes] == [describe(event) for event in STOPPING[::-1]]


def test_a_wait_is_one_note_until_its_next_entry_is_late(tmp_path):
    history, tape = History(), Tape()
    watch = RunMonitor(tape.source, tape, LogTail(tmp_path).entries, history, tape.clock)
    for tape.now in (10.0, 20.0):
        waits = write_entry(tmp_path, f"for {tape.now}", Waiting("samples", who="replay", seconds=tape.now))
        watch.tick()
    full = write_entry(tmp_path, "full")
    for tape.now, expected in ((21.0, [waits, full]), (44.0, [waits, full]), (46.0, [full])):
        watch.tick()
        assert [note.text for note in history.notes] == expected


def disk_reports(monkeypatch, *spaces):
    """What the monitor reports if it finds these spaces, one a second."""
    tape, left = Tape(), list(spaces)
    monkeypatch.setattr(monitor, "read_space", lambda path: left.pop(0))
    watch = RunMonitor(tape.source, tape, list, History(), tape.clock, folder=Path("runs/x"))
    while left:
        watch.tick()
        watch.tick()  # Not twice in one second.
        tape.now += 1.0
    return [event[1] for event in tape.events if event[0] == "note"]


ROOM = Space(10**9, 10**8)


def test_a_full_disk_and_new_room_are_reported_once_each(monkeypatch):
    full = describe_disk("runs/x", "is on a full disk")
    found = disk_reports(monkeypatch, ROOM, Space(10**9, 0), Space(10**9, 4096), Space(10**9, 0), ROOM, ROOM)
    assert found == [full, describe_disk("runs/x", "")]


def test_a_folder_that_is_gone_or_read_only_is_reported(tmp_path, monkeypatch):
    gone, read_only = read_space(tmp_path / "gone"), Space(10**9, 10**8, "is not writable")
    found = disk_reports(monkeypatch, ROOM, gone, read_only)
    assert found == [describe_disk("runs/x", space.flaw) for space in (gone, read_only)]


class Client:
    """A control client: what was sent, and what it will receive."""

    def __init__(self):
        self.sent = 0
        self.inbox = []

    def send(self, message):
        assert message == StatusRequest()
        self.sent += 1

    def receive(self, timeout):
        assert timeout == 0.0
        return self.inbox.pop(0) if self.inbox else None


def test_the_status_is_requested_once_a_second():
    client, tape = Client(), Tape()
    ask = StatusClient(client, tape.clock)
    sent = []
    for tape.now in (0.0, 0.2, 0.4, 1.0, 1.2):
        answer = make_run_status(elapsed_seconds=tape.now) if tape.now in (0.2, 1.2) else None
        client.inbox = [answer] if answer else []
        assert ask() == answer
        sent.append(client.sent)
    assert sent == [1, 1, 1, 2, 2]


def test_an_unanswered_request_is_repeated_after_three_seconds():
    client, tape = Client(), Tape()
    ask = StatusClient(client, tape.clock)
    sent = []
    for tape.now in (0.0, 1.0, 2.9, 3.0, 3.1):
        ask()
        sent.append(client.sent)
    assert sent == [1, 1, 1, 2, 2]


def test_the_newest_of_several_answers_counts():
    client = Client()
    client.inbox = [make_run_status(steps=1), make_run_status(steps=2), RefusedAnswer("no")]
    assert StatusClient(client)() == make_run_status(steps=2)
