"""The supervisor: lost programs start again within a budget, a run ends as it should, and nobody is left behind.

Roles are played by `python -c` and `sh -c`; every wait ends on a condition or fails at its deadline.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.processes import is_running
from support.waiting import DEADLINE, until

from apex.errors import FAILED, FINISHED, NEIGHBOUR_GONE, REFUSED
from apex.runtime.lifecycle import Stop
from apex.runtime.supervisor import FORGET_SECONDS, CrashBudget, Program, supervise
from apex.runtime.text import last_lines

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
    """A program that notes its process ids in ROLE.log, one line `pid N` for each life, and runs the script."""
    return Program(role=role, command=("sh", "-c", f"echo pid $$; {script}"), **options)


def pids(folder, role):
    """Every life of a role so far."""
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


# --- the budget -------------------------------------------------------------------------------------------------------


def test_a_budget_of_three_allows_three_restarts_with_longer_and_longer_pauses():
    budget = CrashBudget(3.0)
    assert [budget.charge(1.0, 0.0) for _ in range(4)] == [0.5, 1.0, 2.0, None]


def test_crashes_are_forgotten_one_in_two_minutes():
    budget = CrashBudget(1.0)
    assert budget.charge(1.0, 0.0) == 0.5
    assert budget.charge(1.0, FORGET_SECONDS) == 0.5  # as if it were the first
    assert budget.charge(1.0, FORGET_SECONDS + 1.0) is None


def test_a_pause_has_an_upper_bound():
    budget = CrashBudget(100.0)
    assert max(budget.charge(1.0, 0.0) for _ in range(50)) == 10.0


# --- endings ----------------------------------------------------------------------------------------------------------


def test_a_run_ends_well_when_its_main_program_has_finished(folder):
    programs = [shell("replay", FOREVER), shell("learner", "exit 0", ends_run=True), shell("actor", FOREVER)]
    ending = supervise(programs, StopWhen(lambda: False), logs=folder)
    assert (ending.status, ending.cause) == (FINISHED, "")


def test_a_refusal_ends_the_run_at_once_with_its_reason(folder):
    programs = [shell("replay", FOREVER), shell("learner", "echo replay.capacity must be int; exit 2")]
    ending = supervise(programs, StopWhen(lambda: False), logs=folder)
    assert ending.status == REFUSED
    assert ending.cause == f"learner refused to run: replay.capacity must be int; see {folder / 'learner.log'}"
    assert len(pids(folder, "learner")) == 1


def test_a_crash_loop_ends_the_run_with_the_status_the_count_and_the_last_words(folder):
    programs = [shell("replay", "echo out of luck; exit 7", crash_budget=1.0), shell("actor", FOREVER)]
    ending = supervise(programs, StopWhen(lambda: False), logs=folder)
    assert ending.status == 7
    assert ending.cause == f"replay ended with status 7 twice: out of luck; see {folder / 'replay.log'}"
    assert ending.role == "replay"


def test_a_death_by_signal_is_a_failure_that_names_the_signal(folder):
    ending = supervise([shell("replay", "kill -9 $$", crash_budget=0.0)], StopWhen(lambda: False), logs=folder)
    assert ending.status == FAILED
    assert "replay was ended by signal 9 (Killed) once" in ending.cause


def test_who_lost_its_neighbour_is_not_blamed_where_the_neighbour_failed(folder):
    crashed = shell("replay", "echo disk full; exit 7")
    waiting = shell("actor", "exit 75", crash_budget=0.0, ready=lambda: len(pids(folder, "replay")) == 2)
    ending = supervise([crashed, waiting], StopWhen(lambda: False), logs=folder)
    assert (ending.role, ending.status) == ("replay", 7)
    assert "disk full" in ending.cause


def test_who_lost_its_neighbour_ends_the_run_with_75_when_nobody_else_failed(folder):
    ending = supervise([shell("actor", "exit 75", crash_budget=0.0)], StopWhen(lambda: False), logs=folder)
    assert (ending.role, ending.status) == ("actor", NEIGHBOUR_GONE)


def test_a_lost_neighbour_costs_less_than_a_crash(folder):
    program = shell("actor", "exit 75", crash_budget=0.6)  # two at 0.25 each; a crash would be one too many
    ending = supervise([program], StopWhen(lambda: False), logs=folder)
    assert len(pids(folder, "actor")) == 3
    assert "3 times" in ending.cause


# --- lives ------------------------------------------------------------------------------------------------------------


def test_a_killed_program_is_started_again_and_the_others_are_left_alone(folder):
    told = []

    def condition():
        lives = pids(folder, "replay")
        if len(lives) == 1 and pids(folder, "actor") and is_running(lives[0]):
            os.kill(lives[0], signal.SIGKILL)
        return len(lives) == 2

    ending = supervise(
        [shell("replay", FOREVER), shell("actor", FOREVER)], StopWhen(condition), logs=folder, tell=told.append
    )
    assert ending.status == FINISHED
    assert len(pids(folder, "actor")) == 1
    assert told[0].startswith("replay was ended by signal 9 (Killed); it starts again in 0.5 s")


def test_a_program_that_ends_well_before_its_time_starts_again_after_a_rest(folder):
    told = []
    ending = supervise(
        [shell("actor", "exit 0", crash_budget=0.3)], StopWhen(lambda: bool(told)), logs=folder, tell=told.append
    )
    assert ending.cause == ""
    assert told == [f"actor ended with status 0; it starts again; see {folder / 'actor.log'}"]


def test_who_ends_well_when_it_is_not_needed_any_more_is_not_missed(folder):
    told = []
    needed = shell("actor", "exit 0", ready=lambda: not pids(folder, "actor"))
    learner = shell("learner", "exit 0", ends_run=True, ready=lambda: bool(pids(folder, "actor")))
    supervise([needed, learner], StopWhen(lambda: False), logs=folder, tell=told.append)
    assert told == []


def test_the_children_of_a_killed_program_do_not_outlive_it(folder):
    program = shell("replay", "sh -c 'echo pid $$; exec sleep 600' & wait")

    def condition():
        lives = pids(folder, "replay")
        if len(lives) == 2 and is_running(lives[0]):
            os.kill(lives[0], signal.SIGKILL)
        return len(lives) == 4

    supervise([program], StopWhen(condition), logs=folder)
    both_lives = set(pids(folder, "replay"))
    assert len(both_lives) == 4
    until(lambda: not any(map(is_running, both_lives)))


def test_a_program_starts_once_it_is_ready(folder):
    late = shell("tensorboard", FOREVER, ready=lambda: bool(pids(folder, "learner")))
    supervise([late, shell("learner", FOREVER)], StopWhen(lambda: bool(pids(folder, "tensorboard"))), logs=folder)
    assert pids(folder, "learner")


def test_the_run_goes_on_without_what_is_not_essential(folder):
    told = []
    programs = [
        shell("tensorboard", "exit 1", crash_budget=0.0, essential=False),
        shell("learner", "exit 0", ends_run=True, ready=lambda: bool(told)),
    ]
    ending = supervise(programs, StopWhen(lambda: False), logs=folder, tell=told.append)
    assert ending.status == FINISHED
    assert told[0].startswith("continuing without tensorboard: tensorboard ended with status 1 once")


def test_an_observer_runs_with_lower_priority(folder):
    programs = [shell("evaluator", f"echo nice $(nice); {FOREVER}", niceness=7)]
    log = folder / "evaluator.log"
    supervise(programs, StopWhen(lambda: log.exists() and "nice " in log.read_text()), logs=folder)
    assert f"nice {os.nice(0) + 7}" in log.read_text()


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="this kernel does not group sessions")
def test_an_observers_whole_session_has_lower_priority(folder):
    programs = [shell("evaluator", f"cat /proc/self/autogroup; {FOREVER}", niceness=7)]
    log = folder / "evaluator.log"
    supervise(programs, StopWhen(lambda: log.exists() and "nice" in log.read_text()), logs=folder)
    assert log.read_text().rstrip().endswith("nice 7")


# --- stuck programs ---------------------------------------------------------------------------------------------------

TURNS = """
import sys, time
from apex.runtime.lifecycle import configure_logging, stop_on_signals
from apex.runtime.watchdog import take_notifier
print("pid", __import__("os").getpid(), flush=True)
configure_logging("role")
with stop_on_signals(take_notifier()) as stop:
    while not stop.poll():
        time.sleep(0.01)
        {at_every_turn}
