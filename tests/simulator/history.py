"""One simulated history of a run: its world, its faults, and what must hold when all faults have ended."""

import logging
import os
import random
import tempfile
import traceback
from collections import Counter
from contextlib import contextmanager
from errno import ENOSPC
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
from support.builders import RUN, VECTORS
from support.clocks import Clock
from support.store_builders import STEPS
from support.trainers import NETWORK

from apex.config import ActorConfig, Config, LearnerConfig, ReplayConfig, TransportConfig, to_dict
from apex.replay_memory.settings import store_settings
from apex.runs.folder import RunFolder
from apex.transport.hello import Route, Welcome
from apexreplay.sampling.sampler_counters import SamplerCounters

from .actor_host import ActorHost
from .ledger import LEASE_SECONDS, Ledger, require
from .network import Network
from .programs import HEARTBEAT_SECONDS, Learner
from .replay_program import ReplayProgram

NUM_SHARDS = 2
NUM_ACTORS = 4
SIZES = [(40, 100_000), (1_000, 1_500), (1_000, 200_000)]  # of each shard: transitions, bytes; the last evicts nothing
SETTLE_SECONDS = 90.0  # after all faults have ended, everything must be acknowledged within this time
SNAPSHOT_STEPS = ["copy", "check", "copy weights", "write a file", "write the manifest", "rename the manifest"]


class Result(NamedTuple):
    """What a seed gave."""

    seed: int
    failure: str  # "": every promise was kept
    events: list[str]
    counts: Counter


class World:
    """Hosts, programs, network and clock of one history."""

    def __init__(self, seed, folder):
        self.rng, self.numbers = random.Random(seed), np.random.default_rng(seed)
        self.folder, self.clock = folder, Clock()
        self.counts, self.events = Counter(), []
        self.wall = 1_800_000_000.0  # wall clock, in Unix seconds
        self.full_until = 0.0  # tmpfs
        self.sends = True
        self.network = Network(self.rng, self.clock)
        self.ledger = Ledger(self.clock, self.counts)
        self.window = self.rng.choice([1, 2, 8, 64])
        capacity, max_bytes = self.rng.choice(SIZES)
        config = Config(
            network=NETWORK,
            actor=ActorConfig(num_actors=NUM_ACTORS, segment_length=8),
            learner=LearnerConfig(batch_size=2),
            replay=ReplayConfig(
                num_shards=NUM_SHARDS, capacity=NUM_SHARDS * capacity, max_bytes=NUM_SHARDS * max_bytes,
                min_size_to_sample=2,
            ),
            transport=TransportConfig(heartbeat_seconds=HEARTBEAT_SECONDS, lease_seconds=LEASE_SECONDS),
        )  # fmt: skip
        for name in ("run/curves", "run/checkpoints", "run/tensorboard"):
            (folder / name).mkdir(parents=True)
        self.run = RunFolder(
            folder / "run", {"run_id": RUN, "schema": VECTORS.to_dict(), "config": to_dict(config), "name": "run"}
        )
        facts = {"run_id": RUN, "schema": VECTORS, "num_parameters": 10, "memory": "", "replay": [], "streams": []}
        self.welcome = Welcome(route=Route("learner", 1), session=0, config=config, **facts)
        self.learner = Learner(self)
        # The first host of each shard always has a server; the second one if an operator starts one there.
        servers = [
            ReplayProgram(self, host, shard, starts=host == "a", restarts=host == "a")
            for shard in range(NUM_SHARDS)
            for host in "ab"
        ]
        self.servers = {server.name: server for server in servers}
        self.hosts = [ActorHost(self, number) for number in range(2)]
        self.programs = [self.learner, *servers, *self.hosts]

    def note(self, event):
        """Adds to the history that is printed if a promise is broken."""
        self.events.append(f"{self.clock.now:8.2f}  {event}")

    def wall_clock(self):
        return self.wall + self.clock.now

    def allocate(self, descriptor, offset, length):
        """Stands for `os.posix_fallocate`."""
        if self.clock.now < self.full_until:
            raise OSError(ENOSPC, "no space left on device")
        os.ftruncate(descriptor, offset + length)

    def advance(self, seconds):
        """Lets time pass: messages arrive, and each program makes one turn."""
        self.clock.now += seconds
        self.network.deliver()
        for program in self.programs:
            program.step()

    def run_history(self):
        for _ in range(self.rng.randint(40, 160)):
            if self.rng.random() < 0.1:
                self.fault()
            self.advance(self.rng.choice([0.01, 0.05, 0.3, 1.0]))
        self.heal()
        until = self.clock.now + SETTLE_SECONDS
        while not self.settled:
            require(self.clock.now < until, f"not settled {SETTLE_SECONDS:.0f} s after the last fault")
            self.advance(0.25)
        for server in self.servers.values():
            if server.store is not None:
                self.ledger.check(server.store)

    def heal(self):
        """Ends all faults, and sends nothing new."""
        self.note("all faults end")
        self.network.heal()
        self.sends, self.full_until = False, 0.0
        for server in self.servers.values():
            server.crash_at = ""
        for program in self.programs:
            program.stopped_until = 0.0

    @property
    def settled(self):
        """Whether each shard has a server, each host has joined, and everything that they sent is acknowledged."""
        served = {server.shard for server in self.servers.values() if server.joined}
        return len(served) == NUM_SHARDS and all(host.joined and not host.sender.in_flight for host in self.hosts)

    def close(self):
        for server in self.servers.values():
            if server.store is not None:
                server.store.close()

    # --- faults -----------------------------------------------------------------------------------------------------

    def fault(self):
        """Draws one fault."""
        kind = self.rng.choices(list(FAULTS), FAULTS.values())[0]
        live = [server for server in self.servers.values() if server.joined]
        server = self.rng.choice(live) if live else None
        if server is None and kind in OF_A_SERVER:
            return
        self.note(f"FAULT {kind.__name__.replace('_', ' ')} {server.name if kind in OF_A_SERVER else ''}".rstrip())
        self.counts[kind.__name__] += 1
        kind(self, server)


