"""Child processes of a role. The role forks them before it has a socket, a thread or CUDA. They end with the role."""

from __future__ import annotations

import atexit
import json
import logging
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from typing import Any

from apex.config import RunConfig
from apex.errors import FAILED, REFUSED, ChildDiedError, ChildRefusedError, UsageError
from apex.runtime.file_lock import FileLock
from apex.runtime.lifecycle import EXPLAIN_SECONDS, POLL_SECONDS, Stop, Wait, stop_on_signals
from apex.runtime.spawn import belong_to
from apex.runtime.watchdog import Pulse, Silence, is_traced

KILL_SECONDS = 1.0  # maximum time until a process has ended after SIGKILL
LAST_WORDS_SECONDS = 1.0  # time for a stuck process to log its stack traces

log = logging.getLogger("apex")
_fork = multiprocessing.get_context("fork")  # Children share the parent's loaded libraries and its mapped memory.


class _Watched:
    """The parent's record of a child's heartbeats."""

    def __init__(self, name: str, explain_seconds: float) -> None:
        self.pulse = Pulse()
        self.stuck = ""  # error message after the child was killed as stuck; "" before
        self._ticks = 0
        self._silence = Silence()
        self._wait = Wait(f"the parent of {name}", explain_seconds=explain_seconds)

    def look(self, limit: float) -> float:
        """Returns the seconds without a heartbeat if they exceed `limit`, else 0."""
        before, self._ticks = self._ticks, self.pulse.ticks
        if self._ticks != before:
            self._wait.over()
        else:
            self._wait.on("a heartbeat of the child")
        return self._silence.seconds if self._silence.look(self._ticks != before, limit) else 0.0


def start_child(
    name: str, target: Callable[..., None], *args: Any, explain_seconds: float = EXPLAIN_SECONDS
) -> BaseProcess:
    """Forks a child that runs `target(stop, *args)`. SIGTERM requests `stop`; the child ignores Ctrl-C.

    If the child sends no heartbeat for `explain_seconds`, the parent logs a warning.
    """
    if not _started:
        atexit.register(_kill_what_is_left)  # Runs before multiprocessing's exit handler, registered earlier.
    watched = _Watched(name, explain_seconds)
    process = _fork.Process(target=_run, args=(os.getpid(), name, watched.pulse, target, args), name=name)
    process.start()
    _started[process] = watched
    return process


_started: dict[BaseProcess, _Watched] = {}  # the children that this process has started


def _kill_what_is_left() -> None:
    """Kills all children, so that multiprocessing does not wait for them forever when this process exits."""
    for process in _started:
        if process.exitcode is None:
            process.kill()


def _run(parent: int, name: str, pulse: Pulse, target: Callable[..., None], args: tuple[Any, ...]) -> None:
    belong_to(parent)
    FileLock.forget()
    with stop_on_signals(pulse.tick) as stop:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            target(stop, *args)
        except UsageError as error:
            log.error("%s: %s", name, error)
            sys.exit(REFUSED)
        except Exception:
            log.exception("%s failed", name)
            sys.exit(FAILED)


def check_children(children: Sequence[BaseProcess], stuck_seconds: float = 0.0) -> None:
    """Raises ChildDiedError if a child has ended, or ChildRefusedError if it ended with status 2.

    A child that sends no heartbeat for `stuck_seconds` (0: no limit) is killed and counts as ended.
    """
    for child in children:
        watched = _started[child]
        if child.exitcode is None and (seconds := watched.look(stuck_seconds)) and not is_traced(child.pid or 0):
            watched.stuck = f"{child.name} had no heartbeat for {seconds:.0f} s and was killed as stuck"
            _kill_with_words(child)
        if watched.stuck:
            raise ChildDiedError(watched.stuck)
        if child.exitcode == REFUSED:
            raise ChildRefusedError(f"the {child.name} process refused to continue; see the error above")
        if child.exitcode is not None:
            raise ChildDiedError(f"{child.name} ended with status {child.exitcode}")


def _kill_with_words(child: BaseProcess) -> None:
    """Kills a stuck child. The child first logs its stack traces, unless SIGSTOP has stopped it."""
    with suppress(ProcessLookupError):
        os.kill(child.pid or 0, signal.SIGABRT)
    child.join(LAST_WORDS_SECONDS)
    child.kill()
    child.join(KILL_SECONDS)


def stop_children(children: Sequence[BaseProcess], grace_seconds: float = 2.0) -> None:
    """Sends SIGTERM to all children, waits `grace_seconds` for all together, and kills the remaining ones."""
    for child in children:
        if child.exitcode is None:
            child.terminate()
    deadline = time.monotonic() + grace_seconds
    for child in children:
        child.join(max(0.0, deadline - time.monotonic()))
    for child in children:
        if child.exitcode is None:
            child.kill()
            child.join(KILL_SECONDS)


def call_in_child(name: str, function: Callable[[Stop], dict[str, Any]], stop: Stop) -> dict[str, Any]:
    """Runs `function(stop)` in a separate child process and returns its result, passed as JSON.

    Use this if sockets are needed before the last fork, because a ZeroMQ context must not be forked. Raises UsageError
    if the function does. Returns {} if `stop` was requested first.
    """
    reader, writer = _fork.Pipe(duplex=False)

    def answer(child_stop: Stop) -> None:
        try:
            writer.send_bytes(json.dumps({"result": function(child_stop)}).encode())
        except UsageError as error:
            writer.send_bytes(json.dumps({"error": str(error)}).encode())

    child = start_child(name, answer)
    writer.close()
    try:
        while not reader.poll(POLL_SECONDS):
            if stop.poll():
                return {}
            check_children([child], RunConfig().stuck_seconds)
        reply = json.loads(reader.recv_bytes())
    except EOFError as error:
        raise ChildDiedError(f"{name} ended without a result") from error
    finally:
        stop_children([child])
        reader.close()
    if "error" in reply:
        raise UsageError(reply["error"])
    return dict(reply["result"])
