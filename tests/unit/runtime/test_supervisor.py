"""The supervisor restarts failed programs within a budget, stops all in order, and leaves no process behind.

The programs are `python -c` and `sh -c`. Every wait ends on a condition or fails at its deadline.
"""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from support.processes import is_running
from support.waiting import DEADLINE, until

from apex.facts import Ending, Failure, ProgramEvent
from apex.runtime import supervisor
from apex.runtime.supervisor import FORGET_SECONDS, CrashBudget, Program, supervise
from apexreplay.errors import FAILED, FINISHED, HOPELESS, NEIGHBOUR_GONE, REFUSED
from apexreplay.process import lifecycle
from apexreplay.process.lifecycle import Stop

pytestmark = pytest.mark.programs

FOREVER = "exec sleep 600"


class StopWhen:
    """A Stop that is requested once a condition holds; past the deadline the test fails."""

    def __init__(self, condition):
        self._condition = condition
        self._deadline = time.monotonic() + DEADLINE

    def poll(self):
        if time.monotonic() > self._deadline:
            pytest.fail("the condition never held")
        return self._condition()


def shell(role, script, **options):
    """A program that notes its process ids in ROLE.log, one line `pid N` for each start, and runs the script."""
    return Program(role=role, command=("sh", "-c", f"echo pid $$; {script}"), **options)


def pids(folder, role):
    """The process id of each start of a role so far."""
    path = folder / f"{role}.log"
    lines = path.read_text().splitlines() if path.exists() else []
    return [int(line.split()[1]) for line in lines if line.startswith("pid ") and len(line.split()) == 2]


