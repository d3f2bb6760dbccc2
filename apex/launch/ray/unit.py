"""The remote side: a Ray actor on each host that runs a guard. The Ray actor stores no state and no secrets."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from apex.runtime.lifecycle import POLL_SECONDS
from apex.version import VERSION

GUARD = "apex.launch.guard"


class Place(NamedTuple):
    """The host on which a unit runs."""

    address: str
    host: str
    version: str  # version of this package on the host


class Unit:
    """Runs programs on a host. If its process or node dies, Ray restarts it and the driver sends a new order."""

    def __init__(self) -> None:
        self._stopping = threading.Event()

    def where(self) -> Place:
        """Returns the host on which Ray has placed this unit."""
        import ray.util

        return Place(ray.util.get_node_ip_address(), socket.gethostname(), VERSION)

    def read(self, path: str) -> str:
        """Returns the text of a small file on this host; "" if it does not exist."""
        with suppress(OSError):
            return Path(path).read_text(errors="surrogateescape")
        return ""

    def run(self, order: str, folder: str) -> tuple[int, str]:
        """Runs a guard with this order until the guard ends; returns its exit status and its last line of output.

        The guard receives keys through a pipe. If this process dies, the pipe closes and the guard ends its programs.
        `folder`: current folder of the programs, if this user may enter it.
        """
        self._stopping.clear()
        with (
            tempfile.TemporaryFile() as errors,  # A pipe that is read at the end would block the guard at 64 KiB.
            subprocess.Popen(
                [sys.executable, "-u", "-P", "-m", GUARD],
                stdin=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
                cwd=folder if os.path.isdir(folder) and os.access(folder, os.X_OK) else None,
                env=_environment(),
                start_new_session=True,  # Ray kills the process group of a worker that loses its driver.
            ) as guard,
        ):
            assert guard.stdin is not None
            with suppress(BrokenPipeError):  # The guard has ended: its exit status tells why.
                guard.stdin.write(order.encode())
            while guard.poll() is None and not self._stopping.wait(POLL_SECONDS):
                pass
            guard.stdin.close()
            guard.wait()
            errors.seek(0)
            words = errors.read().decode(errors="replace").strip()
        return guard.returncode, words.rpartition("\n")[2]

    def stop(self) -> None:
        """Makes the guard end its programs; then `run` returns."""
        self._stopping.set()


def _environment() -> dict[str, str]:
    """Returns this process's environment, with a PYTHONPATH that includes the user's code distributed by Ray.

    Leaves out the packages inside Ray's own folder, and OMP_NUM_THREADS, which Ray derives from the unit's CPUs.
    """
    import ray

    own = os.path.dirname(ray.__file__)
    paths = [path or os.getcwd() for path in sys.path if not path.startswith(own)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    environment.pop("OMP_NUM_THREADS", None)
    return environment
