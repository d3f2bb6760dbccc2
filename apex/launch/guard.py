"""Runs the programs of one host for a scheduler: `python -m apex.launch.guard`.

The first line of standard input is the order: what to run, and the keys, so that no secret is on a command line. If the
input ends, the scheduler is gone or has stopped the run. The guard then terminates its programs, and kills those that
do not end in time. The guard restarts a failed program within its crash budget, and copies the lines of the programs'
logs to standard output. If the programs fail, the last line of standard error is the cause.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import select
import shutil
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from io import FileIO
from pathlib import Path
from typing import TextIO

from apex.config import from_dict
from apex.errors import FINISHED, HOPELESS, NEIGHBOUR_GONE, REFUSED, UsageError, require
from apex.launch.terminal.view import LogTail, say
from apex.runs.folder import RunFolder
from apex.runtime.lifecycle import POLL_SECONDS, Stop, complain, log_to, reports_errors, stop_on_signals
from apex.runtime.supervisor import Ending, Program, supervise
from apex.runtime.text import clean
from apex.runtime.watchdog import take_notifier
from apex.transport.curve.key_store import write_private

HANDOVER_SECONDS = 30.0  # time limit for an earlier guard of the same home to end its programs

log = logging.getLogger("apex")


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What to run: one program, or the head of a run, which consists of every program except the actors."""

    name: str  # name of the log file
    home: str  # folder of this guard; the keys are written to home/keys
    keys: dict[str, str]  # file name -> text of the key file
    arguments: tuple[str, ...] = ()  # arguments after `python -m`; empty if this host runs the head
    stuck_seconds: float = 0.0
    crash_budget: float = 0.0
    niceness: int = 0  # above 0: the program leaves CPU time to others
    run: dict[str, object] | None = None  # configuration of the run; None if this host does not run the head
    begun: bool = False  # whether the run has started before, so that its run folder must exist
    cores: int = 0  # number of CPU cores that the head is sized for; 0: all cores of this host
    argv: tuple[str, ...] = ()  # command line of the user, for the run's manifest

    def encode(self) -> str:
        """Returns the order as one line of JSON."""
        return json.dumps(asdict(self)) + "\n"


@reports_errors("apex")
def main() -> int:
    """Reads the order from standard input and runs it; returns the exit status."""
    with stop_on_signals(take_notifier()) as signals:
        source = FileIO(sys.stdin.fileno(), closefd=False)
        try:
            order = Order(**json.loads(source.readline() or b"{}"))
        except (TypeError, ValueError) as error:
            raise UsageError("standard input has no valid order. Only a scheduler can start this module") from error
        try:
            ending = guard(order, Lifeline(sys.stdin.fileno(), signals))
        except OSError as error:
            raise UsageError(str(error)) from error
        if ending.cause and ending.role:
            complain(ending.cause)
        if not ending.role:  # The guard was stopped. The run has not ended.
            return NEIGHBOUR_GONE
        return ending.status if ending.status in (FINISHED, REFUSED, NEIGHBOUR_GONE) else HOPELESS


class Lifeline:
    """Requests `stop` when the scheduler is gone; copies new lines of the logs to standard output."""

    def __init__(self, descriptor: int, signals: Stop) -> None:
        """`descriptor`: file descriptor that the scheduler keeps open.

        `signals`: a Stop that is requested when this process receives a signal to end.
        """
        self.stop = Stop(self._look)
        self.logs: list[LogTail] = []
        self._descriptor = descriptor
        self._signals = signals

    def copy_logs(self) -> None:
        """Prints the new lines of the logs, each with the name of its log."""
        for path, line in [found for tail in self.logs for found in tail.new_lines()]:
            say(f"{path.stem}: {clean(line)}")

    def _look(self) -> None:
        self.copy_logs()
        gone = select.select([self._descriptor], [], [], 0)[0] and not os.read(self._descriptor, 4096)
        if gone or self._signals.poll():
            self.stop.request()


def guard(order: Order, lifeline: Lifeline) -> Ending:
    """Runs the programs of the order until they end or the lifeline requests a stop.

    Raises UsageError if the order cannot be run as configured, and OSError if a folder cannot be used.
    """
    home, stop = Path(order.home), lifeline.stop
    home.mkdir(parents=True, exist_ok=True)
    home.chmod(0o700)
    with (home / "lock").open("a") as lock, log_to(home / "guard.log", "guard"):
        if not _take(lock, stop):
            return Ending(FINISHED, "")
        lifeline.logs.append(LogTail(home))
        _lay_out(home / "keys", order.keys)
        try:
            if order.run is not None:
                return _run_head(order, home / "keys", lifeline)
            program = Program(
                role=order.name,
                command=(sys.executable, "-u", "-P", "-m", *order.arguments),
                grace_seconds=2.0,
                ends_run=True,
                stuck_seconds=order.stuck_seconds,
                crash_budget=order.crash_budget,
                niceness=order.niceness,
            )
            return supervise([program], stop, logs=home, tell=log.warning)
        finally:
            shutil.rmtree(home / "keys", ignore_errors=True)
            lifeline.copy_logs()


def _run_head(order: Order, keys: Path, lifeline: Lifeline) -> Ending:
    """Creates the run, or resumes it if its folder exists, and supervises its programs in this process."""
    from apex.config.sizing import size_to_machine
    from apex.environments.factory import describe  # Imported here because guards of actors do not need it.
    from apex.launch.local import go_on
    from apex.runtime.hardware import read_machine

    config = from_dict(order.run or {})
    path = Path(config.run.folder) / config.run.name
    if not (path / "manifest.json").exists():
        require(
            not order.begun,
            f"the run folder {path} is not on this host: the head has moved to another host. "
            "Set --run.folder to a folder that all hosts share",
        )
        machine = read_machine()
        schema = describe(config.environment, config.actor.n_step)
        sized = size_to_machine(config, replace(machine, cores=order.cores or machine.cores), schema)
        RunFolder.create(sized, schema, argv=order.argv)
    (path / "logs").mkdir(exist_ok=True)
    lifeline.logs.append(LogTail(path / "logs"))
    here = ("--transport.keys", str(keys), "--transport.bind", config.transport.bind)
    with open(os.devnull, "w") as nowhere:
        outcome = go_on(str(path), here, lifeline.stop, out=nowhere)
    return Ending(FINISHED, "") if outcome is None else outcome.ending


def _take(lock: TextIO, stop: Stop) -> bool:
    """Locks this guard's home. Waits while an earlier guard, which still holds the lock, stops its programs.

    Returns False if a stop is requested during the wait. Raises UsageError after `HANDOVER_SECONDS`.
    """
    deadline = time.monotonic() + HANDOVER_SECONDS
    while not stop.poll():
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        require(time.monotonic() < deadline, f"another guard still holds {lock.name}: its programs have not ended")
        time.sleep(POLL_SECONDS)
    return False


def _lay_out(folder: Path, files: dict[str, str]) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # A guard that was killed may have left files.
    folder.mkdir(mode=0o700)
    for name, text in files.items():
        write_private(folder / Path(name).name, text)


if __name__ == "__main__":
    sys.exit(main())
