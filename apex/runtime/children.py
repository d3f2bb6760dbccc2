"""Child processes of a role: forked before the role has a socket, a thread or CUDA, and never outliving it."""

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
from apex.errors import ApexError, ConfigError
from apex.runtime.file_lock import FileLock
from apex.runtime.lifecycle import FAILED, POLL_SECONDS, REFUSED, Stop, Wait, stop_on_signals
from apex.runtime.spawn import belong_to
from apex.runtime.watchdog import Pulse, Silence, is_traced

KILL_SECONDS = 1.0  # the kernel's time to end what was sent SIGKILL
LAST_WORDS_SECONDS = 1.0  # that a process which is stuck has to write down where it was

log = logging.getLogger("apex")
_fork = multiprocessing.get_context("fork")  # Children share the parent's loaded libraries and its mapped memory.


class _Watched:
    """What the parent knows of a child's turns."""

    def __init__(self, name: str) -> None:
        self.pulse = Pulse()
        self.stuck = ""  # the cause in words, once it was killed for that
        self._ticks = 0
        self._silence = Silence()
        self._wait = Wait(f"the parent of {name}")

    def look(self, limit: float) -> float:
        """Seconds without a turn if they are too many, else 0."""
        before, self._ticks = self._ticks, self.pulse.ticks
        if self._ticks != before:
            self._wait.over()
        else:
            self._wait.on("a turn of it")
        return self._silence.seconds if self._silence.look(self._ticks != before, limit) else 0.0


class ChildDiedError(ApexError, RuntimeError):
    """A child ended that should have gone on; the role ends too, and is started again as a whole."""


class ChildRefusedError(ConfigError):
    """A child refused what it was given, and has said why; to start the role again would change nothing."""


def start_child(name: str, target: Callable[..., None], *args: Any) -> BaseProcess:
    """Forks `target(stop, *args)`. SIGTERM asks its `stop`; Ctrl-C is the parent's business."""
    if not _started:
        atexit.register(_kill_what_is_left)  # Its turn comes before that of `multiprocessing.util`, imported above.
    watched = _Watched(name)
    process = _fork.Process(target=_run, args=(os.getpid(), name, watched.pulse, target, args), name=name)
    process.start()
    _started[process] = watched
    return process


_started: dict[BaseProcess, _Watched] = {}  # by this process


def _kill_what_is_left() -> None:
    """Keeps multiprocessing from waiting for the children for ever, whatever ended this process."""
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
        except ConfigError as error:
            log.error("%s: %s", name, error)
            sys.exit(REFUSED)
        except Exception:
            log.exception("%s failed", name)
            sys.exit(FAILED)


def check_children(children: Sequence[BaseProcess], stuck_seconds: float = 0.0) -> None:
    """Raises ChildDiedError if one has ended, ChildRefusedError if it ended with status 2.

    One that made no turn for `stuck_seconds` is killed, and is as dead as one that has ended; 0: however long it takes.
    """
    for child in children:
        watched = _started[child]
        if child.exitcode is None and (seconds := watched.look(stuck_seconds)) and not is_traced(child.pid or 0):
            watched.stuck = f"{child.name} made no turn for {seconds:.0f} s: it was stuck, and was killed"
            _kill_with_words(child)
        if watched.stuck:
            raise ChildDiedError(watched.stuck)
        if child.exitcode == REFUSED:
            raise ChildRefusedError(f"the {child.name} process refused to go on; its own words stand above")
        if child.exitcode is not None:
            raise ChildDiedError(f"{child.name} ended with status {child.exitcode}")


def _kill_with_words(child: BaseProcess) -> None:
    """Kills a child that is stuck; one that is not stopped says first where it was."""
    with suppress(ProcessLookupError):
        os.kill(child.pid or 0, signal.SIGABRT)
    child.join(LAST_WORDS_SECONDS)
    child.kill()
    child.join(KILL_SECONDS)


def stop_children(children: Sequence[BaseProcess], grace_seconds: float = 2.0) -> None:
    """Asks all to end, waits for all together, and kills what is left."""
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
    """Runs `function(stop)` in a child of its own and returns what it returned, by way of JSON.

    For what needs sockets before the last fork: a context must not cross it. Raises ConfigError as the function does;
    returns {} when `stop` was requested first.
    """
    reader, writer = _fork.Pipe(duplex=False)

    def answer(child_stop: Stop) -> None:
        try:
            writer.send_bytes(json.dumps({"result": function(child_stop)}).encode())
        except ConfigError as error:
            writer.send_bytes(json.dumps({"error": str(error)}).encode())

    child = start_child(name, answer)
    writer.close()
    try:
        while not reader.poll(POLL_SECONDS):
            if stop.requested:
                return {}
            check_children([child], RunConfig().stuck_seconds)
        reply = json.loads(reader.recv_bytes())
    except EOFError as error:
        raise ChildDiedError(f"{name} ended without an answer") from error
    finally:
        stop_children([child])
        reader.close()
    if "error" in reply:
        raise ConfigError(reply["error"])
    return dict(reply["result"])