"""


def turning(role, at_every_turn="pass", **options):
    """A program that turns, and does at every turn what is asked of it; more than 2 s without a turn are too long."""
    options = {"stuck_seconds": 2.0, **options}
    return Program(role=role, command=(sys.executable, "-c", TURNS.format(at_every_turn=at_every_turn)), **options)


def ticks(folder, role):
    """Whether the newest life of a role has come to its loop."""
    lives = pids(folder, role)
    return bool(lives) and "SIGTERM" in handled(lives[-1])


def handled(pid):
    """Signals that a process has handlers for."""
    try:
        with open(f"/proc/{pid}/status") as file:
            mask = int(next(line.split()[1] for line in file if line.startswith("SigCgt:")), 16)
    except (OSError, StopIteration):
        return set()
    return {signum.name for signum in signal.Signals if mask >> (signum - 1) & 1}


def test_a_program_that_was_stopped_makes_no_turns_and_is_started_again(folder):
    told = []

    def condition():
        lives = pids(folder, "actor")
        if len(lives) == 1 and ticks(folder, "actor") and ticks(folder, "learner"):
            os.kill(lives[0], signal.SIGSTOP)
        return len(lives) == 2

    programs = [turning("learner"), turning("actor")]
    supervise(programs, StopWhen(condition), logs=folder, tell=told.append)
    words = r"actor had no heartbeat for \d+ s and was killed \(--run.stuck-seconds\); it starts again in 0.5 s; see "
    assert re.match(words, told[0])
    assert len(pids(folder, "learner")) == 1


def test_a_program_that_is_deadlocked_writes_down_where(folder):
    program = turning("actor", "import threading; threading.Lock().acquire() and threading.Event().wait()")
    supervise([program], StopWhen(lambda: len(pids(folder, "actor")) == 2), logs=folder)
    log = (folder / "actor.log").read_text()
    assert "Fatal Python error: Aborted" in log
    assert "in wait" in log


def test_a_program_that_gets_stuck_again_and_again_ends_the_run_with_that_cause(folder):
    program = turning("actor", "time.sleep(600)", crash_budget=0.0)
    ending = supervise([program], StopWhen(lambda: False), logs=folder)
    assert ending.status == FAILED
    words = r"actor had no heartbeat for \d+ s and was killed \(--run.stuck-seconds\) once; see .*actor.log"
    assert re.fullmatch(words, ending.cause)


def test_a_short_stop_harms_nobody(folder):
    stopped_at = []

    def condition():
        lives = pids(folder, "actor")
        if not stopped_at and ticks(folder, "actor"):
            os.kill(lives[0], signal.SIGSTOP)
            stopped_at.append(time.monotonic())
        elif stopped_at and time.monotonic() - stopped_at[0] > 0.3:
            os.kill(lives[0], signal.SIGCONT)
            return time.monotonic() - stopped_at[0] > 2.5
        return False

    supervise([turning("actor")], StopWhen(condition), logs=folder)
    assert len(pids(folder, "actor")) == 1


def test_where_all_fall_silent_together_nobody_is_killed_and_the_launcher_says_so(folder, caplog):
    stopped = []

    def condition():
        roles = ("learner", "actor")
        if not stopped and all(ticks(folder, role) for role in roles):
            stopped.extend(pids(folder, role)[0] for role in roles)
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
        return "no program sends any" in caplog.text

    programs = [turning("learner", grace_seconds=0.1), turning("actor", grace_seconds=0.1)]
    supervise(programs, StopWhen(condition), logs=folder, explain_seconds=1.0)
    assert pids(folder, "learner") + pids(folder, "actor") == stopped


def test_a_program_that_need_give_no_sign_may_be_silent(folder):
    since = time.monotonic()
    programs = [shell("tensorboard", FOREVER), turning("actor")]
    supervise(programs, StopWhen(lambda: time.monotonic() - since > 2.5), logs=folder)
    assert len(pids(folder, "tensorboard")) == 1


# --- stopping ---------------------------------------------------------------------------------------------------------


def test_programs_stop_in_the_reverse_order_of_their_start(folder):
    order = folder / "order"
    script = "trap 'echo {role} >> {order}; exit 0' TERM; echo ready; while :; do sleep 0.01; done"
    roles = ("replay", "learner", "evaluator", "actor")
    programs = [shell(role, script.format(role=role, order=order)) for role in roles]

    def all_ready():
        logs = [folder / f"{role}.log" for role in roles]
        return all(log.exists() and "ready" in log.read_text() for log in logs)

    ending = supervise(programs, StopWhen(all_ready), logs=folder)
    assert ending.status == FINISHED
    assert order.read_text().split() == ["actor", "evaluator", "learner", "replay"]


def test_programs_of_one_group_are_asked_together_and_share_their_grace(folder):
    """Each ends when the other was asked too; asked one after the other, the first would be killed."""
    script = "trap 'touch {own}; while [ ! -e {other} ]; do sleep 0.01; done; exit 0' TERM; echo ready; {forever}"
    paths = [folder / "asked-0", folder / "asked-1"]
    programs = [
        shell(
            f"replay-{i}",
            script.format(own=paths[i], other=paths[1 - i], forever="while :; do sleep 0.01; done"),
            grace_seconds=10.0,
            stops_with="replay",
        )
        for i in range(2)
    ]
    told = []

    def all_ready():
        logs = [folder / f"{program.role}.log" for program in programs]
        return all(log.exists() and "ready" in log.read_text() for log in logs)

    began = time.monotonic()
    supervise(programs, StopWhen(all_ready), logs=folder, tell=told.append)
    assert told == ["stopping replay-1", "stopping replay-0"]
    assert time.monotonic() - began < 10.0


def test_what_ignores_the_request_is_killed_after_its_grace_and_said_aloud(folder):
    told = []
    program = shell("actor", "trap '' TERM; echo ready; while :; do sleep 0.01; done", grace_seconds=0.2)
    log = folder / "actor.log"
    begun = time.monotonic()
    supervise([program], StopWhen(lambda: log.exists() and "ready" in log.read_text()), logs=folder, tell=told.append)
    assert told == ["stopping actor", "actor did not stop within 0.2 s; killing it"]
    assert time.monotonic() - begun < 10


def test_an_exception_leaves_nothing_behind(folder):
    def tick():
        if pids(folder, "actor"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        supervise([shell("actor", FOREVER)], Stop(), logs=folder, tick=tick)
    assert not is_running(pids(folder, "actor")[0])


PATIENT = """
import sys
from pathlib import Path
from apex.runtime.lifecycle import stop_on_signals
from apex.runtime.supervisor import Program, supervise
deaf = "trap '' TERM; echo pid $$; while :; do sleep 0.01; done"
program = Program(role="actor", command=("sh", "-c", deaf), grace_seconds=600.0)
with stop_on_signals() as stop:
    supervise([program], stop, logs=Path(sys.argv[1]), tell=lambda sentence: print(sentence, flush=True))
