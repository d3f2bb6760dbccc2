"""Logs: each program writes NAME.log for people, and NAME.jsonl with its warnings and errors for the live view."""

import faulthandler
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import copy
from datetime import datetime
from pathlib import Path

import msgspec

from apex.facts import LogEntry
from apex.sentences import describe
from apexreplay.facts import Record, Waiting
from apexreplay.process.lifecycle import complain

ENTRIES = "APEX_LOG_ENTRIES"  # environment variable by which a launcher passes the path of a program's entries

TIME_LENGTH = len("2026-01-02T03:04:05.678+00:00")

LOGGERS = [logging.getLogger(name) for name in ("apex", "apexreplay")]  # of this package and of the replay library


class RoleFormatter(logging.Formatter):
    """Formats log lines as time, role, level and message; a record of `apex.facts` becomes its sentence."""

    def __init__(self, role: str = "") -> None:
        super().__init__(f"%(asctime)s {role} %(levelname)s %(message)s" if role else "%(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802 - of logging
        """Returns the time with its date and zone, because a run can be resumed on another day or host."""
        return datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")

    def format(self, record: logging.LogRecord) -> str:
        """Returns the log line."""
        return super().format(_as_sentence(record))


if logging.lastResort is not None:  # prints the waits of a command that has no log yet
    logging.lastResort.setFormatter(RoleFormatter())


def time_of(line: bytes) -> float | None:
    """Returns the time at the beginning of a line of a log, in seconds since 1970; None if there is none."""
    time = line.partition(b" ")[0]
    with suppress(ValueError):
        return datetime.fromisoformat(time.decode("ascii")).timestamp() if len(time) == TIME_LENGTH else None
    return None


class EntryHandler(logging.Handler):
    """Appends each warning and error to a file, as a line of JSON. A failed write is ignored."""

    def __init__(self, path: Path, role: str) -> None:
        super().__init__(logging.WARNING)
        self._path = path
        self._role = role

    def emit(self, record: logging.LogRecord) -> None:
        """Appends the entry in one write, so that processes that share the file do not mix their lines."""
        waiting: object = record.msg
        try:
            message = _as_sentence(record).getMessage()
        except Exception:  # The arguments do not fit: this must not become an error of the environment that logs.
            self.handleError(record)
            return
        entry = LogEntry(
            time=record.created,
            role=self._role,
            level=record.levelname,
            message=message,
            waiting=waiting if isinstance(waiting, Waiting) else None,
        )
        with suppress(OSError, UnicodeEncodeError), self._path.open("ab", buffering=0) as file:
            file.write(msgspec.json.encode(entry) + b"\n")


def _as_sentence(record: logging.LogRecord) -> logging.LogRecord:
    message: object = record.msg
    if isinstance(message, Record):
        record = copy(record)
        record.msg = describe(message)
    return record


def configure_logging(role: str) -> None:
    """Logs time, role, level and message to standard error, and all stack traces if a fatal signal ends the process.

    If a launcher has started this program, warnings and errors are also written to the file of its entries.
    """
    logging.raiseExceptions = False  # A failed write to the log must not stop the process.
    faulthandler.enable(sys.__stderr__ or sys.stderr)  # logs stack traces when SIGABRT ends a stuck process
    lines = logging.StreamHandler(sys.stderr)
    lines.setFormatter(RoleFormatter(role))
    path = os.environ.pop(ENTRIES, "")
    entries = [EntryHandler(Path(path), role)] if path else []
    logging.basicConfig(level=logging.INFO, handlers=[lines, *entries], force=True)


@contextmanager
def log_to(path: Path, role: str = "launcher") -> Iterator[None]:
    """Writes this process's log and entries to files during the context, because the live view uses the terminal."""
    raises, levels = logging.raiseExceptions, [log.level for log in LOGGERS]
    logging.raiseExceptions = False  # Otherwise, on a full disk, each log line prints an error on the terminal.
    lines: logging.Handler
    try:
        lines = logging.FileHandler(path)
    except OSError as error:
        complain(f"cannot write {path}: {error.strerror}; the {role} continues without a log")
        lines = logging.NullHandler()
    lines.setFormatter(RoleFormatter(role))
    entries = EntryHandler(path.with_suffix(".jsonl"), role)
    for log in LOGGERS:
        log.addHandler(lines)
        log.addHandler(entries)
        log.setLevel(logging.INFO)
    try:
        yield
    finally:
        for log, level in zip(LOGGERS, levels, strict=True):
            log.removeHandler(lines)
            log.removeHandler(entries)
            log.setLevel(level)
        with suppress(OSError):  # Closing writes the remaining lines, which can fail.
            lines.close()
        logging.raiseExceptions = raises


class LogTail:
    """Reads the new lines of all logs in a folder. Lines written before this object was created are skipped."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        for path in (*folder.glob("*.log"), *folder.glob("*.jsonl")):
            with suppress(OSError):  # The log has been removed since.
                self._offsets[path] = path.stat().st_size

    def entries(self) -> list[tuple[str, LogEntry]]:
        """Returns the warnings and errors since the last call, each with the name of its log."""
        found = []
        for path, line in self._new_lines("*.jsonl"):
            with suppress(msgspec.DecodeError):  # A line that was cut short, by a full disk or a killed program.
                found.append((path.stem, msgspec.json.decode(line, type=LogEntry)))
        return found

    def lines(self) -> list[tuple[str, str]]:
        """Returns every complete line since the last call, with the name of its log."""
        return [(path.stem, line.decode(errors="replace")) for path, line in self._new_lines("*.log")]

    def _new_lines(self, pattern: str) -> Iterator[tuple[Path, bytes]]:
        for path in sorted(self._folder.glob(pattern)):
            try:
                with path.open("rb") as file:
                    file.seek(self._offsets.get(path, 0))
                    finished, newline, _ = file.read().rpartition(b"\n")
            except OSError:  # The log was removed, or this process has too many open files: try again next time.
                continue
            self._offsets[path] = self._offsets.get(path, 0) + len(finished) + len(newline)
            for line in finished.splitlines():
                yield path, line
