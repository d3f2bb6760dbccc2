"""Child processes of a role. The role forks them before it has a socket, a thread or CUDA. They end with the role."""

import atexit
import json
import logging
import mmap
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

from apexreplay.errors import (
    FAILED,
    REFUSED,
    ApexError,
    ChildDiedError,
    ChildRefusedError,
    UsageError,
    describe_exception,
)
from apexreplay.facts import Waiting
from apexreplay.files.file_lock import FileLock
from apexreplay.process.child_setup import belong_to
from apexreplay.process.lifecycle import POLL_SECONDS, Stop, Wait
from apexreplay.process.text import clean
from apexreplay.process.watchdog import Pulse, StuckDetector, abort

KILL_SECONDS = 1.0  # maximum time until a process has ended after SIGKILL
MAX_ERROR_BYTES = 2_000  # maximum size of the error that a child tells its parent

log = logging.getLogger("apexreplay")
_fork = multiprocessing.get_context("fork")  # Children share the parent's loaded libraries and its mapped memory.


def start_child(name: str, target: Callable[..., None], *args: Any) -> BaseProcess:
    """Forks a child that runs `target(stop, *args)`; `stop_children` requests `stop`.

    The child ignores SIGINT, SIGTERM and SIGHUP. They may go to all processes at once, and the parent still needs its
    children while it ends.
    """
    pulse, error = Pulse(), mmap.mmap(-1, MAX_ERROR_BYTES)
    process = _fork.Process(target=_run, args=(os.getpid(), name, pulse, error, target, args), name=name)
    process.start()
    wait = Wait(f"parent of {name}")
    _started[process] = _Started(pulse, StuckDetector(pulse.count, process.pid), wait, error)
    return process


@dataclass(slots=True)
class _Started:
    """The parent's record of a child."""

    pulse: Pulse
    detector: StuckDetector
    wait: Wait  # for the child's next heartbeat
    error: mmap.mmap  # the exception that ended the child, in memory shared with it
    stuck_for: float = 0.0  # seconds without a heartbeat if the child was killed as stuck; else 0


_started: dict[BaseProcess, _Started] = {}  # the children that this process has started and not yet stopped


def _kill_remaining() -> None:
    """Kills all children, so that multiprocessing does not wait for them forever when this process exits."""
    for process in _started:
        if process.exitcode is None:
            process.kill()


atexit.register(_kill_remaining)  # Runs before multiprocessing's exit handler, registered earlier.


def _run(
    parent: int, name: str, pulse: Pulse, told: mmap.mmap, target: Callable[..., None], args: tuple[Any, ...]
) -> None:
    belong_to(parent)
    FileLock.forget()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    hangup = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]  # as under nohup
    for signum in (signal.SIGTERM, *hangup):
        # Programs that the child starts must not ignore these signals, and would inherit SIG_IGN.
        signal.signal(signum, lambda signum, frame: None)

    def look() -> None:
        pulse.tick()
        if pulse.is_stop_requested:
            stop.request()

    stop = Stop(look)
    try:
        target(stop, *args)
    except Exception as error:
        text = str(error) if isinstance(error, ApexError) else describe_exception(error)
        told.write(clean(text).encode(errors="replace")[:MAX_ERROR_BYTES])
        if isinstance(error, UsageError):
            log.error("%s: %s", name, error)
            sys.exit(REFUSED)
        log.exception("%s failed", name)
        sys.exit(FAILED)


def check_children(children: Sequence[BaseProcess], stuck_seconds: float = 0.0) -> None:
    """Raises ChildDiedError if a child has ended, or ChildRefusedError if it ended with status 2, with its exception.

    A child that sends no heartbeat for `stuck_seconds` (0: no limit) is killed and counts as ended.
    """
    for child in children:
        started = _started[child]
        if child.exitcode is None:
            if started.detector.check(stuck_seconds):
                started.stuck_for = started.detector.silence
                abort(child.pid or 0, child.join)
                child.kill()
                child.join(KILL_SECONDS)
            elif started.detector.silence:
                started.wait.on(Waiting("child", child.name))
            else:
                started.wait.over()
        if started.stuck_for:
            raise ChildDiedError(f"{child.name} had no heartbeat for {started.stuck_for:.0f} s and was killed as stuck")
        told = started.error[:].rstrip(b"\0").decode(errors="replace")
        if child.exitcode == REFUSED:
            raise ChildRefusedError(f"{child.name}: {told}")
        if child.exitcode is not None:
            raise ChildDiedError(f"{child.name} ended with status {child.exitcode}" + (f": {told}" if told else ""))


def stop_children(children: Sequence[BaseProcess], grace_seconds: float = 2.0) -> None:
    """Requests all children to stop, waits `grace_seconds` for all together, and kills the remaining ones."""
    for child in children:
        if child in _started:
            _started[child].pulse.request_stop()
    deadline = time.monotonic() + grace_seconds
    for child in children:
        child.join(max(0.0, deadline - time.monotonic()))
    for child in children:
        if child.exitcode is None:
            child.kill()
            child.join(KILL_SECONDS)
        _forget(child)


def _forget(child: BaseProcess) -> None:
    """Frees the memory and the descriptors of a child that has ended: a notebook or a sweep starts many."""
    if child.exitcode is not None:
        _started.pop(child, None)


def call_in_child(
    name: str,
    function: Callable[[Stop], dict[str, Any]],
    stop: Stop,
    *,
    stuck_seconds: float = 0.0,
) -> dict[str, Any]:
    """Runs `function(stop)` in a separate child process and returns its result, passed as JSON.

    Use this if sockets are needed before the last fork, because a ZeroMQ context must not be forked, and for code that
    may hang or leave threads and processes behind: none of them remains.
    Raises UsageError if the function does, and ChildDiedError if the child ends otherwise or sends no heartbeat for
    `stuck_seconds` (0: no limit). Returns {} if `stop` was requested first.
    """
    reader, writer = _fork.Pipe(duplex=False)

    def answer(child_stop: Stop) -> None:
        os.setsid()  # Processes that the function starts can be killed together.
        if (torch := sys.modules.get("torch")) is not None:
            torch.set_num_threads(1)  # torch would wait for threads that only the parent, perhaps a notebook, has.
        child_stop.tick()  # The limit holds from the first heartbeat.
        try:
            writer.send_bytes(json.dumps({"result": function(child_stop)}).encode())
        except UsageError as error:
            writer.send_bytes(json.dumps({"error": [error.problem, error.remedy]}).encode())

    child = start_child(name, answer)
    writer.close()
    try:
        while not reader.poll(POLL_SECONDS):
            if stop.poll():
                return {}
            try:
                check_children([child], stuck_seconds)
            except ChildDiedError:
                if child.exitcode or not reader.poll():  # Otherwise it has sent its result since.
                    raise
        reply = json.loads(reader.recv_bytes())
    except EOFError as error:
        child.join(KILL_SECONDS)
        raise ChildDiedError(f"{name} ended with status {child.exitcode}, without a result") from error
    finally:
        _kill_session(child)
        reader.close()
    if "error" in reply:
        raise UsageError(*reply["error"])
    return dict(reply["result"])


def _kill_session(child: BaseProcess) -> None:
    """Kills a child of `call_in_child` that does not end by itself, and the processes that it has started."""
    assert child.pid is not None
    child.join(POLL_SECONDS)
    child.kill()
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.join(KILL_SECONDS)
    _forget(child)
