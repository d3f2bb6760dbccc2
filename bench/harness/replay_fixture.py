"""A replay server under test with a writer that sends a recording; nothing is learned.

The server is a subprocess, started as `apex replay`. Coordinator and loaders are children of this process, as in the
learner. The benchmark replaces the trainer. On exit, all processes and files are removed.
"""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from apex.config import Config
from apex.config.role_command import role_command
from apex.facts import INTERRUPTED
from apex.learning.batch_ring import Batch, BatchRing
from apex.learning.coordinator.link import CoordinatorLink, TrainerEnd, TrainerStart
from apex.learning.coordinator.server import run_coordinator
from apex.learning.loader import LoaderTask, start_loaders
from apex.runs.folder import RunFolder
from apex.runtime.ports import choose_ports, is_free
from apex.transport.curve.key_store import read_keys
from apex.transport.run_codec import RunCodec
from apex.types import Progress, Role
from apexreplay.errors import ChildDiedError
from apexreplay.process.children import check_children, start_child, stop_children
from apexreplay.process.lifecycle import POLL_SECONDS, Stop
from apexreplay.process.spawn import spawn
from apexreplay.store.location import memory_folder
from apexreplay.transport.endpoints import PrioritySender
from apexreplay.transport.sockets import open_context
from bench.harness.programs import control_address
from bench.harness.recorded_writer import Inserted, write
from bench.harness.recording import Recording

LinkKind = Literal["tcp", "memory"]  # batches come over sockets, or from loaders that map the store
END_SECONDS = 10.0  # time for the server to end after the coordinator


class ReplayFixture:
    """The running server, with methods to insert, sample and return priorities."""

    def __init__(
        self,
        folder: RunFolder,
        ring: BatchRing,
        priorities: PrioritySender,
        writer: Connection,
        server: subprocess.Popen[bytes],
        check: Callable[[], None],
    ) -> None:
        self.config = folder.config
        self.schema = folder.schema
        self.run_id = folder.run_id
        self.longest_wait = 0.0  # longest wait for a batch, in seconds
        self.ring = ring
        self.priorities = priorities
        self._writer = writer
        self._server = server
        self.check = check

    @property
    def store(self) -> Path:
        """Path of the replay memory's file."""
        return next(memory_folder().glob(f"apex-{self.run_id:016x}*.replay"))

    @property
    def processes(self) -> list[int]:
        """Process ids of the replay server."""
        pid = self._server.pid
        return [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]

    def begin_insert(self, *, transitions: int = 0, seconds: float = 0.0, rate: float = 0.0) -> None:
        """Makes the writer send this number of transitions or for this time, at `rate` per second (0: unlimited)."""
        order = {"transitions": transitions, "seconds": seconds, "rate": rate}
        self._writer.send_bytes(json.dumps(order).encode())

    def end_insert(self) -> Inserted:
        """Waits until everything is acknowledged; returns the result."""
        while not self._writer.poll(POLL_SECONDS):
            self.check()
        return Inserted(*json.loads(self._writer.recv_bytes()))

    def receive(self) -> Batch:
        """Waits for the next batch."""
        began = time.monotonic()
        while True:
            self.check()  # Check each time, because there may always be a batch.
            batch = self.ring.receive(POLL_SECONDS)
            if batch is not None:
                self.longest_wait = max(self.longest_wait, time.monotonic() - began)
                return batch

    def answer(self, batch: Batch, priorities: Any) -> None:
        """Returns priorities, float32[B], to the server and the batch's memory to the ring."""
        for update in batch.updates(priorities):
            self.priorities.send(update)
        self.ring.release(batch.slot)


@contextmanager
def open_replay_fixture(
    config: Config, recording: Recording, folder: Path, link: LinkKind, stop: Stop, *, cuda: bool = False
) -> Iterator[ReplayFixture]:
    """Starts the programs. `stop` ends every wait with KeyboardInterrupt. `cuda`: batches are copied to a GPU."""
    config = choose_ports(config, is_free, lambda sentence: None)
    config = dataclasses.replace(
        config,
        transport=dataclasses.replace(config.transport, shared_memory=link == "memory"),
        run=dataclasses.replace(config.run, folder=str(folder), name=f"bench-{link}"),
    )
    run = RunFolder.create(config, recording.schema, argv=[])
    ring = BatchRing.configured(config.learner, config.replay.num_shards, run.schema, cuda=cuda)
    trainer_pipe, coordinator_pipe = Pipe()
    pipe, writer_pipe = Pipe()
    with ExitStack() as started:
        started.callback(_remove_memory, run.run_id)
        children = [start_child("coordinator", run_coordinator, run, 1, coordinator_pipe, trainer_pipe)]
        started.callback(stop_children, children)
        children.append(start_child("writer", write, recording, config, writer_pipe, pipe))
        coordinator_pipe.close()
        writer_pipe.close()
        server = _start_server(config)
        found: list[str] = []  # endpoint for priorities
        coordinator = CoordinatorLink(
            trainer_pipe, config.replay, lambda endpoint, shard: found.append(endpoint), Progress()
        )
        started.callback(_end_server, server, coordinator)

        def check() -> None:
            if stop.poll():
                raise KeyboardInterrupt
            check_children(children)
            if server.poll() is not None:
                raise ChildDiedError(f"the replay server ended with status {server.returncode}")

        coordinator.send(TrainerStart(num_parameters=1, updates=0, progress=Progress()))
        while not found:
            check()
            coordinator.receive()
            time.sleep(0.05)
        # The loaders start when the store exists, so that they find it, and before this process has a ZeroMQ context.
        ring.hosts[:] = found[0].removeprefix("tcp://").rpartition(":")[0]
        loader = LoaderTask(run.schema, ring, run.run_id, config)
        children += start_loaders(loader)
        keys = read_keys(config.transport.keys, Role.LEARNER)
        priorities = PrioritySender(started.enter_context(open_context(keys)), RunCodec(run.run_id, run.schema))
        priorities.connect(found[0])
        yield ReplayFixture(run, ring, priorities, pipe, server, check)


# --- start and end ----------------------------------------------------------------------------------------------------


def _start_server(config: Config) -> subprocess.Popen[bytes]:
    command = role_command(Role.REPLAY, learner=control_address(config), keys=config.transport.keys)
    with (Path(config.run.folder) / "replay.log").open("ab") as output:
        return spawn([sys.executable, "-m", "apex", *command], output=output, ends_by=signal.SIGTERM)


def _end_server(server: subprocess.Popen[bytes], coordinator: CoordinatorLink) -> None:
    """Ends the server as a run does; kills it if it does not end."""
    with suppress(ChildDiedError):
        coordinator.send(TrainerEnd(INTERRUPTED))
    with suppress(subprocess.TimeoutExpired):
        server.wait(END_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def _remove_memory(run_id: int) -> None:
    for path in memory_folder().glob(f"apex-{run_id:016x}*"):
        path.unlink(missing_ok=True)
