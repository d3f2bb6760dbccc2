"""Machines in namespaces of network, mounts and processes, joined by a switch. Needs root, iproute2 and util-linux.

Namespaces have no names: each lasts as long as its first process, which ends with the tests' process.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

NEW_NETWORK = 0x4000_0000  # <linux/sched.h>
TOOLS = ("ip", "unshare", "setpriv", "nsenter", "mount")
LOOK_SECONDS = 0.2
SECONDS = 300.0  # deadline of a wait beside busy programs
ATTEMPT = """
ip link add bridge0 type bridge
ip link add port0 type veth peer name eth0
ip rule add ipproto tcp dport 21001 blackhole
mount -t tmpfs none /mnt
mkdir /mnt/above /mnt/work
mount -t overlay -o lowerdir=/opt,upperdir=/mnt/above,workdir=/mnt/work overlay /opt
"""

Result = TypeVar("Result")


class Network:
    """A namespace of network, and perhaps others, which lives as long as its first process."""

    def __init__(
        self, arguments: Sequence[str], command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        """`arguments`: of `unshare`. `command`: first process. `environment`: additions to that of this process."""
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", *arguments, *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                text=True,
                env={**os.environ, **(environment or {})},
            )
        self._descriptor = -1
        try:
            self._settle()
        except BaseException:
            self.kill()
            raise

    def _settle(self) -> None:
        """Waits until the namespaces exist, and opens the network namespace."""
        link = Path(f"/proc/{self.pid}/ns/net")
        wait_until(lambda: os.readlink(link) != os.readlink("/proc/self/ns/net"), "a namespace of network")
        self._descriptor = os.open(link, os.O_RDONLY | os.O_CLOEXEC)

    @property
    def pid(self) -> int:
        """The id of the network's first process, as the tests see it."""
        return self.process.pid

    def ip(self, *lines: str) -> None:
        """Executes these commands of `ip` inside the namespace."""
        command = ["nsenter", f"--net=/proc/{self.pid}/ns/net", "ip", "-batch", "-"]
        done = subprocess.run(command, input="\n".join(lines) + "\n", capture_output=True, text=True, timeout=SECONDS)
        assert done.returncode == 0, f"{done.stderr}\n{lines}"

    def within(self, function: Callable[[], Result]) -> Result:
        """Calls `function` in a thread inside it. Its sockets and threads stay inside."""

        def call() -> Result:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(self._descriptor, NEW_NETWORK):
                raise OSError(ctypes.get_errno(), "setns")
            return function()

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(call).result()

    def kill(self) -> None:
        """Kills all its processes at once, like a power failure."""
        self.process.kill()
        self.process.wait(SECONDS)
        if self.process.stdin:
            self.process.stdin.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class Switch(Network):
    """The switch that connects the machines. It also has the addresses of everything beyond them."""

    def __init__(self, addresses: Sequence[str], log: Path) -> None:
        super().__init__([], ["sleep", "infinity"], log)
        self._num_ports = 0
        self.ip(
            "link set lo up",
            # A bridge without an address of its own takes the lowest of its ports. Whenever that changes, machines send
            # to the old address until their ARP entries expire after half a minute.
            "link add bridge0 address 02:00:00:00:00:01 type bridge",
            "link set bridge0 up",
            *(f"addr add {address}/32 dev bridge0" for address in addresses),
            "route add default dev bridge0",
        )

    def plug(self, machine: Machine) -> None:
        """Connects the machine with its one interface and address; everything else is on the same link."""
        machine.port = f"port{self._num_ports}"
        self._num_ports += 1
        self.ip(
            f"link add {machine.port} type veth peer name eth0 netns {machine.pid}",
            f"link set {machine.port} master bridge0 up",
        )
        machine.ip(
            "link set lo up",
            f"addr add {machine.address}/32 dev eth0",
            "link set eth0 up",
            "route add default dev eth0",
        )

    def cut(self, machine: Machine) -> None:
        """Disconnects the machine's cable: packets are lost without an error."""
        self.ip(f"link set {machine.port} down")

    def mend(self, machine: Machine) -> None:
        """Reconnects the cable."""
        self.ip(f"link set {machine.port} up")


class Machine(Network):
    """A machine with processes, mounts and memory files of its own."""

    def __init__(
        self, name: str, address: str, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.address = address
        self.port = ""
        self.processes = 0  # process namespace
        arguments = ["--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        super().__init__(arguments, command, log, environment)

    def _settle(self) -> None:
        super()._settle()
        made = Path(f"/proc/{self.pid}/ns/pid_for_children")
        wait_until(made.exists, "the first process of a machine")  # The link has no target before.
        self.processes = made.stat().st_ino

    @property
    def root(self) -> Path:
        """Returns the root of its file system, as seen from this process."""
        return Path(f"/proc/{self.pid}/root")

    def send(self, line: str) -> None:
        """Sends a line to its first process."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        """See Network; returns when all its processes have ended."""
        super().kill()
        wait_until(lambda: self.processes not in process_namespaces(), f"{self.name}'s processes to be gone")


def process_namespaces() -> set[int]:
    """Returns the namespaces of all processes."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/ns/pid"):
        with suppress(OSError):  # The process has just ended.
            found.add(link.stat().st_ino)
    return found


def wait_until(
    condition: Callable[[], object], what: str, seconds: float = SECONDS, why: Callable[[], object] = str
) -> None:
    """Waits until the condition holds; fails after this number of seconds with the text of `why`."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() < begin + seconds, f"waited {seconds:.0f} s for {what} {why()}"
        time.sleep(LOOK_SECONDS)
    print(f"{what} after {time.monotonic() - begin:.1f} s", file=sys.stderr)


def missing() -> str:
    """Returns the reason why machines cannot be created here; "" if they can."""
    absent = [program for program in TOOLS if shutil.which(program) is None]
    if absent:
        return f"not installed: {', '.join(absent)}"
    if os.geteuid() != 0:
        return "not root"
    attempt = ["unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "sh", "-euc", ATTEMPT]
    done = subprocess.run(attempt, capture_output=True, text=True, timeout=SECONDS)
    return f"the kernel does not permit new namespaces: {done.stderr.strip()}" if done.returncode else ""
