"""Faults reach their processes and links, and end in time; scenarios measure growth and recovery."""

import mmap
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace
from support.builders import VECTORS
from support.messages import make_run_status
from support.waiting import DEADLINE, until

from apex.config import Config
from apex.facts import Failure, ProgramEvent
from apex.launch.monitor import RunMonitor
from apex.launch.programs import make_programs
from apex.runs.folder import RunFolder
from chaos import growth, neighbours, processes, recovery
from chaos import run as chaos_run
from chaos.faults import Fault
from chaos.growth import growth_figures
from chaos.processes import Footprint, Process, find, footprints, is_alive, kill, maps_memory, send
from chaos.programs.launcher import EVENTS, edit_programs, record_events
from chaos.proxy import ADDRESSES
from chaos.recovery import FaultInjector
from chaos.report import ScenarioReporter
from chaos.run import ChaosRun
from chaos.scenarios import GOES_ON, SCENARIOS, ScenarioOptions

ROOT = Path(__file__).parents[3]
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
    """Replaces the proxy and records its calls."""

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
    """Replaces a run: its only process sleeps, and its counters grow at every tick."""

    def __init__(self):
        self.child = subprocess.Popen(["sleep", "60"])
        self.num_stored = self.num_acknowledged = self.most_updates = self.num_updates = 0
        self.newest_incarnation = self.num_resumes = 0
        self.ledger = Ledger()
        self.folder, self.run_id, self.resumes, self.clock = Path("nowhere"), 7, [], 0.0
        self.status, self.status_at = make_run_status(updates=1, replay={"size": 1, "capacity": 1}), float("inf")

    def processes(self):
        roles = ("launcher", "replay", "learner", "actor")
        return [Process(self.child.pid, 1, role, child) for role in roles for child in (False, True)]

    def tick(self, may_resume=True):
        self.resumes.append(may_resume)
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

    def set_clock(self, seconds):
        self.clock = seconds

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


def test_a_kill_is_counted_by_role_and_a_hangup_spares_children(run, monkeypatch):
    injector, victim = FaultInjector(run, Links(), 0), run.child
    injector.do(Fault(0.0, "kill", "replay's child"))
    assert victim.wait(10) == -signal.SIGKILL
    assert injector.kills == {"replay": 1}
    assert not injector.kill("evaluator")
    for maps in (False, True):
        monkeypatch.setattr(recovery, "maps_memory", lambda pid, maps=maps: maps)
        assert injector.kill("learner's loader") == maps
        assert injector.kill("learner's coordinator") != maps
    assert injector.kills == {"replay": 1, "loader": 1, "learner": 1}
    sent = []
    monkeypatch.setattr(recovery, "send", lambda pid, signum: sent.append((pid, signum)))
    injector.do(Fault(0.0, "hangup", "learner"))
    assert sent == [(run.child.pid, signal.SIGHUP)]


