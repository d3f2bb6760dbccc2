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
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

from apex.config import ConfigError
from apex.lifecycle import FAILED, POLL_SECONDS, REFUSED, Stop, die_with_parent, stop_on_signals

log = logging.getLogger("apex")
_started: list[BaseProcess] = []  # by this process
_fork = multiprocessing.get_context("fork")  # Children share the parent's loaded libraries and its mapped memory.


class ChildDiedError(RuntimeError):
    """A child ended that should have gone on; the role ends too, and is started again as a whole."""


class ChildRefusedError(ConfigError):
    """A child refused what it was given, and has said why; to start the role again would change nothing."""


def start_child(name: str, target: Callable[..., None], *args: Any) -> BaseProcess:
    """Forks `target(stop, *args)`. SIGTERM asks its `stop`; Ctrl-C is the parent's business."""
    process = _fork.Process(target=_run, args=(os.getpid(), name, target, args), name=name)
    process.start()
    _started.append(process)
    return process


@atexit.register
def _kill_what_is_left() -> None:
    """Whatever ended this process, it must not wait for its children: multiprocessing would, for ever.

    Registered after `multiprocessing.util` was imported, this comes before that one's own turn.
    """
    for process in _started:
        if process.exitcode is None:
            process.kill()


def _run(parent: int, name: str, target: Callable[..., None], args: tuple[Any, ...]) -> None:
    die_with_parent()
    if os.getppid() != parent:  # It died before the line above.
        os._exit(FAILED)
    with stop_on_signals() as stop:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            target(stop, *args)
        except ConfigError as error:
            log.error("%s: %s", name, error)
            sys.exit(REFUSED)
        except Exception:
            log.exception("%s failed", name)
            sys.exit(FAILED)


def check_children(children: Sequence[BaseProcess]) -> None:
    """Raises ChildDiedError if one has ended, ChildRefusedError if it ended with status 2."""
    for child in children:
        if child.exitcode == REFUSED:
            raise ChildRefusedError(f"the {child.name} process refused to go on; its own words stand above")
        if child.exitcode is not None:
            raise ChildDiedError(f"{child.name} ended with status {child.exitcode}")


def stop_children(children: Sequence[BaseProcess], grace_seconds: float = 2.0) -> None:
    """Asks all to end, waits, and kills what is left."""
    for child in children:
        if child.exitcode is None:
            child.terminate()
    for child in children:
        child.join(grace_seconds)
        if child.exitcode is None:
            child.kill()
            child.join()


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
            check_children([child])
        reply = json.loads(reader.recv_bytes())
    except EOFError as error:
        raise ChildDiedError(f"{name} ended without an answer") from error
    finally:
        stop_children([child])
        reader.close()
    if "error" in reply:
        raise ConfigError(reply["error"])
    return dict(reply["result"])
