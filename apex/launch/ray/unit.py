"""The remote side: a Ray actor on each host that runs a guard. The Ray actor stores no state and no secrets."""

import io
import os
import socket
import subprocess
import sys
import threading
from collections import deque
from contextlib import suppress
from typing import IO, NamedTuple, cast

from apex.launch.ray.order import Report
from apex.version import VERSION
from apexreplay.process.lifecycle import POLL_SECONDS

GUARD = "apex.launch.guard"
MAX_REPORTS = 10_000  # reports that are kept until the driver reads them


class Place(NamedTuple):
    """The host on which a unit runs."""

    address: str
    host: str
    version: str  # version of this package on the host


class Unit:
    """Runs programs on a host. If its process or node dies, Ray restarts it and the driver sends a new order."""

    def __init__(self) -> None:
        self._stopping = threading.Event()
        self._reports: deque[str] = deque(maxlen=MAX_REPORTS)

    def where(self) -> Place:
        """Returns the host on which Ray has placed this unit."""
        import ray.util

        return Place(ray.util.get_node_ip_address(), socket.gethostname(), VERSION)

    def run(self, order: str, folder: str) -> tuple[int, str, list[str]]:
        """Runs a guard with this order until the guard ends; returns its status, last report and reports not yet read.

        The guard receives keys through a pipe. If this process dies, the pipe closes and the guard ends its programs.
        `folder`: current folder of the programs, if this user may enter it.
        """
        self._stopping.set()  # A guard that runs although the driver has lost this unit ends.
        stopping = self._stopping = threading.Event()
        endings = [""]
        with subprocess.Popen(
            [sys.executable, "-u", "-P", "-m", GUARD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            cwd=folder if os.path.isdir(folder) and os.access(folder, os.X_OK) else None,
            env=_environment(),
            start_new_session=True,  # Ray kills the process group of a worker that loses its driver.
        ) as guard:
            assert guard.stdin is not None
            reader = threading.Thread(target=self._read_reports, args=[guard.stdout, endings])
            reader.start()
            with suppress(BrokenPipeError):  # The guard has ended: its exit status tells why.
                guard.stdin.write(order.encode())
            while guard.poll() is None and not stopping.wait(POLL_SECONDS):
                pass
            guard.stdin.close()
            guard.wait()
            reader.join()
        return guard.returncode, endings[-1], self.read_reports()

    def read_reports(self) -> list[str]:
        """Returns the guard's reports since the last call, each as an encoded `Report`."""
        return [self._reports.popleft() for _ in range(len(self._reports))]

    def _read_reports(self, stream: IO[bytes], endings: list[str]) -> None:
        with io.BufferedReader(cast(io.RawIOBase, stream)) as lines:
            for data in lines:
                report = Report.decode(data)
                if report.ending is not None:
                    endings.append(data.decode())
                elif report.line:
                    print(f"{report.log}: {report.line}")  # for Ray's own logs
                else:
                    self._reports.append(data.decode())

    def stop(self) -> None:
        """Makes the guard end its programs; then `run` returns."""
        self._stopping.set()


class Head(Unit):
    """The unit of the head, under the name that Ray's tools show."""


class ActorHost(Unit):
    """A unit of actors, under the name that Ray's tools show."""


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
