"""Runs a server of tables with writers and samplers, kills them at random, and audits the memory."""

import multiprocessing
import os
import signal
import socket
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np

from apexreplay.files.atomic_files import unseal
from apexreplay.frames.encoder import make_targets, name_arrays
from apexreplay.frames.stack_decoder import StackDecoder
from apexreplay.process.spawn import PIPE, Process, spawn
from apexreplay.snapshots.folder import SnapshotFolder
from apexreplay.store.location import store_path
from apexreplay.store.reader import StoreReader

from .programs import run, sample, write
from .tables import KINDS, TOML, identify

CAPACITY = 400_000
NUM_WRITERS, NUM_SAMPLERS = 2, 2
READY_SECONDS = 120.0  # only failing campaigns wait that long
SETTINGS = f"capacity = {CAPACITY}\nmax_bytes = 100_000_000\npriority_exponent = 0.0\nsegment_length = 20\n"
_fork = multiprocessing.get_context("fork")


class BrokenError(Exception):
    """A promise is broken, or a program has failed."""


class Audit(NamedTuple):
    """What the memory has."""

    items: int
    acknowledged: int
    lost: int
    twice: int


class Campaign:
    """One server of a table of each kind in `kinds`, in `folder`, with its writers and samplers."""

    def __init__(self, folder: Path, kinds: list[str], seed: int) -> None:
        self._folder, self._kinds, self._rng = folder, kinds, Random(seed)
        self._snapshots = folder / "snapshots"
        self._toml = folder / "tables.toml"
        self._toml.write_text("".join(f"[{kind}]\n{SETTINGS}{TOML[kind]}\n" for kind in kinds))
        self._port = free_ports(1 + 10 * len(kinds))
        self._programs: dict[tuple[str, str, int], multiprocessing.Process] = {}  # (program, kind, place) -> process
        self._count = 0  # of programs started
        self._writers: dict[str, list[int]] = {kind: [] for kind in kinds}
        self._log = (folder / "server.log").open("ab")
        self._server: Process | None = None
        self._is_ready = False
        self.kills: Counter[str] = Counter()

    # --- programs ---------------------------------------------------------------------------------------------------

    def start_server(self) -> None:
        """Starts the server."""
        command = [sys.executable, "-m", "apexreplay", "serve", f"--table={self._toml}", f"--port={self._port}"]
        command += [f"--snapshots={self._snapshots}", "--snapshot-seconds=2", "--ready"]
        self._server = spawn(command, output=PIPE, errors=self._log)
        self._is_ready = False

    def wait_until_ready(self) -> None:
        """Waits until the server says that it is ready."""
        if self._is_ready:
            return
        assert self._server is not None
        assert self._server.stdout is not None
        line = self._server.stdout.readline()  # The server's end ends the wait, too.
        if line != b"ready\n":
            raise BrokenError(f"the server ended with status {self._server.wait()}; see {self._log.name}")
        self._is_ready = True

    def stop_server(self, signum: int) -> None:
        """Ends the server, and waits for the end of its main process."""
        assert self._server is not None
        assert self._server.stdout is not None
        self._server.send_signal(signum)
        self._server.wait()
        self._server.stdout.close()

    def start_programs(self) -> None:
        """Starts the writers and samplers that are missing."""
        for kind in self._kinds:
            wanted = [("writer", place) for place in range(NUM_WRITERS)]
            for name, place in [*wanted, *(("sampler", place) for place in range(NUM_SAMPLERS))]:
                if (name, kind, place) not in self._programs:
                    self._count += 1
                    number = self._count * 2 + (place % 2)  # The two samplers of a kind differ in how they draw.
                    function, notes = (write if name == "writer" else sample), self._notes(name, number)
                    arguments = function, self._folder / f"{name}-{number}.error", os.getpid(), self._port, kind
                    process = _fork.Process(target=run, args=(*arguments, number, notes))
                    process.start()
                    self._programs[name, kind, place] = process
                    if name == "writer":
                        self._writers[kind].append(number)

    def _notes(self, name: str, number: int) -> Path:
        return self._folder / f"{name}-{number}.txt"

    def check(self) -> None:
        """Raises Broken if a program has failed."""
        errors = [path.read_text() for path in self._folder.glob("*.error")]
        if errors:
            raise BrokenError("".join(errors))

    def kill(self) -> None:
        """Kills a program after a random time, and starts it again."""
        time.sleep(self._rng.choice((0.05, 0.3, 1.0)))
        self.check()
        victim = self._rng.choice(("server", "writer", "writer", "sampler", "sampler"))
        self.kills[victim] += 1
        if victim == "server":
            self.stop_server(signal.SIGKILL)
            self.start_server()
            if self._rng.random() < 0.8:  # Otherwise the next kill may come before the server is ready.
                self.wait_until_ready()
            return
        key = victim, self._rng.choice(self._kinds), self._rng.randrange(NUM_WRITERS)
        process = self._programs.pop(key)
        process.kill()
        process.join()
        self.start_programs()

    def stop_programs(self) -> None:
        """Asks all writers and samplers to end: the writers flush before."""
        for process in self._programs.values():
            process.terminate()
        for process in self._programs.values():
            process.join(READY_SECONDS)
            if process.exitcode is None:
                raise BrokenError(f"{process.name} does not end")
        self._programs.clear()
        self.check()

    def close(self) -> None:
        """Kills what still runs, and removes the memories."""
        for process in self._programs.values():
            process.kill()
            process.join()
        if self._server is not None and self._server.poll() is None:
            self.stop_server(signal.SIGTERM)
        self._log.close()
        for kind in self._kinds:
            for path in store_path(self.run_id(kind)).parent.glob(f"apex-{self.run_id(kind):016x}*"):
                path.unlink(missing_ok=True)

    # --- audit ------------------------------------------------------------------------------------------------------

    def run_id(self, kind: str) -> int:
        """Returns the id of a table's memory."""
        return int(unseal((self._snapshots / "server.json").read_bytes())["tables"][kind])

    def progress(self, name: str) -> int:
        """Returns the sum of the last numbers that the programs of this name have noted."""
        return sum(last_number(path) for path in self._folder.glob(f"{name}-*.txt"))

    def acknowledged(self, kind: str) -> dict[int, int]:
        """Returns the number of acknowledged items of each writer."""
        return {writer: last_number(self._notes("writer", writer)) for writer in self._writers[kind]}

    def read(self, kind: str) -> dict[int, tuple[int, int]]:
        """Returns (writer, counter) of each item in the memory, by key. Their contents are checked."""
        declared = KINDS[kind]
        reader = StoreReader(store_path(self.run_id(kind)), declared)
        # All weights are equal, so that each item is drawn at least once.
        draw = reader.draw(2 * reader.size + 1, np.random.default_rng(1))
        targets = make_targets(declared, len(draw.records))
        assert StackDecoder(declared, targets).decode_located(draw.frames, np.arange(len(draw.records))).all()
        fields = {
            **{name: draw.records[name] for name in draw.records.dtype.names or ()},
            **name_arrays(declared, targets),
        }
        writers, counters = identify(declared, fields)
        pairs = zip(writers.tolist(), counters.tolist(), strict=True)
        found = dict(zip(draw.records["key"].tolist(), pairs, strict=True))
        if len(found) != reader.size or reader.first_key:
            raise BrokenError(f"{kind}: read {len(found)} of {reader.size} items from key {reader.first_key} on")
        return found

    def audit(self, kind: str, items: dict[int, tuple[int, int]]) -> Audit:
        """Compares the items of a memory with what was acknowledged."""
        counts = Counter(items.values())
        acknowledged = self.acknowledged(kind)
        lost = sum(counts[writer, counter] == 0 for writer, end in acknowledged.items() for counter in range(end))
        twice = sum(count > 1 for count in counts.values())
        return Audit(len(items), sum(acknowledged.values()), lost, twice)

    def given_twice(self) -> int:
        """Returns the number of items that a queue gave more than once."""
        counts = Counter(line for path in self._folder.glob("*.keys") for line in path.read_text().split("\n")[:-1])
        return sum(count > 1 for count in counts.values())

    def newest_snapshot(self, kind: str) -> int:
        """Returns the first key that the newest snapshot of the table does not have."""
        snapshot = SnapshotFolder(self._snapshots / kind).newest()
        return 0 if snapshot is None else snapshot.end_key

    def remove_memories(self) -> None:
        """Removes the memories of a server that has ended, as a restart of the machine does."""
        for kind in self._kinds:
            store_path(self.run_id(kind)).unlink()


def last_number(path: Path) -> int:
    """Returns the number in the last complete line."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return int(lines[-1]) if lines else 0


def free_ports(count: int) -> int:
    """Returns the first of `count` free ports in a row."""
    for first in Random().sample(range(20_000, 32_000 - count), 50):
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise BrokenError("no free ports")
