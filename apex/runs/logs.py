"""`apex logs`: prints the logs of a run's programs, merged by time, and follows them until the run ends."""

import os
import select
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from heapq import merge
from itertools import cycle
from operator import itemgetter
from pathlib import Path

from rich.console import Console

from apex.config.arguments import Parser, reader_may_leave
from apex.config.validation import did_you_mean
from apex.runs.folder import open_run
from apex.runs.lock import is_held
from apex.runtime.logs import time_of
from apex.types import PROGRAMS
from apexreplay.errors import FINISHED, require
from apexreplay.process.lifecycle import POLL_SECONDS, Stop, reports_errors, sleep, stop_on_signals
from apexreplay.process.text import clean

COLORS = ("cyan", "green", "magenta", "blue", "yellow", "bright_cyan", "bright_green", "bright_magenta")
MAX_LINES = 1_000  # lines of an entry that are kept back until they are complete
WIDTH = 11  # of the names of programs: tensorboard

Entry = tuple[float, str, list[str]]  # time, program, and lines: one with the time, and those without that follow it


class LogReader:
    """Reads the entries of one log in their order."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._time = 0.0
        self._lines: list[str] = []  # the entry that may not be complete

    def read(self, *, whole: bool) -> Iterator[Entry]:
        """Yields the new entries. Unless `whole`, the last one is kept back until a call finds no new line."""
        grew, name = False, _name(self._path)
        with suppress(OSError), self._path.open("rb") as file:  # It may have been removed.
            if os.fstat(file.fileno()).st_size < self._offset:
                self._offset = 0
            file.seek(self._offset)
            for data in file:
                if not whole and not data.endswith(b"\n"):
                    break
                grew, self._offset = True, self._offset + len(data)
                time = time_of(data)
                if self._lines and (time is not None or len(self._lines) == MAX_LINES):
                    yield self._time, name, self._lines
                    self._lines = []
                self._time = max(self._time, time or 0.0)  # The clock may have been set back.
                self._lines.append(clean(data.decode(errors="replace").rstrip("\r\n").expandtabs()))
        if self._lines and (whole or not grew):
            yield self._time, name, self._lines
            self._lines = []


@reports_errors("apex logs")
def main(argv: Sequence[str]) -> int:
    """Runs `apex logs`; returns the exit status."""
    parser = Parser(prog="apex logs", description="Prints the logs of a run's programs, merged by time.")
    parser.add_argument("run", nargs="?", metavar="RUN", help="run folder, or name below runs/ (default: the newest)")
    parser.add_argument("--role", metavar="R", help="only this role or program, such as actor, replay or replay-1")
    parser.add_argument("--follow", action="store_true", help="print new lines too, until the run ends or Ctrl-C")
    options = parser.parse_args(argv)
    run, role = open_run(options.run), options.role
    names = {_name(path) for path in _find(run.logs)}
    known = sorted({*names, *map(_role, names), *PROGRAMS})
    problem = f"--role must be one of {', '.join(known)}, got {role!r}"
    require(role is None or role in known, problem, remedy=did_you_mean(role or "", known))
    with stop_on_signals() as stop, reader_may_leave():
        _print(run.logs, role, run.path if options.follow else None, stop)
    return FINISHED


def _print(logs: Path, role: str | None, followed: Path | None, stop: Stop) -> None:
    """Prints the logs. If a run is `followed`, prints new lines until it ends, or until nobody reads them."""
    console, colors, prefixes = Console(highlight=False), cycle(COLORS), dict[str, str]()
    readers: dict[Path, LogReader] = {}
    audience = select.poll()
    audience.register(sys.stdout, 0)  # Without a mask, `poll` returns only that the reader of a pipe has left.
    runs = True
    while runs and not stop.poll() and not audience.poll(0):
        runs = followed is not None and is_held(followed)  # Before the logs are read: no line is lost at the end.
        for path in _find(logs):
            if role in (None, _name(path), _role(_name(path))):
                readers.setdefault(path, LogReader(path))
        for _, name, lines in merge(*(each.read(whole=not runs) for each in readers.values()), key=itemgetter(0)):
            if name not in prefixes:
                with console.capture() as colored:
                    console.print(f"{name:<{WIDTH}} |", style=next(colors), markup=False, end="")
                prefixes[name] = colored.get()
            for line in lines:
                print(prefixes[name], line)
            if stop.poll():
                return
        sys.stdout.flush()
        if runs:
            sleep(POLL_SECONDS, stop)


def _find(folder: Path) -> list[Path]:
    """Returns the logs, rotated ones (actor.log.1) included. A pipe would block the reader."""
    paths = sorted((*folder.glob("*.log"), *folder.glob("*.log.[0-9]*")))
    return [path for path in paths if path.is_file() and path.suffix != ".gz"]


def _name(path: Path) -> str:
    return clean(path.name.partition(".log")[0])


def _role(name: str) -> str:
    """Returns the role of a program: replay-1 -> replay."""
    return name.rstrip("0123456789").removesuffix("-")
