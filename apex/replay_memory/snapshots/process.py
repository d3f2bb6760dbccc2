"""The process that copies the replay memory to disk, now and then and when asked."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from apex.errors import ConfigError
from apex.replay_memory.snapshots.writer import SnapshotWriter
from apex.runtime.children import start_child
from apex.runtime.lifecycle import POLL_SECONDS, Stop

REST = 3.0  # after each file the process sleeps this many times as long as it took
NICENESS = 10  # it runs where nobody else wants the core
LAST_SNAPSHOT_SECONDS = 2.0  # for the one at the end of a run: its learner does not wait for long

log = logging.getLogger("apex")


class SnapshotProcess:
    """The process that takes the snapshots."""

    def __init__(self, snapshotter: Callable[[], SnapshotWriter], period_seconds: float) -> None:
        self._pipe, end = Pipe()
        self.process = start_child("snapshots", take_snapshots, snapshotter, period_seconds, end)
        end.close()

    def take_last(self, seconds: float = LAST_SNAPSHOT_SECONDS) -> bool:
        """Whether a snapshot of what is stored now was taken within that time."""
        try:
            self._pipe.send_bytes(b"take")
            return self._pipe.poll(seconds) and self._pipe.recv_bytes() == b"taken"
        except (EOFError, OSError):  # The process is gone.
            return False


def take_snapshots(
    stop: Stop,
    snapshotter: Callable[[], SnapshotWriter],
    period_seconds: float,
    pipe: Connection,
    poll_seconds: float = POLL_SECONDS,
) -> None:
    """The main function of the copying process: a snapshot every `period_seconds`, and one whenever asked.

    Whoever sends anything gets b"taken" or b"failed", and is not kept waiting by rests. A full disk ends nothing.
    """
    os.nice(NICENESS)
    source = snapshotter()
    take_at = time.monotonic() + period_seconds
    while not stop.requested:
        asked = pipe.poll(poll_seconds)
        if asked:
            pipe.recv_bytes()
        elif time.monotonic() < take_at:
            continue
        taken = _take(source, pipe, stop, poll_seconds)
        take_at = time.monotonic() + period_seconds
        if asked:
            pipe.send_bytes(b"taken" if taken else b"failed")


def _take(source: SnapshotWriter, pipe: Connection, stop: Stop, poll_seconds: float) -> bool:
    def rest(seconds: float) -> None:
        until = time.monotonic() + REST * seconds  # A file on a slow disk takes many seconds: each look is a turn.
        while not stop.requested and not pipe.poll(max(0.0, min(poll_seconds, until - time.monotonic()))):
            if time.monotonic() >= until:
                return

    began = time.monotonic()
    try:
        snapshot = source.take(rest)
    except (OSError, ConfigError) as error:
        log.error("no snapshot of the replay memory: %s", error)
        return False
    if snapshot is not None:
        log.info("snapshot %d: %d transitions, %.1f s", snapshot.number, snapshot.size, time.monotonic() - began)
    return True
