"""What a person sees of a run: a picture that is redrawn once a second, or plain lines where there is no terminal."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO, cast

from rich.console import Console
from rich.live import Live

from apex.config.arguments import reader_may_leave
from apex.launch.terminal.dashboard import History, plain_line, render
from apex.transport.messages.run_status import RunStatus

MAX_ROWS = 1_000  # of a picture that may scroll
PLAIN_SECONDS = 10.0  # between two plain lines
WARNING = re.compile(r"\S+ \S+ (WARNING|ERROR|CRITICAL) ")  # time, role, level: see `configure_logging`


@contextmanager
def open_view(stream: TextIO) -> Iterator[View]:
    """A live picture when `stream` is a terminal that can show one, else plain lines."""
    console = Console(file=cast(TextIO, _LastingStream(stream)), highlight=False)
    if not stream.isatty() or console.is_dumb_terminal:
        yield PlainView(stream)
        return
    # The alternate screen is what survives a resize; nothing of it stays behind.
    with Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live:
        yield LiveView(console, live)


class LiveView:
    """Redraws the whole screen."""

    def __init__(self, console: Console, live: Live) -> None:
        self._console = console
        self._live = live

    def show(self, status: RunStatus | None, history: History) -> None:
        """Draws the newest status at the terminal's present size."""
        width, height = self._console.size
        picture = render(status, width, height, history, ascii_only=self._console.options.ascii_only)
        self._live.update(picture, refresh=True)

    def note(self, sentence: str) -> None:
        """Nothing: the picture shows the newest sentences of the history."""


class PlainView:
    """Prints a line every 10 s, at each change of phase, and for each sentence."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._phase: str | None = None
        self._next = 0.0

    def show(self, status: RunStatus | None, history: History) -> None:
        """Prints the newest status if its time has come."""
        now = self._clock()
        if status is None or (status.phase == self._phase and now < self._next):
            return
        self._phase, self._next = status.phase, now + PLAIN_SECONDS
        say(plain_line(status), self._stream)

    def note(self, sentence: str) -> None:
        """Prints the sentence."""
        say(sentence, self._stream)


View = LiveView | PlainView


def show_once(status: RunStatus, stream: TextIO | None = None) -> None:
    """Prints the picture where it is, as long as it is."""
    console = Console(file=stream or sys.stdout, highlight=False)
    console.print(render(status, console.width, MAX_ROWS, History(), ascii_only=console.options.ascii_only))


def say(line: str, stream: TextIO | None = None) -> None:
    """Prints a line. When its reader is gone (`apex train | head`) the run goes on in silence."""
    stream = stream or sys.stdout
    encoding = stream.encoding or "utf-8"
    _LastingStream(stream).write(line.encode(encoding, "replace").decode(encoding) + "\n")


class _LastingStream:
    """A stream whose writes never fail: a closed terminal or a full disk does not end the run."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> None:
        """Writes and flushes the text if that is possible."""
        with suppress(OSError), reader_may_leave(self._stream):
            self._stream.write(text)

    def flush(self) -> None:
        """Does nothing: `write` flushes."""


class LogTail:
    """Finds new warnings in the logs of a folder: not those of the run's earlier lives, which are there already."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        for path in folder.glob("*.log"):
            with suppress(OSError):  # Removed since.
                self._offsets[path] = path.stat().st_size

    def warnings(self) -> list[str]:
        """Lines of a warning or worse that were finished since the last call."""
        return [line for _, line in self.new_lines() if WARNING.match(line)]

    def new_lines(self) -> list[tuple[Path, str]]:
        """Every line that was finished since the last call, with its log."""
        found: list[tuple[Path, str]] = []
        for path in sorted(self._folder.glob("*.log")):
            try:
                with path.open("rb") as file:
                    file.seek(self._offsets.get(path, 0))
                    finished, newline, _ = file.read().rpartition(b"\n")
            except OSError:  # Removed since, or this process has too many files open: the next look finds it.
                continue
            self._offsets[path] = self._offsets.get(path, 0) + len(finished) + len(newline)
            found += [(path, line) for line in finished.decode(errors="replace").splitlines()]
        return found
