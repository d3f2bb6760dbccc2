"""Signs of life: detects loops that no longer turn, whether stopped, deadlocked or in an endless computation.

Waiting counts as turning. A program shows its turns by systemd's watchdog protocol (sd_notify), to our launcher as to
systemd; a child process shows them by a counter in memory that it shares with its parent.
"""

from __future__ import annotations

import mmap
import os
import socket
import time
from collections.abc import Callable, MutableMapping
from contextlib import suppress

NOTIFY_SECONDS = 1.0  # between two messages to the watcher; sooner where systemd's WatchdogSec is short
START_FACTOR = 5  # before its first sign, a program may take so many times as long: cold disks load torch slowly
LOOKS = 4  # at least, until somebody is held to be stuck


class Pulse:
    """Turns of a child process, counted in memory that is made before the fork."""

    def __init__(self) -> None:
        self._cell = memoryview(mmap.mmap(-1, 8)).cast("Q")

    def tick(self) -> None:
        """Counts one; the child calls this."""
        self._cell[0] += 1

    @property
    def ticks(self) -> int:
        """How many there were."""
        return self._cell[0]


class Silence:
    """How long a process was silent. One look counts for a quarter of the limit at most: the watcher may have slept."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = 0.0
        self._clock = clock
        self._looked_at = clock()
        self._begun = False

    def look(self, heard: bool, limit: float) -> bool:
        """Whether the silence lasts too long; `heard`: there was a sign since the last look. A limit of 0: never."""
        now = self._clock()
        self._begun |= heard
        self.seconds = 0.0 if heard else self.seconds + min(now - self._looked_at, limit / LOOKS)
        self._looked_at = now
        return 0 < limit * (1 if self._begun else START_FACTOR) <= self.seconds


def take_notifier(
    environment: MutableMapping[str, str] = os.environ, clock: Callable[[], float] = time.monotonic
) -> Notifier:
    """Makes the notifier that `environment` asks for, and removes the request, which is not for children."""
    address = environment.pop("NOTIFY_SOCKET", "")
    return Notifier(address, float(environment.pop("WATCHDOG_USEC", "0")) / 1e6, clock)


class Notifier:
    """A program's end of sd_notify: a call is a turn. Silent without an address."""

    def __init__(self, address: str, limit: float, clock: Callable[[], float]) -> None:
        """`limit`: seconds of silence that the watcher takes for too long; 0: it has not said."""
        self._clock = clock
        self._pid = os.getpid()
        self._period = min(NOTIFY_SECONDS, limit / LOOKS) if limit else NOTIFY_SECONDS
        self._notify_at = 0.0 if address else float("inf")
        self._message = b"READY=1\nWATCHDOG=1"
        self._address = "\0" + address[1:] if address.startswith("@") else address

    def __call__(self) -> None:
        """Notes a turn, and says so now and then."""
        now = self._clock()
        if now >= self._notify_at and self._pid == os.getpid():  # A forked child does not speak for its parent.
            self._notify_at = now + self._period
            with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as notify:
                notify.sendto(self._message, self._address)  # Fails if the watcher is gone or its queue is full.
                self._message = b"WATCHDOG=1"


class Listener:
    """A launcher's end of sd_notify, for one life of one program."""

    def __init__(self, limit: float) -> None:
        """`limit`: seconds of silence that are too long, which the program is told."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind("")  # The kernel finds a free name, and takes it back by itself.
        name = bytes(self._socket.getsockname())[1:].decode()
        self.environment = {"NOTIFY_SOCKET": f"@{name}", "WATCHDOG_USEC": str(int(limit * 1e6))}

    def heard(self) -> bool:
        """Whether there was a sign since the last call."""
        heard = False
        with suppress(BlockingIOError):
            while True:
                heard |= b"WATCHDOG=1" in self._socket.recv(4096)
        return heard

    def close(self) -> None:
        """Gives the name back."""
        self._socket.close()


def is_traced(pid: int) -> bool:
    """Whether a debugger holds the process: it is not stuck then, but looked at."""
    try:
        with open(f"/proc/{pid}/status") as file:
            return any(line.startswith("TracerPid:") and line.split()[1] != "0" for line in file)
    except OSError:
        return False
