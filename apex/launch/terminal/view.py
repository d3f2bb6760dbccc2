"""Shows a run to its user: a dashboard redrawn once a second, one line in a notebook cell, or plain lines."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from rich.console import Console
from rich.live import Live

from apex.config.arguments import reader_may_leave
from apex.facts import Cause
from apex.launch.terminal.dashboard import History, plain_line, render
from apex.sentences import advise, describe_bottleneck
from apex.transport.messages.run_status import RunStatus

MAX_ROWS = 1_000  # maximum height of a dashboard that is printed once and may scroll
PLAIN_SECONDS = 10.0  # interval between two plain lines


@contextmanager
def open_view(stream: TextIO) -> Iterator[View]:
    """Yields a live dashboard if `stream` is a terminal that can show one, else a view of lines."""
    console = Console(file=cast(TextIO, _LastingStream(stream)), highlight=False)
    if not stream.isatty() or console.is_dumb_terminal:
        yield line_view(stream)
        return
    # `screen` selects the alternate screen, which survives a resize and leaves nothing in the terminal.
    with Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live:
        yield LiveView(console, live)


class LiveView:
    """Redraws the whole screen."""

    def __init__(self, console: Console, live: Live) -> None:
        self._console = console
        self._live = live

    def show(self, status: RunStatus | None, history: History) -> None:
        """Draws the newest status for the current size of the terminal."""
        width, height = self._console.size
        picture = render(status, width, height, history, ascii_only=self._console.options.ascii_only)
        self._live.update(picture, refresh=True)

    def note(self, sentence: str) -> None:
        """Does nothing, because the dashboard shows the newest notes of the history."""


class PlainView:
    """Prints the status every 10 s and at each change of phase, every note, and each cause of a bottleneck once."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._phase: str | None = None
        self._next = 0.0
        self._causes: set[Cause] = set()  # those that have been printed

    def show(self, status: RunStatus | None, history: History) -> None:
        """Prints the newest status if its phase has changed or 10 s have passed."""
        now = self._clock()
        if status is None or (status.phase == self._phase and now < self._next):
            return
        self._phase, self._next = status.phase, now + PLAIN_SECONDS
        print_line(plain_line(status, history.silent_seconds), self._stream)
        limit = status.limited_by
        if limit is not None and limit.cause not in self._causes:
            self._causes.add(limit.cause)
            print_line(f"bottleneck: {describe_bottleneck(limit)}", self._stream)
            if advice := advise(limit):
                print_line(f"try: {advice}", self._stream)

    def note(self, sentence: str) -> None:
        """Prints the sentence."""
        print_line(sentence, self._stream)


class CellView(PlainView):
    """Shows the status as one line of a notebook cell, which changes in place, and prints every note."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._display: Any = importlib.import_module("IPython.display").display
        self._line: Any = None  # IPython's handle of the line; None before the first status

    def show(self, status: RunStatus | None, history: History) -> None:
        """Replaces the line by the newest status."""
        if status is None:
            return
        content = {"text/plain": plain_line(status, history.silent_seconds)}
        if self._line is None:
            self._line = self._display(content, raw=True, display_id=True)
        else:
            self._line.update(content, raw=True)


View = LiveView | PlainView


def line_view(stream: TextIO) -> PlainView:
    """Returns a CellView if `stream` is the output of a notebook cell, else a PlainView."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()  # Does not import IPython itself.
    return PlainView(stream) if shell is None or stream is not sys.stdout or stream.isatty() else CellView(stream)


def show_once(status: RunStatus, stream: TextIO | None = None) -> None:
    """Prints the dashboard once, with all its rows."""
    console = Console(file=stream or sys.stdout, highlight=False)
    console.print(render(status, console.width, MAX_ROWS, History(), ascii_only=console.options.ascii_only))


def print_line(line: str, stream: TextIO | None = None) -> None:
    """Prints a line. If the reader is gone (`apex train | head`), the run continues without output."""
    stream = stream or sys.stdout
    encoding = stream.encoding or "utf-8"
    _LastingStream(stream).write(line.encode(encoding, "replace").decode(encoding) + "\n")


class _LastingStream:
    """A stream that ignores failed writes, so that a closed terminal or a full disk does not end the run."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> None:
        """Writes and flushes the text; ignores a failure."""
        with suppress(OSError), reader_may_leave(self._stream):
            self._stream.write(text)

    def flush(self) -> None:
        """Does nothing: `write` flushes."""