def kill_a_server(world, server):
    server.end("a server was killed")


def crash_during_an_insert(world, server):
    server.crash_at = world.rng.choice(STEPS)


def lose_a_memory(world, server):
    server.end("a server was killed")
    server.path.unlink(missing_ok=True)


def remove_a_memory_in_use(world, server):
    server.path.unlink(missing_ok=True)


def flip_a_bit(world, server):
    server.end("a server was killed")
    if not server.path.exists():  # It was removed a moment ago.
        return
    data = np.memmap(server.path, np.uint8, "r+")
    offsets = store_settings(world.welcome.config.replay, NUM_ACTORS).sizes.offsets(VECTORS.table)
    begin, end = world.rng.choice(list(pairwise(offsets)))
    offset = begin + int((end - begin) * world.rng.random() ** 4)  # Regions are filled from their beginning.
    data[offset] ^= 1 << world.rng.randrange(8)
    server.flipped = True
    world.note(f"byte {offset} of {server.name} has a flipped bit")


def take_a_snapshot(world, server):
    server.take_snapshot()


def crash_during_a_snapshot(world, server):
    server.snapshot_crash_at = world.rng.choice(SNAPSHOT_STEPS)
    server.take_snapshot()


def fill_a_disk(world, server):
    server.disk_is_full = True
    server.take_snapshot()


def fill_tmpfs(world, server):
    lose_a_memory(world, server)
    world.full_until = world.clock.now + world.rng.uniform(0, 10)


def start_a_second_server(world, server):
    other = world.servers[f"b{world.rng.randrange(NUM_SHARDS)}"]
    if not other.alive:
        other.back_at = world.clock.now
    if world.rng.random() < 0.7:  # Usually because the first server seems to be gone.
        cut(world, f"a{other.shard}", ["learner"])


def kill_a_host(world, server):
    world.rng.choice(world.hosts).end("a host was killed")


def end_a_host(world, server):
    host = world.rng.choice(world.hosts)
    if host.joined:
        host.leave("a host left")


def restart_the_learner(world, server):
    world.wall += world.rng.choice([0, 0, 86_400, -86_400])
    world.learner.kill()


def stop_a_program(world, server):
    program = world.rng.choice(world.programs)
    program.stopped_until = world.clock.now + world.rng.choice([1, 5, 30])


def cut_the_network(world, server):
    names = ["learner", *world.servers, *(host.name for host in world.hosts)]
    one = world.rng.choice(names)
    cut(world, one, world.rng.choice([names, [world.rng.choice(names)]]))


def cut(world, one, others):
    seconds = world.rng.choice([2, 8, 20, 60])
    world.note(f"{one} is cut off from {', '.join(others)} for {seconds} s")
    for other in others:
        world.network.cut(one, other, seconds)


OF_A_SERVER = (
    kill_a_server, crash_during_an_insert, lose_a_memory, remove_a_memory_in_use, flip_a_bit, take_a_snapshot,
    crash_during_a_snapshot, fill_a_disk, fill_tmpfs,
)  # fmt: skip
FAULTS = {  # how often, relative to the others
    kill_a_server: 2, crash_during_an_insert: 5, lose_a_memory: 2, remove_a_memory_in_use: 1, flip_a_bit: 2,
    take_a_snapshot: 10, crash_during_a_snapshot: 2, fill_a_disk: 1, fill_tmpfs: 1, start_a_second_server: 1,
    kill_a_host: 2, end_a_host: 1, restart_the_learner: 2, stop_a_program: 2, cut_the_network: 3,
}  # fmt: skip


@contextmanager
def _simulated(world):
    """Replaces what would make a history depend on the time, on chance or on this machine."""
    with (
        mock.patch("os.posix_fallocate", world.allocate),
        mock.patch("secrets.randbits", world.rng.getrandbits),
        mock.patch("secrets.randbelow", world.rng.randrange),
        # Without a file, which a real server keeps open until it ends.
        mock.patch("apexreplay.server.open_store.SamplerCounters", lambda num_rows, path: SamplerCounters(num_rows)),
        mock.patch.object(logging.getLogger("apex"), "disabled", True),
        mock.patch.object(logging.getLogger("apexreplay"), "disabled", True),
    ):
        yield


def simulate(seed):
    """Runs the history of a seed."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="sim-") as folder:
        world, failure = World(seed, Path(folder)), ""
        with _simulated(world):
            try:
                world.run_history()
            except Exception as error:
                lines = traceback.format_exception(error)
                failure = str(error) if isinstance(error, AssertionError) else "".join(lines)
            finally:
                world.close()
    return Result(seed, failure, world.events, world.counts)


def describe(result):
    """Returns a failure with its history and the line that repeats it."""
    history = "\n".join(result.events)
    return f"{history}\nseed {result.seed}: {result.failure}\npython -m tests.simulator --first {result.seed} --seeds 1"
