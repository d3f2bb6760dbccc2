"""Heartbeats: detects processes that are stuck because they are stopped, deadlocked or in an endless computation.

A loop sends a heartbeat in each iteration, also while it waits. A program sends heartbeats by systemd's watchdog
protocol (sd_notify), to the launcher or to systemd. A child process counts them in memory shared with its parent.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import time
from collections.abc import Callable, MutableMapping
from contextlib import suppress

NOTIFY_SECONDS = 1.0  # time between two messages to the watcher; shorter if systemd's WatchdogSec is short
START_FACTOR = 5  # multiplies the limit until the first heartbeat, because torch loads slowly from a cold disk
CREDENTIALS = "iII"  # process id, user id and group id of a message's sender
CREDENTIALS_BYTES = socket.CMSG_SPACE(struct.calcsize(CREDENTIALS))
LOOKS = 4  # minimum number of checks before a process counts as stuck


class Pulse:
    """Heartbeats of a child process, counted in memory that is shared before the fork."""

    def __init__(self) -> None:
        self._cell = memoryview(mmap.mmap(-1, 8)).cast("Q")

    def tick(self) -> None:
        """Counts one heartbeat; called by the child."""
        self._cell[0] += 1

    @property
    def ticks(self) -> int:
        """The number of heartbeats so far."""
        return self._cell[0]


class Silence:
    """Measures how long a process has sent no heartbeat.

    One check adds at most a quarter of the limit to `seconds`, because the watcher itself may have been suspended.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = 0.0
        self._clock = clock
        self._looked_at = clock()
        self._begun = False

    def look(self, heard: bool, limit: float) -> bool:
        """Returns whether the silence reaches `limit` (0: never). `heard`: a heartbeat arrived since the last call."""
        now = self._clock()
        self._begun |= heard
        self.seconds = 0.0 if heard else self.seconds + min(now - self._looked_at, limit / LOOKS)
        self._looked_at = now
        return 0 < limit * (1 if self._begun else START_FACTOR) <= self.seconds


def take_notifier(
    environment: MutableMapping[str, str] = os.environ, clock: Callable[[], float] = time.monotonic
) -> Notifier:
    """Creates the notifier that systemd's variables request; removes them, so that children do not inherit them."""
    address = environment.pop("NOTIFY_SOCKET", "")
    return Notifier(address, float(environment.pop("WATCHDOG_USEC", "0")) / 1e6, clock)


class Notifier:
    """The sending end of sd_notify: each call is a heartbeat. Sends nothing without an address."""

    def __init__(self, address: str, limit: float, clock: Callable[[], float]) -> None:
        """`limit`: seconds without a heartbeat that the watcher allows; 0: unknown."""
        self._clock = clock
        self._pid = os.getpid()
        self._period = min(NOTIFY_SECONDS, limit / LOOKS) if limit else NOTIFY_SECONDS
        self._notify_at = 0.0 if address else float("inf")
        self._message = b"READY=1\nWATCHDOG=1"
        self._address = "\0" + address[1:] if address.startswith("@") else address

    def __call__(self) -> None:
        """Counts a heartbeat and sends a message once per period."""
        now = self._clock()
        # A forked child inherits this object, but must not send heartbeats on behalf of its parent.
        if now >= self._notify_at and self._pid == os.getpid():
            self._notify_at = now + self._period
            with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as notify:
                notify.sendto(self._message, self._address)  # Fails if the watcher is gone or its queue is full.
                self._message = b"WATCHDOG=1"


class Listener:
    """The launcher's receiving end of sd_notify, for one start of one program."""

    def __init__(self, limit: float) -> None:
        """`limit`: seconds without a heartbeat that are allowed; passed to the program in `environment`."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind("")  # The kernel chooses an unused name and releases it automatically.
        name = bytes(self._socket.getsockname())[1:].decode()
        self.environment = {"NOTIFY_SOCKET": f"@{name}", "WATCHDOG_USEC": str(int(limit * 1e6))}

    def heard(self) -> bool:
        """Returns whether a heartbeat arrived since the last call. Ignores messages from other users."""
        heard = False
        with suppress(BlockingIOError):
            while True:
                words, [(_, _, sender), *_], _, _ = self._socket.recvmsg(4096, CREDENTIALS_BYTES)
                heard |= b"WATCHDOG=1" in words and struct.unpack(CREDENTIALS, sender)[1] == os.geteuid()
        return heard

    def close(self) -> None:
        """Closes the socket and releases its name."""
        self._socket.close()


def is_traced(pid: int) -> bool:
    """Returns whether a debugger traces the process, which then does not count as stuck."""
    try:
        with open(f"/proc/{pid}/status") as file:
            return any(line.startswith("TracerPid:") and line.split()[1] != "0" for line in file)
    except OSError:
        return False
