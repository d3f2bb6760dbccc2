"""Applies faults to a run, and measures the time to recovery."""

import random
import signal
import time
from collections.abc import Callable
from typing import NamedTuple

from apexreplay.errors import UsageError
from apexreplay.store.location import MEMORY
from chaos import neighbours
from chaos.faults import BESIDE, ROUND_TRIP_SECONDS, STORM_KILLS, STORM_SECONDS, Fault, make_garbage
from chaos.processes import Process, kill, maps_memory, send
from chaos.proxy import Proxy
from chaos.run import ChaosRun

# time after which a run counts as stuck; on a busy machine a program needs a minute to start again
LIMIT_SECONDS = 180.0
VICTIM_SECONDS = 30.0  # time for a victim that is restarting to appear; without one, nothing is killed
CHECK_BITS = 2  # bits that are flipped in open connections with each cut


class Recovery(NamedTuple):
    """Result of a kill."""

    victim: str
    seconds: float | None  # seconds until the victim's work was seen again; None: not within the time limit


def name_of(target: str) -> str:
    """Returns the name under which kills of a target count: loaders separately, other children with their role."""
    role, _, child = target.partition("'s ")
    return child if child == "loader" else role


class FaultInjector:
    """Applies faults, one or several at a time, and ends them."""

    def __init__(self, run: ChaosRun, proxy: Proxy, seed: int) -> None:
        self._run = run
        self._proxy = proxy
        self._random = random.Random(seed)
        self._later: list[tuple[float, Callable[[], None]]] = []
        self.kills: dict[str, int] = {}
        self.failed_neighbours = 0  # second runs that did not reach their end

    def do(self, fault: Fault) -> None:
        """Begins a fault; `tick` ends it."""
        run, target, ends_at = self._run, fault.target, time.monotonic() + fault.seconds
        match fault.kind:
            case "kill" | "pair":
                for victim in target.split(" + "):
                    self._kill_when_there(victim)
            case "hangup":
                for process in self._find(target):
                    send(process.pid, signal.SIGHUP)
            case "storm":
                for number in range(STORM_KILLS):
                    at = time.monotonic() + number * STORM_SECONDS
                    self._later.append((at, lambda: self._kill_again(target)))
            case "stop":
                self._stop(target, ends_at)
            case "cut":
                silent = self._random.random() < 0.5
                self._proxy.set(target, is_cut=not silent, is_silent=silent, bits_to_turn=CHECK_BITS)
                self._later.append((ends_at, lambda: self._mend(target)))
            case "delay":
                self._proxy.set(target, delay=ROUND_TRIP_SECONDS / 2)
                self._later.append((ends_at, lambda: self._mend(target)))
            case "clock":
                run.set_clock(fault.seconds)
            case "neighbour":
                self.start_and_end_a_second_run(while_killed=target == BESIDE[1])
            case "plant":
                planted = neighbours.plant(MEMORY, run.run_id)
                self._later.append((ends_at, lambda: neighbours.clear(planted)))
            case _:
                self._proxy.throw_garbage(make_garbage(self._random.randrange(2**32)))

    def _stop(self, target: str, ends_at: float) -> None:
        """Stops a role with its children, or one of its children."""
        stopped = self._find(target)
        if "'" not in target and target != "launcher":  # All other programs are children of the launcher.
            stopped = [process for process in self._run.processes() if process.role == target]
        for process in stopped:
            send(process.pid, signal.SIGSTOP)
            self._later.append((ends_at, lambda pid=process.pid: send(pid, signal.SIGCONT)))  # type: ignore[misc]

    def start_and_end_a_second_run(self, *, while_killed: bool) -> None:
        """Returns after the end of the second run. `while_killed`: the run is killed before, and not yet resumed."""
        if while_killed:
            self.kill("launcher")
        with neighbours.second_run(self._run.folder) as second:
            deadline = time.monotonic() + LIMIT_SECONDS
            while second.poll() is None and time.monotonic() < deadline:
                self._run.tick(may_resume=not while_killed)
                self.tick()
        self.failed_neighbours += second.returncode != 0

    def tick(self) -> None:
        """Ends faults, and restarts processes, that are due."""
        now = time.monotonic()
        due = [act for at, act in self._later if at <= now]
        self._later = [(at, act) for at, act in self._later if at > now]
        for act in due:
            act()

    def wait(self, seconds: float) -> None:
        """Lets the run continue for this time, under the present faults."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._run.tick()
            self.tick()

    def end(self) -> None:
        """Ends all faults now."""
        due, self._later = self._later, []
        for _, act in due:
            act()

    @property
    def busy(self) -> bool:
        """Returns whether a fault is still active."""
        return bool(self._later)

    def kill(self, target: str) -> bool:
        """Kills a role's program, one of its children or loaders with SIGKILL; returns False if there is none at
        present.
        """
        candidates = self._find(target)
        if not candidates:
            return False
        victim: Process = self._random.choice(candidates)
        kill(victim)
        self.kills[name_of(target)] = self.kills.get(name_of(target), 0) + 1
        return True

    def _find(self, target: str) -> list[Process]:
        """Returns the program of a role, or all of its children that the target names."""
        role, _, child = target.partition("'s ")
        found = [process for process in self._run.processes() if process.role == role]
        found = [process for process in found if process.is_child == bool(child)]
        if child in ("loader", "coordinator"):  # Of the learner's children, only loaders map the replay memory.
            found = [process for process in found if maps_memory(process.pid) == (child == "loader")]
        return found

    def kill_and_wait(self, target: str, limit_seconds: float = LIMIT_SECONDS) -> Recovery:
        """Kills, and waits until the victim works again: an insert, an update, or an accepted new incarnation."""
        if not self._run.wait(LIMIT_SECONDS, lambda: self.kill(target)):
            raise UsageError(f"there is no {target} to kill for {LIMIT_SECONDS:g} s")
        began = time.monotonic()
        self._run.tick()  # Messages on the way have arrived.
        back = self._watch(target.partition("'")[0])

        def again() -> bool:
            self._run.read()
            return back()

        came = self._run.wait(limit_seconds, again)
        return Recovery(target, time.monotonic() - began if came else None)

    def _watch(self, role: str) -> Callable[[], bool]:
        run = self._run
        run.read()
        if role == "replay":
            stored = run.num_stored
            return lambda: run.num_stored > stored
        if role == "learner":
            began, first = time.monotonic(), [-1]

            def updates() -> bool:
                if run.status is None or run.status_at < began or not run.status.updates:
                    return False
                if first[0] < 0:
                    first[0] = run.status.updates
                return run.status.updates > first[0]

            return updates
        newest = run.newest_incarnation
        return lambda: run.newest_incarnation > newest

    def _kill_when_there(self, target: str) -> None:
        until = time.monotonic() + VICTIM_SECONDS
        while not self.kill(target) and time.monotonic() < until:
            self._run.tick()
            self.tick()

    def _kill_again(self, target: str) -> None:
        self.kill(target)

    def _mend(self, pair: str) -> None:
        self._proxy.set(pair, delay=0.0, is_cut=False, is_silent=False, bits_to_turn=0)
