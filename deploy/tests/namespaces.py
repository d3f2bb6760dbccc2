"""Machines in namespaces of network, mounts and processes, joined by a switch. Needs root, iproute2 and util-linux.

No namespace has a name: each lasts as long as its first process, which the kernel kills with the tests' own.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

NEW_NETWORK = 0x4000_0000  # <linux/sched.h>
TOOLS = ("ip", "unshare", "setpriv", "nsenter", "mount")
LOOK_SECONDS = 0.2
TICKS = os.sysconf("SC_CLK_TCK")  # a second, in /proc
SECONDS = 60.0  # that the kernel may take for anything here
ATTEMPT = """
ip link add bridge0 type bridge
ip link add port0 type veth peer name eth0
ip rule add ipproto tcp dport 21001 blackhole
mount -t tmpfs tmpfs /mnt
mkdir /mnt/above /mnt/work
mount -t overlay -o lowerdir=/opt,upperdir=/mnt/above,workdir=/mnt/work overlay /opt
"""

Result = TypeVar("Result")


class Network:
    """A namespace of network, and perhaps others, that its first process keeps."""

    def __init__(
        self, words: Sequence[str], command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        """`words` are `unshare`'s, `command` is the first process; `environment` comes on top of this process's."""
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", *words, *command],
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
        """Waits until its namespaces are made, and holds the network's."""
        link = Path(f"/proc/{self.pid}/ns/net")
        wait_until(lambda: os.readlink(link) != os.readlink("/proc/self/ns/net"), "a namespace of network")
        self._descriptor = os.open(link, os.O_RDONLY | os.O_CLOEXEC)

    @property
    def pid(self) -> int:
        """Of a process in it, of the tests' own process namespace."""
        return self.process.pid

    def ip(self, *lines: str) -> None:
        """Has `ip` carry these out in it."""
        command = ["nsenter", f"--net=/proc/{self.pid}/ns/net", "ip", "-batch", "-"]
        done = subprocess.run(command, input="\n".join(lines) + "\n", capture_output=True, text=True, timeout=SECONDS)
        assert done.returncode == 0, f"{done.stderr}\n{lines}"

    def within(self, function: Callable[[], Result]) -> Result:
        """Calls `function` in a thread that is in it. Sockets that it makes stay there, and so do their threads."""
        results: list[Result] = []
        errors: list[BaseException] = []

        def call() -> None:
            try:
                libc = ctypes.CDLL(None, use_errno=True)
                if libc.setns(self._descriptor, NEW_NETWORK):
                    raise OSError(ctypes.get_errno(), "setns")
                results.append(function())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return results[0]

    def kill(self) -> None:
        """Ends it and all its processes at once, as a power cut would: nobody is told."""
        self.process.kill()
        self.process.wait(SECONDS)
        if self.process.stdin:
            self.process.stdin.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class Switch(Network):
    """What machines are plugged into; it has addresses of its own, as whatever lies beyond the machines."""

    def __init__(self, addresses: Sequence[str], log: Path) -> None:
        super().__init__([], ["sleep", "infinity"], log)
        self._num_ports = 0
        self.ip(
            "link set lo up",
            # Without an address of its own, a bridge takes the lowest of its ports. Whenever that changes, each machine
            # sends to the old one until its ARP entry expires, half a minute later.
            "link add bridge0 address 02:00:00:00:00:01 type bridge",
            "link set bridge0 up",
            *(f"addr add {address}/32 dev bridge0" for address in addresses),
            "route add default dev bridge0",
        )

    def plug(self, machine: Machine) -> None:
        """Gives the machine its one interface, with its address; everything else is on the same link."""
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
        """Takes the cable out: what is sent from now on is lost, and nobody is told."""
        self.ip(f"link set {machine.port} down")

    def mend(self, machine: Machine) -> None:
        """Puts the cable back."""
        self.ip(f"link set {machine.port} up")


class Machine(Network):
    """A machine with processes, mounts and memory files of its own."""

    def __init__(
        self, name: str, address: str, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.address = address
        self.port = ""
        self.processes = 0  # their namespace
        words = ["--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        super().__init__(words, command, log, environment)

    def _settle(self) -> None:
        super()._settle()
        made = Path(f"/proc/{self.pid}/ns/pid_for_children")
        wait_until(made.exists, "the first process of a machine")  # The link leads nowhere before.
        self.processes = made.stat().st_ino

    @property
    def root(self) -> Path:
        """Its file system, seen from here."""
        return Path(f"/proc/{self.pid}/root")

    def tell(self, line: str) -> None:
        """Says a line to its first process."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        """See Network; returns when none of its processes is left."""
        super().kill()
        wait_until(lambda: self.processes not in process_namespaces(), f"{self.name}'s processes to be gone")


def process_namespaces() -> set[int]:
    """All that processes here are in."""
    return {namespace for _, namespace in _processes()}


class Stopwatch:
    """Seconds since it was made, without the share that programs other than these tests had of the processors."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._all, self._ours = _processor_seconds()

    def read(self) -> float:
        """The seconds. Never less than a tenth of the clock's, so that a wait beside busy programs has an end."""
        seconds, (now, ours) = time.monotonic() - self._begin, _processor_seconds()
        own = sum(used - self._ours.get(namespace, 0.0) for namespace, used in ours.items())
        return seconds * min(1.0, max(0.1, own / max(now - self._all, 1e-9)))


def _processor_seconds() -> tuple[float, dict[int, float]]:
    """What all programs have used so far; and what this process and each machine has, by process namespace."""
    own, ours = os.stat("/proc/self/ns/pid").st_ino, {}
    for process, namespace in _processes():
        with suppress(OSError):
            if namespace != own or process == os.getpid():
                stat = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
                times = stat[11:13] if namespace == own else stat[11:15]  # there with those of children that have ended
                ours[namespace] = ours.get(namespace, 0.0) + sum(map(int, times)) / TICKS
    user, nice, system, _, _, irq, softirq = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + irq + softirq) / TICKS, ours


def _processes() -> Iterator[tuple[int, int]]:
    """The id and the process namespace of each process here."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # It has just ended.
                yield int(entry.name), os.stat(entry / "ns/pid").st_ino


def wait_until(
    condition: Callable[[], object], what: str, seconds: float = SECONDS, why: Callable[[], object] = str
) -> None:
    """Looks until it holds; fails after so many seconds by a Stopwatch, and says `why`."""
    deadline, watch = time.monotonic() + seconds, Stopwatch()
    while not condition():
        if time.monotonic() > deadline:  # Reading the watch takes a while.
            assert watch.read() < seconds, f"waited {seconds:.0f} s for {what} {why()}"
        time.sleep(LOOK_SECONDS)
    print(f"{what} after {watch.read():.1f} s", file=sys.stderr)


def missing() -> str:
    """Why there can be no such machines here; "" if there can."""
    absent = [program for program in TOOLS if shutil.which(program) is None]
    if absent:
        return f"not installed: {', '.join(absent)}"
    if os.geteuid() != 0:
        return "not root"
    attempt = ["unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "sh", "-euc", ATTEMPT]
    done = subprocess.run(attempt, capture_output=True, text=True, timeout=SECONDS)
    return f"the kernel lets nobody make them: {done.stderr.strip()}" if done.returncode else ""
