"""`apex logs`: prints the logs of a run's programs, merged by time, and follows them until the run ends."""

import os
import select
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from heapq import merge
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from apex.config.arguments import Parser, reader_may_leave
from apex.config.validation import did_you_mean
from apex.runs.folder import open_run
from apex.runs.lock import is_held
from apex.runtime.logs import time_of
from apex.types import Role
from apexreplay.errors import FINISHED, require
from apexreplay.process.lifecycle import POLL_SECONDS, Stop, reports_errors, sleep, stop_on_signals
from apexreplay.process.text import clean

COLORS = ("cyan", "green", "magenta", "blue", "yellow", "bright_cyan", "bright_green", "bright_magenta")
MAX_LINES = 1_000  # lines of an entry that are kept back until they are complete
WIDTH = 11  # of the names of programs: tensorboard


class Entry(NamedTuple):
    """A line that begins with a time, and the lines without one that follow it, such as a traceback."""

    time: float  # in seconds since 1970; 0 before the first time of a log
    name: str  # of the program's log
    lines: list[str]


class LogReader:
    """Reads the entries of one log file in their order, across a rotation or truncation of the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name.partition(".log")[0]
        self._offset = 0
        self._time = 0.0
        self._lines: list[str] = []  # the entry that may not be complete

    def read(self, *, whole: bool) -> Iterator[Entry]:
        """Yields the new entries. Unless `whole`, the last one is kept back until a call finds no new line."""
        grew = False
        with suppress(OSError), self.path.open("rb") as file:  # It may have been removed.
            if os.fstat(file.fileno()).st_size < self._offset:
                self._offset = 0
            file.seek(self._offset)
            for data in file:
                if not whole and not data.endswith(b"\n"):
                    break
                grew, self._offset = True, self._offset + len(data)
                time = time_of(data)
                if self._lines and (time is not None or len(self._lines) == MAX_LINES):
                    yield self._take()
                self._time = max(self._time, time or 0.0)  # The clock may have been set back.
                self._lines.append(clean(data.decode(errors="replace").rstrip("\r\n").expandtabs()))
        if self._lines and (whole or not grew):
            yield self._take()

    def _take(self) -> Entry:
        lines, self._lines = self._lines, []
        return Entry(self._time, self.name, lines)


class RunLogs:
    """The logs of a run, of all roles or of one."""

    def __init__(self, folder: Path, role: str | None) -> None:
        self._folder = folder
        self._role = role
        self._readers: dict[tuple[int, int], LogReader] = {}  # by device and inode, which a rotation keeps

    def read(self, *, whole: bool) -> Iterator[Entry]:
        """Yields the new entries of all logs by time. `whole`: see `LogReader.read`."""
        for path in sorted((*self._folder.glob("*.log"), *self._folder.glob("*.log.[0-9]*"))):
            with suppress(OSError):  # The log has been removed since.
                found = path.stat()
                if path.is_file() and path.suffix != ".gz":  # A pipe would block the reader.
                    self._readers.setdefault((found.st_dev, found.st_ino), LogReader(path)).path = path
        chosen = [each for each in self._readers.values() if self._role in (None, each.name, _role_of(each.name))]
        return merge(*(each.read(whole=whole) for each in chosen), key=lambda entry: entry.time)

    def require_role(self) -> None:
        """Raises UsageError if the run has neither the role nor a log of this name."""
        names = {path.name.partition(".log")[0] for path in self._folder.glob("*.log*")}
        known = sorted({*names, *map(_role_of, names), *Role} - {Role.OBSERVER})
        problem = f"--role must be one of {', '.join(known)}, got {self._role!r}"
        require(self._role is None or self._role in known, problem, remedy=did_you_mean(self._role or "", known))


@reports_errors("apex logs")
def main(argv: Sequence[str]) -> int:
    """Runs `apex logs`; returns the exit status."""
    parser = Parser(prog="apex logs", description="Prints the logs of a run's programs, merged by time.")
    parser.add_argument("run", nargs="?", metavar="RUN", help="run folder, or name below runs/ (default: the newest)")
    role = "only the logs of this role or program, such as actor, replay or replay-1"
    parser.add_argument("--role", metavar="R", help=role)
    parser.add_argument("--follow", action="store_true", help="print new lines too, until the run ends or Ctrl-C")
    options = parser.parse_args(argv)
    run = open_run(options.run)
    logs = RunLogs(run.logs, options.role)
    logs.require_role()
    with stop_on_signals() as stop, reader_may_leave():
        _print(logs, run.path if options.follow else None, stop)
    return FINISHED


def _print(logs: RunLogs, followed: Path | None, stop: Stop) -> None:
    """Prints the logs. If a run is `followed`, prints new lines until it ends, or until nobody reads them."""
    console, prefixes = Console(highlight=False), dict[str, str]()
    reader = select.poll()
    reader.register(sys.stdout, 0)  # Without a mask, `poll` returns only that the reader of a pipe has left.
    runs = True
    while runs and not stop.poll() and not reader.poll(0):
        runs = followed is not None and is_held(followed)  # Before the logs are read: no line is lost at the end.
        for entry in logs.read(whole=not runs):
            if entry.name not in prefixes:
                with console.capture() as colored:
                    console.print(f"{entry.name:<{WIDTH}} |", style=COLORS[len(prefixes) % len(COLORS)], end="")
                prefixes[entry.name] = colored.get()
            for line in entry.lines:
                print(prefixes[entry.name], line)
            if stop.poll():
                return
        sys.stdout.flush()
        if runs:
            sleep(POLL_SECONDS, stop)


def _role_of(name: str) -> str:
    """Returns the role of a program: replay-1 -> replay."""
    role, dash, number = name.rpartition("-")
    return role if dash and number.isdigit() else name
