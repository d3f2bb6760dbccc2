"""Faults reach the processes and links they name and end when they should; scenarios measure what they say."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace
from support.builders import VECTORS
from support.messages import make_run_status
from support.waiting import until

from apex.config import Config
from apex.launch.programs import make_programs
from apex.runs.folder import RunFolder
from chaos import growth, processes, recovery
from chaos.audit import Follower
from chaos.faults import Fault
from chaos.growth import growth_figures
from chaos.processes import Footprint, Process, find, footprints, is_alive, kill, maps_memory, send
from chaos.programs.launcher import edit_programs
from chaos.proxy import ADDRESSES
from chaos.recovery import FaultInjector
from chaos.report import ScenarioReporter
from chaos.run import ChaosRun
from chaos.scenarios import GOES_ON, SCENARIOS, ScenarioOptions

FAMILY = """
import os, sys, time
if len(sys.argv) > 1:
    os.fork()
    os.write(1, b"ready\\n")
    time.sleep(60)
import subprocess
child = subprocess.Popen([sys.executable, "-c", open(__file__).read(), "apex.replay"])
time.sleep(60)
"""


class Links:
    """Stands for the proxy: a tape."""

    def __init__(self):
        self.tape = []

    def set(self, pair, **values):
        self.tape.append((pair, {name: value for name, value in values.items() if value}))

    def throw_garbage(self, payloads):
        self.tape.append(("garbage", len(payloads)))

    def heal(self):
        self.tape.append(("healed", {}))


class Ledger:
    def __init__(self):
        self.actors = {}


class Sleeper:
    """Stands for a run whose only process sleeps, and which goes on at every look."""

    def __init__(self):
        self.child = subprocess.Popen(["sleep", "60"])
        self.num_stored = self.num_acknowledged = self.most_updates = self.num_updates = 0
        self.newest_incarnation = self.num_resumes = 0
        self.ledger = Ledger()
        self.status, self.status_at = make_run_status(updates=1, replay={"size": 1, "capacity": 1}), float("inf")

    def processes(self):
        roles = ("launcher", "replay", "learner", "actor")
        return [Process(self.child.pid, 1, role, child) for role in roles for child in (False, True)]

    def tick(self):
        if self.child.poll() is not None:
            self.child = subprocess.Popen(["sleep", "60"])
        self.num_stored += 1
        self.num_acknowledged += 1
        self.most_updates += 1
        self.num_updates += 1
        self.newest_incarnation += 1
        self.status = replace(self.status, updates=self.status.updates + 1)

    def wait(self, seconds, until=lambda: False):
        for _ in range(100):
            self.tick()
            if until():
                return True
        return False

    def read(self):
        pass

    def count_aborts(self):
        return 0

    def audit(self):
        class Passed:
            def sentence(self):
                return "passed"

        return Passed()

    def end(self):
        self.child.kill()
        self.child.wait()


@pytest.fixture
def run():
    run = Sleeper()
    yield run
    run.end()


def state(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_kill_kills_and_is_counted_by_role(run):
    injector, victim = FaultInjector(run, Links(), 0), run.child
    injector.do(Fault(0.0, "kill", "replay's child"))
    assert victim.wait(10) == -signal.SIGKILL
    assert injector.kills == {"replay": 1}
    assert not injector.kill("evaluator")


def test_a_hangup_reaches_the_program_and_not_its_children(run, monkeypatch):
    tape = []
    monkeypatch.setattr(recovery, "send", lambda pid, signum: tape.append((pid, signum)))
    FaultInjector(run, Links(), 0).do(Fault(0.0, "hangup", "learner"))
    assert tape == [(run.child.pid, signal.SIGHUP)]


@pytest.mark.parametrize("sees_memory", [True, False])
def test_a_loader_is_the_child_of_the_learner_that_sees_the_replay_memory(run, monkeypatch, sees_memory):
    monkeypatch.setattr(recovery, "maps_memory", lambda pid: sees_memory)
    injector = FaultInjector(run, Links(), 0)
    assert injector.kill("learner's loader") == sees_memory
    assert injector.kills == ({"loader": 1} if sees_memory else {})


def test_a_process_sees_the_replay_memory_while_it_maps_it(tmp_path):
    file = tmp_path / "apex-1-0.replay"
    file.write_bytes(bytes(mmap.PAGESIZE))
    steps = "import mmap; print(flush=True); input(); f = open({0!r})"
    steps += "; m = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)"
    # A process of its own: this one may have a memory of another test.
    command = [sys.executable, "-c", f"{steps.format(str(file))}; print(flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        assert not maps_memory(process.pid)
        process.stdin.write("\n")
        process.stdin.flush()
        process.stdout.readline()
        assert maps_memory(process.pid)
        process.communicate("\n", timeout=60)


def test_a_stop_ends_by_itself(run):
    injector = FaultInjector(run, Links(), 0)
    injector.do(Fault(0.0, "stop", "actor", 0.05))
    until(lambda: state(run.child.pid) == "T", "stop")
    assert injector.busy
    until(lambda: injector.tick() or not injector.busy, "end of the fault")
    until(lambda: state(run.child.pid) != "T", "going on")


def test_a_storm_kills_several_times(run):
    injector = FaultInjector(run, Links(), 0)
    injector.do(Fault(0.0, "storm", "learner"))
    injector.tick()
    assert injector.kills == {"learner": 1}
    assert injector.busy


@pytest.mark.parametrize("kind", ["cut", "delay"])
def test_a_link_is_broken_and_mended(run, kind):
    links = Links()
    injector = FaultInjector(run, links, 0)
    injector.do(Fault(0.0, kind, "actor-replay", 0.0))
    injector.tick()
    assert [pair for pair, _ in links.tape] == ["actor-replay"] * 2
    assert links.tape[0][1]
    assert not links.tape[1][1]


def test_garbage_is_thrown(run):
    links = Links()
    FaultInjector(run, links, 0).do(Fault(0.0, "garbage", "every port"))
    assert links.tape[0][0] == "garbage"


@pytest.mark.parametrize("victim", ["replay", "learner", "actor", "launcher"])
def test_a_victim_is_back_when_what_it_gives_comes_again(run, victim):
    came = FaultInjector(run, Links(), 0).kill_and_wait(victim)
    assert came.victim == victim
    assert came.seconds is not None


def test_aborts_are_counted_in_the_logs_of_all_programs(tmp_path):
    (tmp_path / "replay.log").write_text("ready\nAssertion failed: !_io_error (src/stream_engine_base.cpp:310)\n")
    (tmp_path / "launcher.log").write_text(
        "12:00:00 launcher WARNING replay was ended by signal 6 (Aborted); it starts again in 0.5 s\n"
        "12:00:09 launcher WARNING actor was ended by signal 9 (Killed); it starts again in 0.5 s\n"
    )
    (tmp_path / "learner.log").write_text("loader-0 ended with status -6\nloader-0 ended with status -9\n")
    run = ChaosRun.__new__(ChaosRun)
    run.run_folder = SimpleNamespace(logs=tmp_path)
    assert run.count_aborts() == 3


def test_a_victim_that_gives_nothing_more_is_never_back(run):
    run.tick = lambda: None
    assert FaultInjector(run, Links(), 0).kill_and_wait("replay").seconds is None


@pytest.mark.parametrize("name", ["random", "kills", "recovery", "partition", "far-actor"])
def test_a_scenario_heals_everything_and_says_whether_all_goes_on(run, name, capsys):
    links = Links()
    options = ScenarioOptions(minutes=0.001, period=0.02, rounds=1, part=1, size=10, faults=("kill", "garbage"))
    figures = SCENARIOS[name].play(run, links, FaultInjector(run, links, 0), ScenarioReporter(as_json=False), options)
    assert links.tape[-1] == ("healed", {})
    assert figures[-1].name == GOES_ON
    assert figures[-1].value is not None
    assert capsys.readouterr().out


def test_the_processes_of_a_run_are_found_by_role_and_with_what_they_hold(tmp_path):
    script = tmp_path / "family.py"
    script.write_text(FAMILY)
    launcher = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE)
    try:
        assert launcher.stdout.readline() == b"ready\n"
        assert launcher.stdout.readline() == b"ready\n"
        found = find(launcher.pid)
        assert sorted((process.role, process.is_child) for process in found) == [
            ("launcher", False),
            ("replay", False),
            ("replay", True),
        ]
        held = footprints(found)
        assert held["replay"].num_processes == 2
        assert held["replay"].memory_bytes > 0 < held["replay"].num_files
        for process in found:
            kill(process)
            until(lambda pid=process.pid: not is_alive(pid), "death")
            send(process.pid, signal.SIGCONT)  # That it is gone is no error.
    finally:
        for process in find(launcher.pid):
            kill(process)
        launcher.kill()
        launcher.wait()
        launcher.stdout.close()
    assert find(launcher.pid) == []


@pytest.mark.parametrize("is_its_own", [True, False])
def test_memory_leaves_out_what_is_mapped_from_elsewhere(tmp_path, monkeypatch, is_its_own):
    num_bytes = 32 * 2**20
    if not is_its_own:
        monkeypatch.setattr(processes, "NOT_ITS_OWN", (*processes.NOT_ITS_OWN, str(tmp_path)))
    me = [Process(os.getpid(), os.getppid(), "actor", False)]
    (tmp_path / "a file").write_bytes(bytes(num_bytes))
    with (tmp_path / "a file").open("r+b") as file, mmap.mmap(file.fileno(), num_bytes) as memory:
        before = footprints(me)["actor"].memory_bytes
        for begin in range(0, num_bytes, 2**20):  # All at once would be kept where an allocator keeps what is freed.
            memory[begin : begin + 2**20] = b"1" * 2**20
        grown = footprints(me)["actor"].memory_bytes - before
    assert grown >= 0.9 * num_bytes if is_its_own else grown < 0.1 * num_bytes


def test_the_programs_of_a_run_reach_one_another_through_the_proxies(tmp_path):
    folder = RunFolder.create(Config(run=Config().run.__class__(folder=str(tmp_path), name="run")), VECTORS)
    usual = make_programs(folder.config, folder, None)
    plain = {program.role: program for program in usual}
    made = {program.role: program for program in edit_programs(tmp_path, [], usual)}
    assert list(made) == list(plain)
    for role in ("replay", "actor", "evaluator"):
        assert f"{ADDRESSES[role]}:22003" in made[role].command
        assert "127.0.0.1:22003" in plain[role].command
    assert made["replay"].command[-2:] == ("--advertise", ADDRESSES["to replay"])
    assert made["learner"].command == plain["learner"].command
    assert made["actor"].command[3:5] == ("chaos.programs.actor", str(tmp_path))
    assert min(program.crash_budget for program in made.values()) == float("inf")
    many = [program for program in edit_programs(tmp_path, [29, 1], usual) if "actor" in program.role]
    assert [program.role for program in many] == ["actor-0", "actor-1"]
    assert many[1].command[-4:] == ("--processes", "1", "--envs", "1")


def test_a_store_that_is_not_there_is_waited_for(tmp_path):
    follower = Follower(tmp_path / "none", VECTORS)
    assert not follower.read()
    follower.look_again()
    assert len(follower.content.digests) == 0
    assert os.listdir(tmp_path) == []


def test_growth_is_that_of_roles_that_were_there_at_both_times():
    middle = {"actor": Footprint(1_000, 10, 2), "replay": Footprint(2_000, 20, 1)}
    end = {"actor": Footprint(1_005, 10, 2), "replay": Footprint(2_100, 21, 1)}
    rows = {figure.name: (figure.value, figure.reached) for figure in growth_figures(middle, end, "at last")}
    assert rows["actor: growth at last"] == (pytest.approx(0.5), True)
    assert rows["actor: more descriptors"] == (0, True)
    assert rows["replay: growth at last"] == (pytest.approx(5.0), False)
    assert rows["replay: more descriptors"] == (1, False)
    assert rows["all roles: growth at last"] == (pytest.approx(3.5), False)


def test_a_role_that_is_gone_has_not_kept_to_its_memory():
    held = {"actor": Footprint(1_000, 10, 2), "replay": Footprint(2_000, 20, 1)}
    for middle, end in ((held, {"actor": held["actor"]}), ({"actor": held["actor"]}, held)):
        rows = {figure.name: (figure.value, figure.reached) for figure in growth_figures(middle, end, "at last")}
        assert rows["actor: growth at last"] == (0.0, True)
        for name in ("replay: growth at last", "replay: more descriptors", "all roles: growth at last"):
            assert rows[name] == (None, False)


@pytest.mark.parametrize("settles", [True, False])
def test_what_is_held_is_looked_at_once_nobody_starts_any_more(monkeypatch, settles):
    """Descriptors come at every look for half a second, or for ever: then patience ends it."""
    run, began, looks = SimpleNamespace(wait=time.sleep, processes=list), time.monotonic(), []

    def look(processes):
        looks.append(len(looks) if not settles or time.monotonic() < began + 0.5 else 1_000)
        return {"actor": Footprint(1, looks[-1], 1)}

    for name, value in (("footprints", look), ("SAMPLES", 3), ("SAMPLE_SECONDS", 0.01)):
        monkeypatch.setattr(growth, name, value)
    held = growth.settled_footprints(run, 0.2)["actor"].num_files
    assert held == (1_000 if settles else looks[-2])  # The median of the last three.
    assert time.monotonic() - began > (0.7 if settles else 1.0)
