"""Callbacks: which calls they get, and that neither an exception nor a hang delays the run."""

import logging
import threading
import time

import pytest
from support.messages import make_run_status
from support.waiting import until

from apex import Callback, UsageError
from apex.config import Config
from apex.facts import INTERRUPTED, Ending, EndReason, Failure
from apex.launch import callbacks
from apex.launch.callbacks import Callbacks
from apexreplay.errors import FAILED, FINISHED

DONE = Ending(FINISHED, "learner")
LIMIT = EndReason("steps", 9.0)


class Tape(Callback):
    """Records its calls. `gate`: every call waits for it; `fault`: what every call raises."""

    def __init__(self, fault=None):
        self.calls = []
        self.fault = fault
        self.began, self.gate = threading.Event(), threading.Event()
        self.gate.set()

    def take(self, *call):
        self.calls.append(call)
        self.began.set()
        assert self.gate.wait(60)
        if self.fault is not None:
            raise self.fault

    def on_start(self, run):
        self.take("start", run.folder.name)

    def on_status(self, run, status):
        self.take("status", status.updates)

    def on_evaluation(self, run, evaluation):
        self.take("evaluation", evaluation.updates)

    def on_checkpoint(self, run, path):
        self.take("checkpoint", path.name)

    def on_end(self, run, end):
        self.take("end", end)


@pytest.fixture
def begin(tmp_path):
    """Begins a run with these callbacks; their threads end with the test."""
    begun = []

    def make(*tapes):
        begun.append((Callbacks(tapes), tapes))
        begun[-1][0].begin(Config(), tmp_path)
        return begun[-1][0]

    yield make
    for calls, tapes in begun:
        for tape in tapes:
            tape.gate.set()
        calls.close()


def report(calls, updates, *, evaluations=(), **changes):
    """Reports a status with evaluations of these numbers, each of update 10 * number."""
    figures = {"steps": 9, "score": 18.2, "best": 18.2, "episodes": 5}
    rows = [{"number": number, "updates": 10 * number, **figures} for number in evaluations]
    return calls.report(make_run_status(updates=updates, evaluations=rows, **changes))


def save(folder, updates):
    (folder / f"checkpoints/{updates:09d}").mkdir(parents=True)
    (folder / f"checkpoints/{updates:09d}/manifest.json").touch()


def hang(tape):
    """Returns when a call of the tape waits for its gate."""
    tape.gate.clear()
    tape.began.clear()


def test_callbacks_get_each_event_once_in_order(begin, tmp_path):
    tape = Tape()
    save(tmp_path, 5)  # by an earlier start of the run
    calls = begin(tape)
    report(calls, 1)
    wait_for(tape, "status", 1)
    save(tmp_path, 7)
    for updates, evaluations in ((8, [1, 2]), (9, [1, 2]), (6, [1])):  # At last, the learner has started again.
        report(calls, updates, evaluations=evaluations)
        wait_for(tape, "status", updates)
    save(tmp_path, 10)  # after the last status
    calls.end(DONE, LIMIT)
    assert tape.calls == [
        ("start", tmp_path.name),
        ("status", 1),
        ("evaluation", 10),
        ("evaluation", 20),
        ("checkpoint", "000000007"),
        ("status", 8),
        ("status", 9),
        ("evaluation", 10),
        ("status", 6),
        ("checkpoint", "000000010"),
        ("end", LIMIT),
    ]


def wait_for(tape, *call):
    until(lambda: call in tape.calls, f"{call} in {tape.calls}")


def test_a_busy_callback_misses_old_statuses_but_no_evaluation(begin):
    tape, other = Tape(), Tape()
    hang(tape)
    calls = begin(tape, other)
    assert tape.began.wait(60)  # in on_start
    for updates in range(10):
        report(calls, updates, evaluations=[updates + 1])
        wait_for(other, "status", updates)  # Callbacks do not wait for each other.
    tape.gate.set()
    calls.end(DONE, LIMIT)
    kinds = [kind for kind, _ in tape.calls]
    assert (kinds.count("status"), kinds.count("evaluation"), kinds[-1]) == (1, 10, "end")
    assert ("status", 9) in tape.calls


def test_the_calls_that_wait_are_bounded_and_the_end_is_kept(begin, monkeypatch):
    monkeypatch.setattr(callbacks, "MAX_WAITING", 3)
    tape = Tape()
    hang(tape)
    calls = begin(tape)
    assert tape.began.wait(60)
    for updates in range(10):
        report(calls, updates, evaluations=[updates + 1])
    calls.close()  # Before the callback goes on, so that it cannot take a call that is dropped here.
    tape.gate.set()
    wait_for(tape, "end", EndReason("failed"))
    assert tape.calls[1:] == [("evaluation", 100), ("status", 9), ("end", EndReason("failed"))]


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("fault", [ValueError("no luck"), SystemExit(1)])
def test_a_callback_that_raises_costs_one_line_and_is_called_again(begin, caplog, fault):
    tape, other = Tape(fault), Tape()
    calls = begin(tape, other)
    report(calls, 1, evaluations=[1])
    calls.end(DONE, LIMIT)
    assert [call[0] for call in tape.calls] == ["start", "evaluation", "status", "end"] == [c[0] for c in other.calls]
    (line,) = warnings(caplog)
    assert all(part in line for part in ("Tape", "on_start", type(fault).__name__, "test_callbacks.py, line "))


