"""A run's mark on the host that it is going on, whichever of its programs live at the moment."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

MARK = "\0apex-run-{:016x}"  # an abstract socket: it has no file, and ends with its process


@contextmanager
def claim_run(run_id: int) -> Iterator[None]:
    """Within it `is_claimed` holds, so nobody removes the run's replay memory while its programs are restarted."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mark:
        with suppress(OSError):  # Another program of the run has the mark.
            mark.bind(MARK.format(run_id))
        yield


def is_claimed(run_id: int) -> bool:
    """Whether a program on this host, in this network namespace, claims the run."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind(MARK.format(run_id))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False
