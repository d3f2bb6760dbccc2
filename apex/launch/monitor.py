"""Shows a run to the user who started it: its status, requested once a second, and the warnings of its programs."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from apex.facts import EndReason, LogEntry
from apex.launch.callbacks import Callbacks
from apex.launch.terminal.dashboard import ENDING, EVALUATING, History, Note
from apex.launch.terminal.view import View
from apex.sentences import describe, describe_disk, describe_entry
from apex.transport.messages.control import Answer, StatusRequest
from apex.transport.messages.run_status import RunStatus
from apex.transport.timing import ANSWER_SECONDS, STATUS_SECONDS
from apexreplay.facts import Record
from apexreplay.process.limits import read_space
from apexreplay.process.text import clean
from apexreplay.transport.control_socket import ControlSocket

FULL_BYTES = 64 * 1024  # a disk with at most this much free space counts as full

log = logging.getLogger("apex")

# A wait that continues is logged again when it has doubled. If that entry is late by this time, the wait is over.
LATE_SECONDS = 5.0


class StatusClient:
    """Requests the learner's status, and never blocks to wait for the answer."""

    def __init__(self, client: ControlSocket[Answer], clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._asked_at = self._ask_at = 0.0

    def __call__(self) -> RunStatus | None:
        """Returns the newest status that has arrived since the last call; None if none has."""
        newest: RunStatus | None = None
        while (answer := self._client.receive(0.0)) is not None:
            if isinstance(answer, RunStatus):
                newest = answer
        now = self._clock()
        if newest is not None:
            self._ask_at = min(self._ask_at, self._asked_at + STATUS_SECONDS)
        if now >= self._ask_at:
            self._client.send(StatusRequest())
            self._asked_at, self._ask_at = now, now + ANSWER_SECONDS
        return newest


@dataclass
class RunMonitor:
    """Reads the run's status, warnings and errors once a second, shows them, and passes the status to callbacks."""

    source: Callable[[], RunStatus | None]  # returns the newest status since its last call, without waiting
    view: View
    entries: Callable[[], list[tuple[str, LogEntry]]]  # returns the new warnings and errors, with the names of the logs
    history: History
    clock: Callable[[], float] = time.monotonic
    folder: Path | None = None  # the run folder if it is on this host: programs cannot log that they cannot write it
    callbacks: Callbacks = field(default_factory=Callbacks)

    def __post_init__(self) -> None:
        self.status: RunStatus | None = None
        self._flaw = ""  # why the folder cannot be written; "": it can
        self._look_at = 0.0
        self._answered_at = self.clock()

    @property
    def ending(self) -> bool:
        """Whether the run is ending or has ended: no program but the evaluator needs to be started any more."""
        return self.status is not None and self.status.phase in ENDING

    @property
    def evaluating(self) -> bool:
        """Whether the run waits for the evaluation of the final policy."""
        return self.status is not None and self.status.phase == EVALUATING

    @property
    def training(self) -> bool:
        """Whether training has begun, so that there are curves to show."""
        return self.status is not None and self.status.updates > 0

    def tick(self, *, failed: bool = False) -> None:
        """Shows a new status at once; reads the entries and refreshes the view at least once a second.

        `failed`: a program has failed. The learner only knows that it was asked to stop.
        """
        now = self.clock()
        status = self.source()
        if status is not None:
            self.status = status = self.callbacks.report(replace(status, end=EndReason("failed")) if failed else status)
            self._answered_at = now
            self.history.add(status)
        elif now < self._look_at:
            return
        notes = self.history.notes
        for log_name, entry in self.entries():
            self._add_note(make_note(log_name, entry, now))
        for note in [note for note in notes if note.expires_at < now]:
            notes.remove(note)
        if self.folder is not None:
            self._check_disk(self.folder)
        self._look_at = now + STATUS_SECONDS
        self.history.silent_seconds = now - self._answered_at
        self.view.show(self.status, self.history)

    def show_event(self, event: Record) -> None:
        """Logs an event of a program or unit and shows it at once."""
        self._show(describe(event))

    def _show(self, sentence: str) -> None:
        log.info(sentence)
        self._add_note(Note(sentence, sentence))
        self.view.show(self.status, self.history)

    def _check_disk(self, folder: Path) -> None:
        space = read_space(folder)
        flaw = space.flaw or ("is on a full disk" if space.free <= FULL_BYTES else "")
        if flaw != self._flaw:
            self._flaw = flaw
            self._show(describe_disk(str(folder), flaw))

    def _add_note(self, note: Note) -> None:
        notes = self.history.notes
        for other in [other for other in notes if other.key == note.key]:
            notes.remove(other)  # A repeated note moves to the end.
        notes.append(note)
        self.view.note(note.text)


def make_note(log_name: str, entry: LogEntry, now: float) -> Note:
    """Returns the note that shows an entry. `now`: seconds of the clock by which the note of a wait expires."""
    shown = entry if log_name.startswith(entry.role) else replace(entry, role=f"{log_name} {entry.role}")
    text, waiting = clean(describe_entry(shown)), entry.waiting
    if waiting is None:
        return Note(text, text)
    key = (log_name, waiting.who, waiting.what, waiting.subject)
    return Note(key, text, now + (waiting.seconds or 0.0) + LATE_SECONDS)