def test_a_callback_that_hangs_costs_one_line_and_no_time(begin, caplog):
    tape = Tape()
    tape.slow_seconds, tape.end_seconds = 0.0, 0.1
    hang(tape)
    calls = begin(tape)
    assert tape.began.wait(60)
    began = time.monotonic()
    for updates in range(3):
        report(calls, updates)
    calls.end(DONE, LIMIT)
    assert 0.1 <= time.monotonic() - began < 5.0
    (line,) = warnings(caplog)
    assert "Tape: on_start" in line


def test_a_callback_that_was_slow_is_named_if_it_raises_later(begin, caplog):
    tape = Tape()
    tape.slow_seconds = 0.0
    hang(tape)
    calls = begin(tape)
    assert tape.began.wait(60)
    report(calls, 1)
    tape.fault = KeyError("policy")
    tape.gate.set()
    calls.end(DONE, LIMIT)
    assert ["takes longer" in line for line in warnings(caplog)] == [True, False]


def test_a_hang_at_the_end_is_logged_after_its_seconds(begin, caplog):
    tape = Tape()
    tape.end_seconds = 0.1
    calls = begin(tape)
    wait_for(tape, "start", calls._run.folder.name)
    until(lambda: not calls._threads[0]._now, "end of the call")
    hang(tape)
    (problem,) = calls.end(DONE, LIMIT)
    (line,) = warnings(caplog)
    assert problem == line
    assert "Tape: on_end" in line


def test_a_wait_at_the_end_is_announced_and_can_be_left(begin, monkeypatch):
    monkeypatch.setattr(callbacks, "SHORT_SECONDS", 0.0)
    tape, told = Tape(), []
    tape.end_seconds = 1_000.0
    calls = begin(tape)
    tape.gate.clear()
    (problem,) = calls.end(DONE, LIMIT, told.append, lambda: bool(told))
    assert "1000 s" not in problem
    (sentence,) = told
    assert "Tape" in sentence


def test_the_end_that_a_callback_asks_for_replaces_an_interruption_only():
    class Stopper(Tape):
        def on_status(self, run, status):
            run.stop("enough\n" + "x" * 500)
            run.stop("twice")

    tape = Stopper()
    calls = Callbacks([tape])
    assert report(calls, 1).end is None  # not begun
    calls.begin(Config(), callbacks.Path("nowhere"))
    assert calls.asked is None
    report(calls, 1)
    until(lambda: calls.asked is not None)
    assert report(calls, 2).end is None  # The run still goes on.
    assert report(calls, 3, end=INTERRUPTED).end == calls.asked
    calls.end(DONE, INTERRUPTED)
    assert calls.asked.kind == "callback"
    assert calls.asked.detail.startswith("enough?x")
    assert len(calls.asked.detail) == 200
    assert not calls.asked.is_limit  # It can be resumed.
    assert calls.true_end(LIMIT) == LIMIT
    assert tape.calls[-1] == ("end", calls.asked)


def test_a_failed_run_ends_with_that_reason_and_so_does_a_killed_one(begin):
    tape, killed = Tape(), Tape()
    begin(tape).end(Ending(FAILED, "learner", Failure(role="learner", kind="exit", value=1)), LIMIT)
    assert tape.calls[-1] == ("end", EndReason("failed"))
    begin(killed).close()
    wait_for(killed, "end", EndReason("failed"))


@pytest.mark.parametrize("wrong", [Tape, print, "wandb"])
def test_what_is_no_callback_is_refused(wrong):
    with pytest.raises(UsageError, match=r"apex\.Callback"):
        Callbacks([wrong])


@pytest.mark.parametrize("seconds", [None, "5", -1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["slow_seconds", "end_seconds"])
def test_a_limit_that_is_no_time_is_refused_before_the_run(name, seconds):
    wrong = Callback()
    setattr(wrong, name, seconds)
    with pytest.raises(UsageError, match=name):
        Callbacks([wrong])


def test_a_callback_without_methods_is_called_without_effect(begin, caplog):
    calls = begin(quiet := Callback())
    quiet.gate = threading.Event()
    report(calls, 1)
    calls.end(DONE, LIMIT)
    assert warnings(caplog) == []
