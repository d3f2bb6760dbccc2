"""Runs the programs of one host for a scheduler: `python -m apex.launch.guard`.

The first line of standard input is the order: what to run, and the keys, so that no secret is on a command line. If the
input ends, the scheduler is gone or has stopped the run. The guard then terminates its programs, and kills those that
do not end in time. Standard output has one report a line: the lines of the programs' logs, and at last the ending.
"""

import fcntl
import json
import logging
import os
import select
import shutil
import sys
import time
from contextlib import suppress
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import TextIO

from apex.config import Config, flatten, from_dict
from apex.environments.foreign import require_trust
from apex.environments.inspection import Inspector
from apex.errors import StoppedError
from apex.facts import Ending, Failure
from apex.launch.mirroring import TRY_SECONDS, bring_back
from apex.launch.programs import PYTHON
from apex.launch.ray.order import Order, Report
from apex.launch.resume import LIMITS, reached_limit, reopen
from apex.launch.start import Start
from apex.launch.train import execute
from apex.runs.folder import RunFolder
from apex.runtime.hardware import read_machine
from apex.runtime.logs import LogTail, log_to
from apex.runtime.supervisor import Program, supervise
from apex.sizing import size_to_machine
from apex.types import Role
from apexreplay.errors import FINISHED, NEIGHBOUR_GONE, REFUSED, ApexError, UsageError, require
from apexreplay.process.lifecycle import POLL_SECONDS, Stop, reports_errors, stop_on_signals
from apexreplay.process.text import clean
from apexreplay.process.watchdog import take_notifier
from apexreplay.transport.curve.key_store import write_private

HANDOVER_SECONDS = 30.0  # time limit for an earlier guard of the same home to end its programs, without a mirror

log = logging.getLogger("apex")


@reports_errors("apex")
def main() -> int:
    """Reads the order from standard input and runs it; returns the exit status."""
    reports = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # What a library prints must not be read as a report.
    with stop_on_signals(take_notifier()) as signals:
        source = FileIO(sys.stdin.fileno(), closefd=False)
        try:
            order = Order(**json.loads(source.readline() or b"{}"))
        except (TypeError, ValueError) as error:
            raise UsageError("standard input has no valid order", "only a scheduler can start this module") from error
        try:
            ending = guard(order, Lifeline(sys.stdin.fileno(), reports, signals))
        except StoppedError:
            ending = Ending(FINISHED)
        except (ApexError, OSError) as error:
            status = error.exit_status if isinstance(error, ApexError) else REFUSED
            ending = Ending(status, order.name, Failure(role=order.name, kind="error", detail=str(error)))
        with suppress(OSError):  # The scheduler is gone.
            reports.write(Report(ending=ending).encode())
        return ending.status if ending.role else NEIGHBOUR_GONE  # The guard was stopped. The run has not ended.


class Lifeline:
    """Requests `stop` when the scheduler is gone; sends reports to it."""

    def __init__(self, descriptor: int, reports: TextIO, signals: Stop) -> None:
        """`descriptor`: file descriptor that the scheduler keeps open.

        `signals`: a Stop that is requested when this process receives a signal to end.
        """
        self.stop = Stop(self._check)
        self.logs: list[LogTail] = []
        self.config_file: Path | None = None  # of the run, if this host runs its head
        self._config = ""  # the last reported configuration
        self._descriptor = descriptor
        self._reports = reports
        self._signals = signals

    def report(self) -> None:
        """Reports the new lines and entries of the logs, and the run's configuration if it is new."""
        with suppress(OSError):  # The scheduler is gone, or there is no run folder yet.
            for tail in self.logs:
                reports = [Report(log=name, line=clean(line)) for name, line in tail.lines()]
                reports += [Report(log=name, entry=entry) for name, entry in tail.entries()]
                for report in reports:
                    self._reports.write(report.encode())
            if self.config_file is not None and (text := self.config_file.read_text()) != self._config:
                self._config = text
                self._reports.write(Report(config_toml=text).encode())

    def _check(self) -> None:
        self.report()
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
        mirrors = order.run is not None and bool(from_dict(order.run).run.mirror)
        if not _take(lock, stop, HANDOVER_SECONDS + (TRY_SECONDS if mirrors else 0.0)):
            return Ending(FINISHED)
        lifeline.logs.append(LogTail(home))
        _write_keys(home / "keys", order.keys)
        try:
            if order.run is not None:
                return _run_head(order, home / "keys", lifeline)
            program = Program(
                role=order.name,
                command=(*PYTHON, *order.arguments),
                grace_seconds=2.0,
                ends_run=True,
                stuck_seconds=order.stuck_seconds,
                crash_budget=0.0,  # The driver has the budget, and orders the program again.
            )
            return supervise([program], stop, logs=home)
        finally:
            shutil.rmtree(home / "keys", ignore_errors=True)
            lifeline.report()


