"""Shows a run to the user who started it: its status, requested once a second, and the warnings in its logs."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from typing import Protocol

from apex.launch.terminal.dashboard import ENDING, EVALUATING, History
from apex.launch.terminal.view import View
from apex.transport.control_client import ControlClient
from apex.transport.messages.control import StatusRequest
from apex.transport.messages.run_status import RunStatus
from apex.transport.timing import ANSWER_SECONDS, STATUS_SECONDS

log = logging.getLogger("apex")

# A log line about a wait: host (only with several hosts), time, role, level, message. See `lifecycle.Wait`.
WAIT = re.compile(r"(\S+ )?\S+ \S+ WARNING (?P<wait>\S.* waits .*) \((?P<seconds>\d+) s\)")
# A wait that continues is logged again when its duration has doubled. It is over if that line is overdue by this time.
LATE_SECONDS = 5.0


class StatusClient:
    """Requests the learner's status, and never blocks to wait for the answer."""

    def __init__(self, client: ControlClient, clock: Callable[[], float] = time.monotonic) -> None:
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


class Logs(Protocol):
    """The logs of a run."""

    def warnings(self) -> list[str]:
        """Returns the lines since the last call that a user should see."""


class RunMonitor:
    """Reads the run's status and logs once a second, and shows them."""

    def __init__(
        self,
        source: Callable[[], RunStatus | None],
        view: View,
        logs: Logs,
        history: History,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`source` returns the newest status since its last call, without waiting; None if there is none."""
        self.status: RunStatus | None = None
        self._source = source
        self._view = view
        self._logs = logs
        self._history = history
        self._clock = clock
        self._look_at = 0.0
        self._heard_at = clock()
        self._noted_at: dict[str, float] = {}  # sentence -> time at which it was last shown, in seconds of `clock`

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

    def tick(self) -> None:
        """Shows a new status at once; reads the logs for warnings and refreshes the view at least once a second."""
        now = self._clock()
        status = self._source()
        if status is not None:
            self.status, self._heard_at = status, now
            self._history.add(status)
        elif now < self._look_at:
            return
        for sentence in self._logs.warnings():
            self._note(sentence)
        self._forget_waits()
        self._look_at = now + STATUS_SECONDS
        self._history.silent_seconds = now - self._heard_at
        self._view.show(self.status, self._history)

    def tell(self, sentence: str) -> None:
        """Logs a sentence of the supervisor and shows it at once."""
        log.info(sentence)
        self._note(sentence)
        self._view.show(self.status, self._history)

    def _note(self, sentence: str) -> None:
        for other in [other for other in self._history.notes if _subject(other) == _subject(sentence)]:
            self._history.notes.remove(other)  # A repeated note moves to the end.
        self._history.notes.append(sentence)
        self._noted_at[sentence] = self._clock()
        self._view.note(sentence)

    def _forget_waits(self) -> None:
        """Removes the note of each wait that no log line has repeated in time: such a wait is over."""
        for sentence in list(self._history.notes):
            wait, now = WAIT.fullmatch(sentence), self._clock()
            if wait and now - self._noted_at.get(sentence, now) > int(wait["seconds"]) + LATE_SECONDS:
                self._history.notes.remove(sentence)
        self._noted_at = {sentence: at for sentence, at in self._noted_at.items() if sentence in self._history.notes}


def _subject(sentence: str) -> str:
    """Returns the part of a sentence that identifies its subject. For a wait: who waits for what, without times."""
    wait = WAIT.fullmatch(sentence)
    return wait["wait"] if wait else sentence
