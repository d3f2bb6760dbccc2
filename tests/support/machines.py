"""The machines of a test: network namespaces with their own addresses on one bridge.

Each has its own host name, /dev/shm, home folder and installation of this package. Needs root on Linux.
"""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import apex
from apexreplay.process.spawn import PIPE, spawn

ROOT = Path(apex.__file__).parent.parent
NETWORK = "10.77.0"
INSTALLED = {"python": 'exec {python} "$@"', "apex": 'exec {python} -m apex "$@"'}


class Machines:
    """The machines; they and their programs end with this object."""

    def __init__(self, folder: Path, *names: str) -> None:
        """The first machine is the one where users work; it also has the bridge."""
        self.folder = folder
        self._holders = {}
        self._programs = []
        self.addresses = {name: f"{NETWORK}.{number}" for number, name in enumerate(names, 1)}
        for name in names:
            self._make(name)
        self.here = names[0]
        self.run(self.here, "ip link add name bridge type bridge && ip link set bridge up")
        self.run(self.here, f"ip addr add {self.addresses[self.here]}/24 dev bridge")
        for number, name in enumerate(names[1:]):
            self.run(self.here, f"ip link add port{number} master bridge up type veth peer eth0 netns {self.pid(name)}")
            self.run(name, f"ip addr add {self.addresses[name]}/24 dev eth0 && ip link set eth0 up")

    def _make(self, name):
        binaries = self.folder / name / "apex-zeromq" / ".venv" / "bin"
        binaries.mkdir(parents=True)
        for program, line in INSTALLED.items():
            path = binaries / program
            path.write_text(f"#!/bin/sh\nexport PYTHONPATH={ROOT}\n{line.format(python=sys.executable)}\n")
            path.chmod(0o755)
        script = f"hostname {name}; mount -t tmpfs none /dev/shm && ip link set lo up && echo ready && exec sleep 1000"
        holder = spawn(["unshare", "--net", "--mount", "--uts", "sh", "-c", script], output=PIPE, errors=None)
        self._holders[name] = holder
        assert holder.stdout.readline() == b"ready\n"
        (self.folder / name / "pid").write_text(str(holder.pid))

    def pid(self, name):
        return self._holders[name].pid

    def home(self, name):
        return self.folder / name / "apex-zeromq"

    def command(self, name, script):
        where = ["nsenter", "--target", str(self.pid(name)), "--net", "--mount", "--uts"]
        return [*where, "sh", "-c", f"cd {self.home(name)} && export PATH=$PWD/.venv/bin:$PATH && {script}"]

    def run(self, name, script):
        """Runs the script there and waits for its end."""
        return subprocess.run(
            self.command(name, script), check=True, capture_output=True, text=True, timeout=300
        ).stdout

    def start(self, name, script, log):
        """Starts a program there, in the folder of the installation; returns the process, which writes to `log`."""
        with open(log, "w") as file:
            process = subprocess.Popen(self.command(name, f"exec {script}"), stdout=file, stderr=subprocess.STDOUT)
        self._programs.append(process)
        return process

    def processes(self, name, *parts):
        """Returns the processes of a machine whose command lines contain all `parts`, except those of the test."""
        own = os.readlink(f"/proc/{self.pid(name)}/ns/net")
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                line = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                is_there = os.readlink(path / "ns" / "net") == own and int(path.name) != self.pid(name)
                if is_there and line and all(part in line for part in parts):
                    found.append(int(path.name))
        return sorted(found)

    def close(self):
        for name, holder in self._holders.items():
            for pid in self.processes(name):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            holder.kill()
            holder.wait()
            holder.stdout.close()
        for process in self._programs:
            process.kill()
            process.wait()


def can_make_machines():
    """Returns whether this user can create machines, and has the programs."""
    if os.geteuid() or not all(map(shutil.which, ("unshare", "nsenter", "ip", "setsid"))):
        return False
    script = "ip link add name bridge type bridge && ip link add one type veth peer two && hostname trial"
    trial = ["unshare", "--net", "--mount", "--uts", "sh", "-c", script]
    return not subprocess.run(trial, capture_output=True).returncode