"""


def test_a_second_ctrl_c_kills_without_any_grace(folder):
    launcher = subprocess.Popen(
        [sys.executable, "-c", PATIENT, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        until(lambda: pids(folder, "actor"))
        launcher.send_signal(signal.SIGINT)
        assert launcher.stdout.readline() == "stopping actor\n"
        launcher.send_signal(signal.SIGINT)
        launcher.wait(DEADLINE)
    finally:
        launcher.kill()
        launcher.stdout.close()
    until(lambda: not any(map(is_running, pids(folder, "actor"))))


LAUNCHER = """
import sys
from pathlib import Path
from apex.runtime.lifecycle import Stop
from apex.runtime.supervisor import Program, supervise
roles = [Program(role=role, command=("sh", "-c", sys.argv[2])) for role in ("replay", "actor")]
supervise(roles, Stop(), logs=Path(sys.argv[1]))
"""


@pytest.mark.parametrize(
    "script",
    [
        "echo pid $$; exec sleep 600",
        "trap '' TERM; echo pid $$; while :; do sleep 0.01; done",  # listens to nobody
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


# --- last words -------------------------------------------------------------------------------------------------------


def test_last_lines_are_the_newest_that_are_not_empty(tmp_path):
    path = tmp_path / "role.log"
    path.write_bytes(b"one\ntwo\n\n \nthr\xffee\n")
    assert last_lines(path, 2) == ["two", "thr\N{REPLACEMENT CHARACTER}ee"]


def test_there_are_no_last_lines_without_a_log(tmp_path):
    assert last_lines(tmp_path / "none.log", 2) == []
