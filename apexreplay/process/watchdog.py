"""Heartbeats: detects processes that are stuck because they are stopped, deadlocked or in an endless computation.

A loop sends a heartbeat in each iteration, also while it waits. A program sends heartbeats by systemd's watchdog
protocol (sd_notify), to the launcher or to systemd. A child process counts them in memory shared with its parent.
"""

from __future__ import annotations

import mmap
import os
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable, MutableMapping
from contextlib import suppress

NOTIFY_SECONDS = 1.0  # time between two messages to the watcher; shorter if systemd's WatchdogSec is short
START_FACTOR = 5  # multiplies the limit until the first heartbeat, because torch loads slowly from a cold disk
CREDENTIALS = "iII"  # process id, user id and group id of a message's sender
CREDENTIALS_BYTES = socket.CMSG_SPACE(struct.calcsize(CREDENTIALS))
LOOKS = 4  # minimum number of checks before a process counts as stuck
ABORT_SECONDS = 1.0  # time for a stuck process to log its stack traces


class Pulse:
    """Heartbeats of a child process, and its parent's request to stop, in memory that is shared before the fork."""

    def __init__(self) -> None:
        self._cells = memoryview(mmap.mmap(-1, 16)).cast("Q")

    def tick(self) -> None:
        """Counts one heartbeat; called by the child."""
        self._cells[0] += 1

    def count(self) -> int:
        """Returns the number of heartbeats so far."""
        return self._cells[0]

    def request_stop(self) -> None:
        """Requests the child to stop; called by the parent."""
        self._cells[1] = 1

    @property
    def is_stop_requested(self) -> bool:
        """Whether the parent has requested the child to stop."""
        return bool(self._cells[1])


class StuckDetector:
    """Decides whether a process is stuck, because it has sent no heartbeat for too long.

    One check adds at most a quarter of the limit to `silence`, because the watcher itself may have been suspended.
    """

    def __init__(
        self, count: Callable[[], int], pid: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`count` returns the number of heartbeats so far. `pid`: the process; None: this process."""
        self.silence = 0.0  # seconds without a heartbeat
        self._count = count
        self._pid = os.getpid() if pid is None else pid
        self._clock = clock
        self._counted = count()
        self._checked_at = clock()
        self.has_begun = False  # whether a check has seen a heartbeat

    def check(self, limit: float) -> bool:
        """Returns whether `silence` has reached `limit` (0: never). A process that a debugger traces is not stuck."""
        now, counted = self._clock(), self._count()
        if counted != self._counted:
            self.has_begun, self.silence = True, 0.0
        else:
            self.silence += min(now - self._checked_at, limit / LOOKS)
        self._counted, self._checked_at = counted, now
        if not 0 < limit * (1 if self.has_begun else START_FACTOR) <= self.silence:
            return False
        if is_traced(self._pid):
            self.silence = 0.0
        return self.silence > 0


def abort(pid: int, wait: Callable[[float], object]) -> None:
    """Makes a stuck process log its stack traces and end. `wait(seconds)` waits for its end, as long as allowed.

    The caller must kill the process then: a process that SIGSTOP has stopped does not end.
    """
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGABRT)
    with suppress(subprocess.TimeoutExpired):
        wait(ABORT_SECONDS)


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
        self._count = 0
        name = bytes(self._socket.getsockname())[1:].decode()
        self.environment = {"NOTIFY_SOCKET": f"@{name}", "WATCHDOG_USEC": str(int(limit * 1e6))}

    def count(self) -> int:
        """Returns the number of heartbeats so far. Ignores messages from other users."""
        with suppress(BlockingIOError):
            while True:
                message, [(_, _, sender), *_], _, _ = self._socket.recvmsg(4096, CREDENTIALS_BYTES)
                self._count += b"WATCHDOG=1" in message and struct.unpack(CREDENTIALS, sender)[1] == os.geteuid()
        return self._count

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