def test_loaders_are_recognized_by_their_mapped_replay_memory(tmp_path):
    file = tmp_path / "apex-1-0.replay"
    file.write_bytes(bytes(mmap.PAGESIZE))
    steps = "import mmap; print(flush=True); input(); f = open({0!r})"
    steps += "; m = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)"
    # A separate process, because this one may map the memory of another test.
    command = [sys.executable, "-c", f"{steps.format(str(file))}; print(flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        assert not maps_memory(process.pid)
        process.stdin.write("\n")
        process.stdin.flush()
        process.stdout.readline()
        assert maps_memory(process.pid)
        process.communicate("\n", timeout=300)


def test_a_stopped_process_continues_after_its_time(run):
    injector = FaultInjector(run, Links(), 0)
    injector.do(Fault(0.0, "stop", "actor", 0.05))
    until(lambda: state(run.child.pid) == "T", "stop")
    assert injector.busy
    until(lambda: injector.tick() or not injector.busy, "end of the fault")
    until(lambda: state(run.child.pid) != "T", "continuation")


def test_a_pair_is_killed_at_once(run):
    injector = FaultInjector(run, Links(), 0)
    injector.do(Fault(0.0, "pair", "replay + actor's child"))
    assert injector.kills == {"replay": 1, "actor": 1}


@pytest.mark.parametrize(("seconds", "kills"), [(60.0, {"replay": 1}), (0.0, {})])
def test_a_kill_waits_for_a_victim_that_restarts(run, monkeypatch, seconds, kills):
    monkeypatch.setattr(recovery, "VICTIM_SECONDS", seconds)
    there = run.processes
    monkeypatch.setattr(run, "processes", lambda: there() if run.num_stored > 2 else [])
    injector = FaultInjector(run, Links(), 0)
    injector.do(Fault(0.0, "kill", "replay"))
    assert injector.kills == kills


@pytest.mark.parametrize(("target", "resumes"), [("a living run", True), ("a killed run", False)])
def test_a_second_run_ends_before_a_killed_run_is_resumed(run, monkeypatch, target, resumes):
    @contextmanager
    def second_run(folder):
        with subprocess.Popen(["sleep", "0.1"] if resumes else ["false"]) as process:
            yield process

    monkeypatch.setattr(neighbours, "second_run", second_run)
    injector = FaultInjector(run, Links(), 0)
    injector.do(Fault(0.0, "neighbour", target))
    assert set(run.resumes) <= {resumes}
    assert injector.kills == ({} if resumes else {"launcher": 1})
    assert injector.failed_neighbours == (0 if resumes else 1)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_files_of_another_user_are_planted_and_removed(run, monkeypatch, place):
    place.chmod(0o1777)
    (place / "apex-own").touch()
    monkeypatch.setattr(recovery, "MEMORY", place)
    injector = FaultInjector(run, Links(), 0)
    injector.do(Fault(0.0, "plant", "/dev/shm", 60.0))
    planted = {path for path in place.iterdir() if path.lstat().st_uid == neighbours.STRANGER}
    assert len(planted) == 8
    assert any(path.is_fifo() for path in planted)
    assert any(path.is_dir() for path in planted)
    injector.end()
    assert list(place.iterdir()) == [place / "apex-own"]


def test_a_jump_of_the_wall_clock_leaves_the_monotonic_clock(tmp_path):
    run = ChaosRun(Config(), tmp_path / "run", [], [])
    command = "import time; print(time.time(), time.time_ns() / 1e9, time.monotonic()); input()\n"
    paths = os.pathsep.join([str(chaos_run.CLOCK), str(ROOT)])
    environment = {**os.environ, "CHAOS_CLOCK": str(tmp_path / "run" / "clock"), "PYTHONPATH": paths}
    with subprocess.Popen(
        [sys.executable, "-u", "-c", 3 * command], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as program:
        for jump in (0.0, -86_400.0, 86_400.0):
            run.set_clock(jump)
            program.stdin.write(b"go on\n" if jump else b"")
            program.stdin.flush()
            wall, precise, monotonic = map(float, program.stdout.readline().split())
            assert wall - time.time() == pytest.approx(jump, abs=DEADLINE)
            assert precise == pytest.approx(wall, abs=DEADLINE)
            assert monotonic == pytest.approx(time.monotonic(), abs=DEADLINE)
        program.communicate(b"end\n", timeout=DEADLINE)


def test_a_cut_ends_by_itself(run):
    links = Links()
    injector = FaultInjector(run, links, 0)
    injector.do(Fault(0.0, "cut", "actor-replay", 0.0))
    injector.tick()
    (begun, values), (ended, nothing) = links.tape
    assert begun == ended == "actor-replay"
    assert values
    assert not nothing


@pytest.mark.parametrize("victim", ["replay", "learner", "actor", "launcher"])
def test_a_victim_has_recovered_when_its_work_is_seen_again(run, victim):
    came = FaultInjector(run, Links(), 0).kill_and_wait(victim)
    assert came.victim == victim
    assert came.seconds is not None
    run.tick = lambda: None
    run.wait = lambda seconds, until=lambda: False: until()
    if victim == "replay":
        assert FaultInjector(run, Links(), 0).kill_and_wait(victim).seconds is None


def test_assertions_of_libzmq_and_aborted_programs_are_counted(tmp_path):
    (tmp_path / "replay.log").write_text("ready\nAssertion failed: !_io_error (src/stream_engine_base.cpp:310)\n")
    failures = [Failure(role="replay", kind="signal", value=signum) for signum in (signal.SIGABRT, signal.SIGKILL)]
    run = ChaosRun(Config(), tmp_path / "run", [], [])
    run.run_folder = SimpleNamespace(logs=tmp_path)
    assert run.count_aborts() == 1
    shown = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunMonitor, "show_event", lambda watch, event: shown.append(event))
        record_events(tmp_path / "run" / EVENTS)
        for failure in (*failures, None):
            RunMonitor.show_event(None, ProgramEvent("replay", "restarting", 0.5, failure))
    assert [event.failure for event in shown] == [*failures, None]
    assert run.count_aborts() == 2


@pytest.mark.parametrize("name", ["random", "kills", "neighbours", "recovery", "partition", "far-actor"])
def test_a_scenario_ends_its_faults_and_reports_the_recovery(run, name, capsys, monkeypatch):
    monkeypatch.setattr(neighbours, "second_run", lambda folder: subprocess.Popen(["true"]))
    links = Links()
    options = ScenarioOptions(minutes=0.001, period=0.02, rounds=1, part=1, size=10, faults=("kill", "garbage"))
    figures = SCENARIOS[name].play(run, links, FaultInjector(run, links, 0), ScenarioReporter(as_json=False), options)
    assert links.tape[-1] == ("healed", {})
    assert figures[-1].name == GOES_ON
    assert figures[-1].value is not None
    assert capsys.readouterr().out


def test_the_processes_of_a_run_are_found_by_role(tmp_path):
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
            send(process.pid, signal.SIGCONT)  # Ignores processes that have ended.
    finally:
        for process in find(launcher.pid):
            kill(process)
        launcher.kill()
        launcher.wait()
        launcher.stdout.close()
    assert find(launcher.pid) == []


@pytest.mark.parametrize("is_its_own", [True, False])
def test_memory_excludes_mappings_of_shared_files(tmp_path, monkeypatch, is_its_own):
    num_bytes = 32 * 2**20
    if not is_its_own:
        monkeypatch.setattr(processes, "NOT_ITS_OWN", (*processes.NOT_ITS_OWN, str(tmp_path)))
    me = [Process(os.getpid(), os.getppid(), "actor", False)]
    (tmp_path / "a file").write_bytes(bytes(num_bytes))
    with (tmp_path / "a file").open("r+b") as file, mmap.mmap(file.fileno(), num_bytes) as memory:
        before = footprints(me)["actor"].memory_bytes
        for begin in range(0, num_bytes, 2**20):  # in pieces, which the allocator returns to the system
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


def test_growth_is_relative_to_the_first_measurement():
    middle = {"actor": Footprint(1_000, 10, 2), "replay": Footprint(2_000, 20, 1)}
    end = {"actor": Footprint(1_005, 10, 2), "replay": Footprint(2_100, 21, 1)}
    rows = {figure.name: (figure.value, figure.reached) for figure in growth_figures(middle, end, "at last")}
    assert rows["actor: growth at last"] == (pytest.approx(0.5), True)
    assert rows["actor: more descriptors"] == (0, True)
    assert rows["replay: growth at last"] == (pytest.approx(5.0), False)
    assert rows["replay: more descriptors"] == (1, False)
    assert rows["all roles: growth at last"] == (pytest.approx(3.5), False)


def test_a_role_that_is_missing_misses_its_bars():
    held = {"actor": Footprint(1_000, 10, 2), "replay": Footprint(2_000, 20, 1)}
    for middle, end in ((held, {"actor": held["actor"]}), ({"actor": held["actor"]}, held)):
        rows = {figure.name: (figure.value, figure.reached) for figure in growth_figures(middle, end, "at last")}
        assert rows["actor: growth at last"] == (0.0, True)
        for name in ("replay: growth at last", "replay: more descriptors", "all roles: growth at last"):
            assert rows[name] == (None, False)


@pytest.mark.parametrize("settles", [True, False])
def test_footprints_are_read_once_the_descriptors_are_constant(monkeypatch, settles):
    """Descriptors are opened for half a second, or forever; the second case ends at the time limit."""
    run, began, looks = SimpleNamespace(wait=time.sleep, processes=list), time.monotonic(), []

    def look(processes):
        looks.append(len(looks) if not settles or time.monotonic() < began + 0.5 else 1_000)
        return {"actor": Footprint(1, looks[-1], 1)}

    for name, value in (("footprints", look), ("SAMPLES", 3), ("SAMPLE_SECONDS", 0.01)):
        monkeypatch.setattr(growth, name, value)
    held = growth.settled_footprints(run, 0.2)["actor"].num_files
    assert held == (1_000 if settles else looks[-2])  # The median of the last three.
    assert time.monotonic() - began > (0.7 if settles else 1.0)
