"""The process that saves snapshots of the replay memory, periodically and on request."""

import logging
import os
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from apexreplay.errors import UsageError, describe_exception
from apexreplay.process.children import start_child
from apexreplay.process.lifecycle import POLL_SECONDS, Stop
from apexreplay.snapshots.writer import SnapshotWriter

REST = 3.0  # sleep after each file, as a multiple of the time that writing the file took
NICENESS = 10  # low CPU priority: other processes go first

log = logging.getLogger("apexreplay")


class SnapshotProcess:
    """Starts the snapshot process and requests the last snapshot of a run."""

    def __init__(self, snapshotter: Callable[[], SnapshotWriter], period_seconds: float) -> None:
        self._pipe, end = Pipe()
        self.process = start_child("snapshots", take_snapshots, snapshotter, period_seconds, end)
        end.close()

    def take_last(self, seconds: float) -> str:
        """Requests a snapshot of the present content; returns why it was not taken within `seconds`, "" if it was."""
        try:
            self._pipe.send_bytes(b"take")
            return self._pipe.recv_bytes().decode() if self._pipe.poll(seconds) else f"not taken within {seconds:g} s"
        except (EOFError, OSError):
            return "the snapshot process has ended"


def take_snapshots(
    stop: Stop,
    snapshotter: Callable[[], SnapshotWriter],
    period_seconds: float,
    pipe: Connection,
    poll_seconds: float = POLL_SECONDS,
) -> None:
    """Runs the snapshot process: takes a snapshot every `period_seconds` and on each request.

    Any message on `pipe` is a request; the answer is the error, b"" if there was none. The process sleeps after each
    file that it has written; a request ends this sleep. A full disk does not end the process.
    """
    os.nice(NICENESS)
    source = snapshotter()
    take_at = time.monotonic() + period_seconds
    while not stop.poll():
        asked = pipe.poll(poll_seconds)
        if asked:
            pipe.recv_bytes()
        elif time.monotonic() < take_at:
            continue
        error = _take(source, pipe, stop, poll_seconds, rests=not asked)
        take_at = time.monotonic() + period_seconds
        if asked:
            pipe.send_bytes(error.encode())


def _take(source: SnapshotWriter, pipe: Connection, stop: Stop, poll_seconds: float, *, rests: bool) -> str:
    """Takes a snapshot; returns the error, "" if there was none. Without `rests`, as fast as possible."""

    def rest(seconds: float) -> None:
        until = time.monotonic() + REST * seconds * rests  # May be many seconds away: the loop polls.
        while not stop.poll() and not pipe.poll(max(0.0, min(poll_seconds, until - time.monotonic()))):
            if time.monotonic() >= until:
                return

    began = time.monotonic()
    try:
        snapshot = source.take(rest)
    except (OSError, UsageError) as error:
        log.error("cannot save a snapshot of the replay memory: %s", error)
        return describe_exception(error)
    if snapshot is not None:
        log.info("snapshot %d: %d items, %.1f s", snapshot.number, snapshot.size, time.monotonic() - began)
    return ""