def _run_head(order: Order, keys: Path, lifeline: Lifeline) -> Ending:
    """Starts the run, or resumes it if its folder exists, and supervises its programs in this process."""
    config, inspector = from_dict(order.run or {}), Inspector(lifeline.stop)
    require_trust(config, given=True)  # The scheduler is a program of the same user.
    path = Path(config.run.folder) / config.run.name
    config = replace(config, transport=replace(config.transport, keys=str(keys)))
    lifeline.config_file = path / "config.toml"

    def check(folder: RunFolder, is_over: bool = False) -> None:
        if order.continues and not order.begun:  # The driver has no settings of a start to compare with.
            _require_first_limits(folder, config)

    is_restored = bool(config.run.mirror) and order.continues and bring_back(config.run, lifeline.stop, check)
    if (path / "manifest.json").exists():
        here = ("--transport.keys", str(keys), "--transport.bind", config.transport.bind)
        check(folder := RunFolder.open(path))
        if order.continues and reached_limit(folder, folder.config) is not None:
            return Ending(FINISHED, Role.LEARNER)  # The run is over.
        asked, (_, config) = config, reopen(str(path), here, inspector=inspector)
        _log_kept(config, asked)
        restored_from = config.run.mirror if is_restored else ""
        start = Start(
            config=config,
            argv=here,
            folder=path,
            accept_changes=is_restored,
            restored_from=restored_from,
            inspector=inspector,
        )
    else:
        require(
            not order.begun,
            f"the run folder {path} is not on this host: the head has moved to another host",
            remedy="set --run.mirror, or --run.folder to a folder that all hosts share",
        )
        machine = read_machine()
        machine = replace(machine, cores=order.cores or machine.cores)
        sized = size_to_machine(config, machine, inspector.schema(config))
        start = Start(config=sized.config, argv=order.argv, inspector=inspector)
    # The driver, and the next guard, wait less than a learner may take to save.
    start = replace(start, edit_programs=lambda programs: [replace(each, saving_seconds=0.0) for each in programs])
    lifeline.logs.append(LogTail(path / "logs"))
    with open(os.devnull, "w") as nowhere:
        outcome = execute(start, lifeline.stop, nowhere)
    return Ending(FINISHED) if outcome is None else outcome.ending


def _require_first_limits(folder: RunFolder, config: Config) -> None:
    """Raises UsageError if a driver on another host asks for other limits than those of the run, which stay."""
    given, saved = flatten(config), flatten(folder.config)
    differing = [name for name in LIMITS.values() if given[name] != saved[name]]
    changes = ", ".join(f"{name} {saved[name]!r} -> {given[name]!r}" for name in differing)
    problem = f"{folder.path} was begun with other limits: {changes}"
    require(not differing, problem, remedy="type the first command again")


def _log_kept(config: Config, asked: Config) -> None:
    """Logs the settings of the run that differ from what a driver asks for.

    Sizes of 0 and "auto" are chosen by each host, as are addresses, folders and actors.
    """
    given, kept = flatten(asked), flatten(config)
    own = ("transport.", "run.", "actor.num_", "actor.envs_")
    differing = [name for name in given if given[name] not in (kept[name], 0, "auto") and not name.startswith(own)]
    if differing:
        settings = ", ".join(f"{name} {kept[name]!r}" for name in differing)
        log.warning("the run keeps the settings with which it began: %s", settings)


def _take(lock: TextIO, stop: Stop, seconds: float) -> bool:
    """Locks this guard's home. Waits while an earlier guard, which still holds the lock, stops its programs.

    Returns False if a stop is requested during the wait. Raises UsageError after so many seconds.
    """
    deadline = time.monotonic() + seconds
    while not stop.poll():
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        require(time.monotonic() < deadline, f"another guard still holds {lock.name}: its programs have not ended")
        time.sleep(POLL_SECONDS)
    return False


def _write_keys(folder: Path, files: dict[str, str]) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # A guard that was killed may have left files.
    folder.mkdir(mode=0o700)
    for name, text in files.items():
        write_private(folder / Path(name).name, text)


if __name__ == "__main__":
    sys.exit(main())
