"""Ray clusters with several nodes on this machine; all processes end with their test. It never runs `ray stop`."""

import os
import secrets
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from support.waiting import until

from apex.runtime.ports import is_free

RAY = Path(sys.executable).parent / "ray"
SMALL = ["--object-store-memory", "80000000", "--disable-usage-stats"]


class RayCluster:
    """Raylets, each of which is a node to Ray, and the programs that use them."""

    def __init__(self, folder, num_cpus, *, dashboard=False, token=True):
        self.folder = folder
        self.port, self.dashboard = [port for port in range(26_379, 27_000) if is_free("127.0.0.1", port)][:2]
        self.nodes = []
        self.programs = []
        self.environment = {
            **os.environ,
            "RAY_AUTH_MODE": "token" if token else "disabled",
            "RAY_AUTH_TOKEN": secrets.token_hex(16) if token else "",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
        }
        # Sockets have a path of at most 107 characters.
        self.temporary = subprocess.check_output(["mktemp", "-d", "/tmp/ray-XXXXX"], text=True).strip()
        ports = ["--port", str(self.port), f"--include-dashboard={str(dashboard).lower()}"]
        ports += ["--dashboard-port", str(self.dashboard)]
        self.add_node(num_cpus, "--head", *ports, "--temp-dir", self.temporary)
        self.address = self.output(0).partition("--address='")[2].partition("'")[0]
        self.environment["RAY_ADDRESS"] = self.address

    def output(self, node):
        return (self.folder / f"node-{node}.log").read_text()

    def add_node(self, num_cpus, *options):
        """Starts a node; returns its number."""
        node = len(self.nodes)
        arguments = options or ["--address", self.address]
        with open(self.folder / f"node-{node}.log", "w") as log:
            command = [RAY, "start", "--block", "--num-cpus", str(num_cpus), *SMALL, *arguments]
            self.nodes.append(self._start(command, log))
        until(lambda: "Ray runtime started" in self.output(node), f"node:\n{self.output(node)}", seconds=240.0)
        return node

    def kill_node(self, node):
        """Kills a node and all its processes, as if its machine were switched off."""
        processes = self._session(self.nodes[node].pid)
        for pid in [*processes, *self._descendants(processes)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.nodes[node].wait()

    def start(self, name, *arguments, cwd=None):
        """Starts a program of this package there, or another program."""
        command = [sys.executable, "-m", *arguments] if arguments[0] == "apex" else arguments
        log = self.folder / f"{name}.log"
        with open(log, "w") as file:
            program = self._start(command, file, cwd or self.folder)
        self.programs.append(program)
        program.output = log.read_text
        return program

    def _start(self, command, log, cwd=None):
        return subprocess.Popen(
            command, cwd=cwd or self.folder, env=self.environment, stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip

    def _session(self, leader):
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                if int(path.read_text().rpartition(")")[2].split()[3]) == leader:
                    found.append(int(path.parent.name))
        return found

    def _descendants(self, pids):
        """Guards and their programs have sessions of their own."""
        found, left = [], list(pids)
        while left:
            pid = left.pop()
            with suppress(OSError):
                children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
                found += map(int, children)
                left += map(int, children)
        return found

    def close(self):
        for program in self.programs:
            if program.poll() is None:
                program.terminate()
        for program in self.programs:
            with suppress(subprocess.TimeoutExpired):
                program.wait(30)
            program.kill()
            program.wait()
        for node in range(len(self.nodes))[::-1]:
            self.kill_node(node)
        time.sleep(0.1)
        subprocess.run(["rm", "-rf", self.temporary], check=False)


needs_ray = pytest.mark.skipif(not RAY.exists(), reason="needs Ray: pip install 'ray[default]'")


def apex_processes(folder):
    """Returns guards and programs of runs below a folder, as process id and command line."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            line = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            if " -m apex" in line and os.readlink(path / "cwd").startswith(str(folder)):
                found[int(path.name)] = line
    return found
