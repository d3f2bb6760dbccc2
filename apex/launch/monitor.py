"""What whoever started a run sees of it: its status, asked for once a second, and the warnings of its logs."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable

from apex.launch.terminal.dashboard import History
from apex.launch.terminal.view import LogTail, View
from apex.transport.control_client import ControlClient
from apex.transport.messages.control import StatusRequest
from apex.transport.messages.run_status import RunStatus
from apex.transport.timing import ANSWER_SECONDS, STATUS_SECONDS

log = logging.getLogger("apex")

# Host, if there are several, then time and role: see `lifecycle.Wait`.
WAIT = re.compile(r"(\S+ )?\S+ \S+ WARNING (?P<wait>\S.* waits .*) \((?P<seconds>\d+) s\)")
LATE_SECONDS = 5.0  # a wait that was not said again by then, although its time has doubled, is over


class StatusClient:
    """Asks the learner for the status and never waits for the answer."""

    def __init__(self, client: ControlClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._asked_at = self._ask_at = 0.0

    def __call__(self) -> RunStatus | None:
        """The newest status since the last call, or None."""
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


class RunMonitor:
    """Looks at the run once a second, and shows what it sees."""

    def __init__(
        self,
        source: Callable[[], RunStatus | None],
        view: View,
        logs: LogTail,
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
        self._noted_at: dict[str, float] = {}  # when a sentence was noted

    @property
    def ending(self) -> bool:
        """Whether the run is coming to its end, so that nothing need be started any more."""
        return self.status is not None and self.status.phase in ("finishing", "finished")

    @property
    def training(self) -> bool:
        """Whether there are curves to look at."""
        return self.status is not None and self.status.updates > 0

    def tick(self) -> None:
        """Shows what is new; reads the logs for warnings, and shows the time that goes by, once a second."""
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
        """Shows what the supervisor has to say, at once, and logs it."""
        log.info(sentence)
        self._note(sentence)
        self._view.show(self.status, self._history)

    def _note(self, sentence: str) -> None:
        for other in [other for other in self._history.notes if _subject(other) == _subject(sentence)]:
            self._history.notes.remove(other)  # Said again, it stands last, and once.
        self._history.notes.append(sentence)
        self._noted_at[sentence] = self._clock()
        self._view.note(sentence)

    def _forget_waits(self) -> None:
        """Takes waits off the picture that are over: each says so again when its time has doubled."""
        for sentence in list(self._history.notes):
            wait, now = WAIT.fullmatch(sentence), self._clock()
            if wait and now - self._noted_at.get(sentence, now) > int(wait["seconds"]) + LATE_SECONDS:
                self._history.notes.remove(sentence)
        self._noted_at = {sentence: at for sentence, at in self._noted_at.items() if sentence in self._history.notes}


def _subject(sentence: str) -> str:
    """What a sentence is about: of a wait, who waits for whom, whenever and however long."""
    wait = WAIT.fullmatch(sentence)
    return wait["wait"] if wait else sentence
