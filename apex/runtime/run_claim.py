"""Marks a run as active on this host, even while some of its processes are being restarted."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

MARK = "\0apex-run-{:016x}"  # name of an abstract socket, which has no file and disappears when its process ends


@contextmanager
def claim_run(run_id: int) -> Iterator[None]:
    """Makes `is_claimed` true during the context, so that the run's replay memory is not removed during restarts."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mark:
        with suppress(OSError):  # Another process has already claimed the run.
            mark.bind(MARK.format(run_id))
        yield


def is_claimed(run_id: int) -> bool:
    """Returns whether a process on this host, in this network namespace, claims the run."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind(MARK.format(run_id))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False
