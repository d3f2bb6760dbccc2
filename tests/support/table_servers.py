"""Servers of tables in processes of their own, which leave no process and no file."""

import os
import random
import re
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np
from support.waiting import DEADLINE

from apexreplay import serve, table
from apexreplay.process.spawn import PIPE, spawn

NUMBERS = table("numbers", {"x": "int64"})
SMALL = {"capacity": 1_000, "segment_length": 10, "num_streams": 4}


def group(leader):
    """Returns the processes of a server."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if os.getpgid(int(entry.name)) == leader:
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def memories(leader):
    """Returns the files in tmpfs that the processes of a server have mapped."""
    maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in group(leader))
    return {Path(name) for name in re.findall(r"/dev/shm/\S+", maps)}


@contextmanager
def starting_servers():
    """Yields a function that starts servers. At the end, none has left a process or a file."""
    with ExitStack() as stack:

        def start(*tables, **options):
            server = serve(tables, **options)
            leader, files = server.process.pid, memories(server.process.pid)
            assert files

            def stop():
                os.killpg(leader, signal.SIGCONT)
                server.close()
                assert group(leader) == []
                assert [path for path in files if path.exists()] == []

            stack.callback(stop)
            return server

        yield start


def append(writer, numbers):
    for x in numbers:
        writer.append({"x": x})


def read_all(sampler):
    """Returns all items of a table whose items have equal weights: `batch_size` is more than twice their number."""
    return all_items(sampler.sample(DEADLINE))


def all_items(batch):
    """Returns each item of the batch once, and checks that it has all items of the table."""
    assert 2 * batch.num_items < len(batch.keys)
    keys, first = np.unique(batch.keys, return_index=True)
    assert len(keys) == batch.num_items
    return batch["x"][first]


class Restarting:
    """A server by command, which is killed and started again on the same port."""

    def __init__(self, folder, port, *limits, keeps=True):
        """`limits`: further lines of TOML for the table."""
        self.port, self.files, self._keeps, self._table = port, set(), keeps, folder / "tables.toml"
        self._declare(limits)
        arguments = [f"--table={self._table}", f"--port={port}", "--ready"]
        arguments += [f"--snapshots={folder / 'snapshots'}"] * keeps
        self._command = [sys.executable, "-m", "apexreplay", "serve", *arguments]
        self._errors = (folder / "log").open("ab")
        self.start()

    def _declare(self, limits):
        lines = ("capacity = 1_000", "segment_length = 10", "priority_exponent = 0.0", "num_streams = 4")
        by_name = {line.split()[0]: line for line in (*lines, *limits)}
        self._table.write_text("\n".join(["[numbers]", *by_name.values(), 'steps.x = "int64"', ""]))

    def refusal(self, *limits):
        """Returns the message with which a start is refused whose table has these limits instead."""
        before = self._table.read_text()
        self._declare(limits)
        answer = subprocess.run(self._command, capture_output=True, text=True, timeout=DEADLINE)
        self._table.write_text(before)
        assert answer.returncode == 2
        return answer.stderr.splitlines()[-1]

    def start(self, *limits):
        """Starts the server. `limits`: those of the table if they change."""
        if limits:
            self._declare(limits)
        self.process = spawn(self._command, output=PIPE, errors=self._errors)
        assert self.process.stdout.readline() == b"ready\n"
        self.files |= memories(self.process.pid)

    def end(self, signum, kill=os.kill):
        kill(self.process.pid, signum)
        self.process.wait()
        self.process.stdout.close()

    def restart(self):
        self.end(signal.SIGKILL)
        self.start()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.end(signal.SIGTERM)
        self._errors.close()
        left = [path for path in self.files if path.exists()]
        for path in left:
            path.unlink()
        assert left == [] or not self._keeps


def free_port(count=11):
    """Returns the first of `count` free ports in a row, below the range from which the kernel takes those of clients.

    Otherwise a client of a server that is away may connect to itself, and the server could not bind its port again.
    """
    while True:
        first = random.randrange(20_000, 32_000 - count)
        with ExitStack() as stack, suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