@pytest.fixture
def folder(tmp_path):
    """A folder of logs; fails if a process that is named there has outlived the test."""
    yield tmp_path
    named = [pid for path in tmp_path.glob("*.log") for pid in pids(tmp_path, path.stem)]
    left = [pid for pid in named if is_running(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, "a process was left behind"


def run(programs, condition=lambda: False, *, folder, **options):
    """Supervises the programs until the condition holds or the run ends; returns the ending and the events."""
    events = []
    ending = supervise(programs, StopWhen(condition), logs=folder, notify=events.append, **options)
    return ending, events


def has_logged(folder, *roles, line="ready"):
    """Whether each role has written the line to its log."""
    logs = [folder / f"{role}.log" for role in roles]
    return all(log.exists() and line in log.read_text() for log in logs)


# --- the budget -------------------------------------------------------------------------------------------------------


def test_a_program_that_cannot_be_started_fails_with_the_reason(folder):
    program = Program(role="learner", command=("/no/such/program",), crash_budget=1.0)
    notified = []
    ending = supervise([program], StopWhen(lambda: False), logs=folder, notify=notified.append)
    assert (ending.status, ending.failure.times) == (FAILED, 2)
    assert "/no/such/program" in ending.failure.detail
    assert [event.kind for event in notified] == ["restarting"]


def test_a_budget_allows_restarts_with_growing_pauses_and_forgets_crashes():
    budget = CrashBudget(3.0)
    assert [budget.charge(1.0, 0.0) for _ in range(4)] == [0.5, 1.0, 2.0, None]
    budget = CrashBudget(1.0)
    assert budget.charge(1.0, 0.0) == 0.5
    assert budget.charge(1.0, FORGET_SECONDS) == 0.5  # as if it were the first
    assert budget.charge(1.0, FORGET_SECONDS + 1.0) is None
    budget = CrashBudget(100.0)
    assert max(budget.charge(1.0, 0.0) for _ in range(50)) == 10.0


# --- endings ----------------------------------------------------------------------------------------------------------


def test_a_run_finishes_with_the_program_that_ends_it(folder):
    programs = [shell("replay", FOREVER), shell("learner", "exit 0", ends_run=True), shell("actor", FOREVER)]
    assert run(programs, folder=folder)[0] == Ending(FINISHED, "learner")


@pytest.mark.parametrize(
    ("script", "crash_budget", "status", "kind", "value", "times"),
    [
        ("echo last; exit 2", 3.0, REFUSED, "refused", 2, 1),
        ("echo last; exit 3", 3.0, HOPELESS, "exit", HOPELESS, 1),
        ("echo last; exit 7", 1.0, 7, "exit", 7, 2),
        ("echo last; kill -9 $$", 0.0, FAILED, "signal", signal.SIGKILL, 1),
        ("echo last; exit 75", 0.6, NEIGHBOUR_GONE, "exit", 75, 3),  # costs 0.25 each
    ],
)
def test_a_failure_names_its_kind_value_and_count(folder, script, crash_budget, status, kind, value, times):
    programs = [shell("replay", script, crash_budget=crash_budget), shell("actor", FOREVER)]
    ending, _ = run(programs, folder=folder)
    log = str(folder / "replay.log")
    failure = Failure(role="replay", kind=kind, value=value, times=times, detail="last", log=log)
    assert ending == Ending(status, "replay", failure)
    assert len(pids(folder, "replay")) == times


def test_a_lost_neighbour_is_not_blamed_if_another_program_failed(folder):
    crashed = shell("replay", "echo disk full; exit 7")
    waiting = shell("actor", "exit 75", crash_budget=0.0, ready=lambda: len(pids(folder, "replay")) == 2)
    ending, _ = run([crashed, waiting], folder=folder)
    assert (ending.role, ending.status, ending.failure.detail) == ("replay", 7, "disk full")


@pytest.mark.parametrize(
    ("life", "essential", "role"), [(600.0, True, "actor"), (600.0, False, "learner"), (0.0, True, "learner")]
)
def test_a_run_fails_if_a_program_keeps_failing_until_its_end(folder, life, essential, role, monkeypatch):
    monkeypatch.setattr("apex.runtime.supervisor.SHORT_LIFE_SECONDS", life)
    ends = shell("learner", "exit 0", ends_run=True, ready=lambda: len(pids(folder, "actor")) == 3)
    once = shell("replay", f"test -e {folder}/seen || {{ touch {folder}/seen; exit 1; }}; {FOREVER}")
    fails = shell("actor", f"test $(grep -c pid {folder}/actor.log) = 3 && {FOREVER}; exit 1", essential=essential)
    ending, _ = run([once, fails, ends], folder=folder)
    assert (ending.status, ending.role) == (FAILED if role == "actor" else FINISHED, role)
    assert (ending.failure is not None and ending.failure.times == 2) == (role == "actor")


def test_a_program_that_kept_failing_is_reported_by_its_failures(folder):
    """The last start finds that the run is over."""
    script = f"test $(grep -c pid {folder}/actor.log) = 3 && exit 0; exit 7"
    fails = shell("actor", script, ready=lambda: len(pids(folder, "actor")) < 3)
    ends = shell("learner", "exit 0", ends_run=True, ready=lambda: len(pids(folder, "actor")) == 3)
    failure = run([fails, ends], folder=folder)[0].failure
    assert (failure.role, failure.value, failure.times) == ("actor", 7, 2)


def test_failures_before_a_long_life_do_not_fail_the_run(folder, monkeypatch):
    monkeypatch.setattr("apex.runtime.supervisor.SHORT_LIFE_SECONDS", 0.5)
    script = f"test $(grep -c pid {folder}/actor.log) = 3 || exit 7; sleep 0.6; echo ready"
    fails = shell("actor", script, ready=lambda: len(pids(folder, "actor")) < 3)
    ends = shell("learner", "sleep 0.3", ends_run=True, ready=lambda: has_logged(folder, "actor"))
    ending, _ = run([fails, ends], folder=folder)
    assert (ending.status, ending.role) == (FINISHED, "learner")


# --- restarts ---------------------------------------------------------------------------------------------------------


def test_a_killed_program_restarts_and_the_others_continue(folder):
    def condition():
        starts = pids(folder, "replay")
        if len(starts) == 1 and pids(folder, "actor") and is_running(starts[0]):
            os.kill(starts[0], signal.SIGKILL)
        return len(starts) == 2

    ending, events = run([shell("replay", FOREVER), shell("actor", FOREVER)], condition, folder=folder)
    assert ending == Ending(FINISHED)
    assert len(pids(folder, "actor")) == 1
    assert (events[0].role, events[0].kind, events[0].seconds) == ("replay", "restarting", 0.5)
    assert (events[0].failure.kind, events[0].failure.value) == ("signal", signal.SIGKILL)


def test_a_program_that_ends_with_status_0_restarts_after_a_rest(folder):
    program = shell("actor", "exit 0", crash_budget=0.3)
    _, events = run([program], lambda: len(pids(folder, "actor")) == 2, folder=folder)
    assert [(event.kind, event.failure.value) for event in events if event.failure] == [("restarting", 0)]


def test_a_program_that_is_not_needed_any_more_does_not_restart(folder):
    needed = shell("actor", "exit 0", ready=lambda: not pids(folder, "actor"))
    learner = shell("learner", "exit 0", ends_run=True, ready=lambda: bool(pids(folder, "actor")))
    assert run([needed, learner], folder=folder)[1] == []


def test_the_children_of_a_killed_program_end_too(folder):
    program = shell("replay", "sh -c 'echo pid $$; exec sleep 600' & wait")

    def condition():
        starts = pids(folder, "replay")
        if len(starts) == 2 and is_running(starts[0]):
            os.kill(starts[0], signal.SIGKILL)
        return len(starts) == 4

    run([program], condition, folder=folder)
    both_starts = set(pids(folder, "replay"))
    assert len(both_starts) == 4
    until(lambda: not any(map(is_running, both_starts)))


def test_a_program_starts_once_it_is_ready(folder):
    late = shell("tensorboard", FOREVER, ready=lambda: bool(pids(folder, "learner")))
    run([late, shell("learner", FOREVER)], lambda: bool(pids(folder, "tensorboard")), folder=folder)
    assert pids(folder, "learner")


@pytest.mark.parametrize(("end", "value"), [("exit 1", 1), ("kill -9 $$", 9)])
def test_the_run_continues_without_a_program_that_is_not_essential(folder, end, value):
    gone = folder / "tensorboard.log"
    programs = [
        shell("tensorboard", end, crash_budget=0.0, essential=False),
        shell("learner", "exit 0", ends_run=True, ready=gone.exists),
    ]
    ending, events = run(programs, folder=folder)
    assert ending.status == FINISHED
    assert [(event.role, event.kind, event.failure.value) for event in events] == [("tensorboard", "abandoned", value)]


def test_niceness_applies_to_the_program_and_its_session(folder):
    group = Path("/proc/self/autogroup")
    program = shell("evaluator", f"cat {group}; echo nice $(nice); echo ready; {FOREVER}", niceness=7)
    run([program], lambda: has_logged(folder, "evaluator"), folder=folder)
    log = (folder / "evaluator.log").read_text()
    assert f"nice {os.nice(0) + 7}\n" in log
    assert not group.exists() or "nice 7\n" in log


# --- stuck programs ---------------------------------------------------------------------------------------------------

BEATING = """
import os, sys, time
from apexreplay.process.lifecycle import stop_on_signals
from apex.runtime.logs import configure_logging
from apexreplay.process.watchdog import take_notifier
print("pid", os.getpid(), flush=True)
configure_logging("role")
with stop_on_signals(take_notifier()) as stop:
    print("ready", flush=True)
    while not stop.poll():
        time.sleep(0.01)
        {then}
"""


def beating(role, then="pass", **options):
    """A program that sends heartbeats and executes `then` after each; 2 s without one are too long."""
    options = {"stuck_seconds": 2.0, **options}
    return Program(role=role, command=(sys.executable, "-c", BEATING.format(then=then)), **options)


def test_a_stopped_program_is_killed_and_restarted(folder):
    def condition():
        starts = pids(folder, "actor")
        if len(starts) == 1 and is_running(starts[0]) and has_logged(folder, "actor", "learner"):
            os.kill(starts[0], signal.SIGSTOP)
        return len(starts) == 2

    _, events = run([beating("learner"), beating("actor")], condition, folder=folder)
    assert (events[0].role, events[0].kind, events[0].failure.kind) == ("actor", "restarting", "stuck")
    assert events[0].failure.value >= 2.0
    assert len(pids(folder, "learner")) == 1


def test_a_deadlocked_program_logs_its_stack_traces(folder):
    program = beating("actor", "import threading; threading.Lock().acquire() and threading.Event().wait()")
    run([program], lambda: len(pids(folder, "actor")) == 2, folder=folder)
    log = (folder / "actor.log").read_text()
    assert "Fatal Python error: Aborted" in log
    assert "in wait" in log


def test_a_program_that_is_stuck_too_often_ends_the_run(folder):
    ending, _ = run([beating("actor", "time.sleep(600)", crash_budget=0.0)], folder=folder)
    assert (ending.status, ending.failure.kind, ending.failure.times) == (FAILED, "stuck", 1)
    assert ending.failure.value >= 2.0


def test_a_short_pause_is_not_stuck(folder):
    stopped_at = []

    def condition():
        if not stopped_at and has_logged(folder, "actor"):
            os.kill(pids(folder, "actor")[0], signal.SIGSTOP)
            stopped_at.append(time.monotonic())
        elif stopped_at and time.monotonic() - stopped_at[0] > 0.3:
            os.kill(pids(folder, "actor")[0], signal.SIGCONT)
            return time.monotonic() - stopped_at[0] > 2.5
        return False

    programs = [shell("tensorboard", FOREVER), beating("actor")]  # The first one is not watched.
    run(programs, condition, folder=folder)
    assert (len(pids(folder, "actor")), len(pids(folder, "tensorboard"))) == (1, 1)


def test_no_program_is_killed_if_all_are_silent_and_the_launcher_warns(folder, caplog, monkeypatch):
    monkeypatch.setattr(lifecycle, "EXPLAIN_SECONDS", 1.0)
    stopped = []

    def condition():
        if not stopped and has_logged(folder, "learner", "actor"):
            stopped.extend(pids(folder, role)[0] for role in ("learner", "actor"))
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
        return any(getattr(record.msg, "what", "") == "any_heartbeat" for record in caplog.records)

    programs = [beating("learner", grace_seconds=0.1), beating("actor", grace_seconds=0.1)]
    run(programs, condition, folder=folder)
    assert pids(folder, "learner") + pids(folder, "actor") == stopped


# --- stopping ---------------------------------------------------------------------------------------------------------


def test_programs_stop_in_the_reverse_order_of_their_start(folder):
    order = folder / "order"
    script = "trap 'echo {role} >> {order}; exit 0' TERM; echo ready; while :; do sleep 0.01; done"
    roles = ("replay", "learner", "evaluator", "actor")
    programs = [shell(role, script.format(role=role, order=order)) for role in roles]
    ending, _ = run(programs, lambda: has_logged(folder, *roles), folder=folder)
    assert ending.status == FINISHED
    assert order.read_text().split() == ["actor", "evaluator", "learner", "replay"]


def test_the_programs_of_one_group_stop_together(folder):
    """Each ends only when the other was asked too; one after the other, the first would be killed."""
    script = "trap 'touch {0}; while [ ! -e {1} ]; do sleep 0.01; done; exit 0' TERM; echo ready; "
    paths = [folder / "asked-0", folder / "asked-1"]
    programs = [
        shell(
            f"replay-{i}",
            script.format(paths[i], paths[1 - i]) + "while :; do sleep 0.01; done",
            grace_seconds=10.0,
            stops_with="replay",
        )
        for i in range(2)
    ]
    began = time.monotonic()
    _, events = run(programs, lambda: has_logged(folder, "replay-0", "replay-1"), folder=folder)
    assert events == [ProgramEvent("replay-1", "stopping"), ProgramEvent("replay-0", "stopping")]
    assert time.monotonic() - began < 10.0


@pytest.mark.parametrize("essential", [True, False])
def test_a_program_that_ignores_sigterm_is_killed_after_its_grace_period(folder, essential):
    script = "trap '' TERM; echo ready; while :; do sleep 0.01; done"
    program = shell("actor", script, grace_seconds=0.2, essential=essential)
    began = time.monotonic()
    _, events = run([program], lambda: has_logged(folder, "actor"), folder=folder)
    killing = [ProgramEvent("actor", "killing", 0.2)] if essential else []  # TensorBoard has nothing to lose.
    assert events == [ProgramEvent("actor", "stopping"), *killing]
    assert not any(map(is_running, pids(folder, "actor")))
    assert time.monotonic() - began < 10


SAVES = """
    until = time.monotonic() + {seconds}
    while time.monotonic() < until:
        stop.tick()
        time.sleep(0.05)
    print("saved", flush=True)
"""


def saving(end, **options):
    """A program that sends heartbeats, and executes `end` after SIGTERM. Its grace period is 0.2 s."""
    then = "stop.ticks == 100 and print('beating', flush=True)"  # The supervisor has seen a heartbeat by then.
    command = (sys.executable, "-c", BEATING.format(then=then) + end)
    return Program(role="learner", command=command, stuck_seconds=2.0, grace_seconds=0.2, **options)


@pytest.mark.parametrize("stuck_seconds", [2.0, 0.0], ids=["watched", "not watched"])
@pytest.mark.parametrize(("seconds", "needed"), [(60.0, 1.5), (0.0, 60.0), (0.5, 60.0)])
def test_a_program_that_beats_may_save_for_longer(folder, seconds, needed, stuck_seconds):
    program = replace(saving(SAVES.format(seconds=needed), saving_seconds=seconds), stuck_seconds=stuck_seconds)
    began = time.monotonic()
    _, events = run([program], lambda: has_logged(folder, "learner", line="beating"), folder=folder)
    is_saved = needed < seconds
    assert ("saved" in (folder / "learner.log").read_text()) is is_saved
    kinds = ["stopping", *["saving"] * (seconds > 0), *["killing"] * (not is_saved)]
    assert [event.kind for event in events] == kinds
    assert is_saved or 0.2 + seconds <= events[-1].seconds + 0.01 < time.monotonic() - began


def test_a_program_that_has_not_started_yet_gets_no_further_time(folder):
    script = "trap '' TERM; echo ready; while :; do sleep 0.01; done"
    program = shell("learner", script, grace_seconds=0.2, saving_seconds=600.0, stuck_seconds=600.0)
    _, events = run([program], lambda: has_logged(folder, "learner"), folder=folder)
    assert events == [ProgramEvent("learner", "stopping"), ProgramEvent("learner", "killing", 0.2)]


def test_a_program_that_beats_no_more_gets_no_further_time(folder, monkeypatch):
    monkeypatch.setattr(supervisor, "SILENT_SECONDS", 1.0)
    began = time.monotonic()
    program = saving("    time.sleep(600)\n", saving_seconds=600.0)
    _, events = run([program], lambda: has_logged(folder, "learner", line="beating"), folder=folder)
    assert [event.kind for event in events] == ["stopping", "saving", "killing"]
    assert time.monotonic() - began < DEADLINE


def test_an_exception_leaves_no_program_behind(folder):
    def tick():
        if pids(folder, "actor"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        supervise([shell("actor", FOREVER)], Stop(), logs=folder, tick=tick)
    assert not is_running(pids(folder, "actor")[0])


LONG_GRACE = """
import sys
from pathlib import Path
from apexreplay.process.lifecycle import stop_on_signals
from apex.runtime.supervisor import Program, supervise
script = "trap '' TERM; echo pid $$; while :; do sleep 0.01; done"
program = Program(role="actor", command=("sh", "-c", script), grace_seconds=600.0)
with stop_on_signals() as stop:
    supervise([program], stop, logs=Path(sys.argv[1]), notify=lambda event: print(event.kind, flush=True))
"""


def test_a_second_ctrl_c_kills_without_a_grace_period(folder):
    launcher = subprocess.Popen(
        [sys.executable, "-c", LONG_GRACE, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        until(lambda: pids(folder, "actor"))
        launcher.send_signal(signal.SIGINT)
        assert launcher.stdout.readline() == "stopping\n"
        launcher.send_signal(signal.SIGINT)
        launcher.wait(DEADLINE)
    finally:
        launcher.kill()
        launcher.stdout.close()
    until(lambda: not any(map(is_running, pids(folder, "actor"))))


LAUNCHER = """
import sys
from pathlib import Path
from apexreplay.process import lifecycle
from apexreplay.process.lifecycle import Stop
from apex.runtime.supervisor import Program, supervise
roles = [Program(role=role, command=("sh", "-c", sys.argv[2])) for role in ("replay", "actor")]
supervise(roles, Stop(), logs=Path(sys.argv[1]))
"""


@pytest.mark.parametrize(
    "script",
    [
        "echo pid $$; exec sleep 600",
        "trap '' TERM; echo pid $$; while :; do sleep 0.01; done",  # ignores SIGTERM
        "echo pid $$; kill -STOP $$",  # stopped
    ],
)
def test_no_program_outlives_a_launcher_that_was_killed(folder, script):
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(folder), script])
    try:
        until(lambda: pids(folder, "replay") and pids(folder, "actor"))
    finally:
        launcher.kill()
        launcher.wait(DEADLINE)
    roles = pids(folder, "replay") + pids(folder, "actor")
    assert len(roles) == 2
    until(lambda: not any(map(is_running, roles)))
