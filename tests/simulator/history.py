"""One simulated history: its world, its faults, and what must hold when all faults have ended."""

import logging
import os
import random
import tempfile
import traceback
from collections import Counter
from contextlib import ExitStack, contextmanager
from errno import ENOSPC
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
from support.builders import RUN, VECTORS
from support.clocks import Clock
from support.trainers import NETWORK

from apex.config import ActorConfig, Config, LearnerConfig, ReplayConfig, TransportConfig, to_dict
from apex.runs.folder import RunFolder
from apex.transport.hello import Route, Welcome
from apexreplay.sampling.sampler_counters import SamplerCounters
from apexreplay.server import leases

from .actor_host import ActorHost
from .content import TABLES
from .faults import FAULTS, FAULTS_OF_A_RUN, FAULTS_OF_TABLES, OF_A_SERVER
from .ledger import Ledger, require
from .network import Network
from .programs import HEARTBEAT_SECONDS, Learner
from .replay_program import ReplayProgram
from .table_server import SamplerHost, TableServer, WriterHost, draw_settings

LEASE_SECONDS = 3.5  # of the trainer
NUM_ACTORS = 4
SIZES = [(40, 100_000), (1_000, 1_500), (1_000, 200_000)]  # of each shard: transitions, bytes; the last evicts nothing
SETTLE_SECONDS = 90.0  # after all faults have ended, everything must be acknowledged within this time
# Kinds of tables: each history draws one, which every second seed replaces.
DRAWN, REPLACED = (
    ["transitions", "transitions", *list(TABLES)[:4], "several"],
    {"steps": "queue", "windows": "sequences"},
)
KINDS = {*DRAWN, *REPLACED.values()}


class Result(NamedTuple):
    """What a seed gave."""

    seed: int
    failure: str  # "": every promise was kept
    events: list[str]
    counts: Counter


class World:
    """Hosts, programs, network and clock of one history.

    A subclass adds `head`, the program that others join; `servers`, by name; `hosts`, which send; and `programs`.
    """

    lease_seconds: float
    faults: dict
    samplers = ()

    def __init__(self, rng, seed, folder):
        self.rng, self.numbers = rng, np.random.default_rng(seed)
        self.folder, self.clock = folder, Clock()
        self.counts, self.events = Counter(), []
        self.wall = 1_800_000_000.0  # wall clock, in Unix seconds
        self.full_until = 0.0  # tmpfs
        self.sends = True
        self.damaged = set()  # incarnations of stores with a flipped bit, until a server finds none that matters
        self.network = Network(self.rng, self.clock)
        self.ledger = Ledger(self.clock, self.counts, self.lease_seconds)
        self.window = self.rng.choice([1, 2, 8, 64])

    def note(self, event):
        """Adds to the history that is printed if a promise is broken."""
        self.events.append(f"{self.clock.now:8.2f}  {event}")

    def wall_clock(self):
        return self.wall + self.clock.now

    def allocate(self, descriptor, offset, length):
        """Stands for `os.posix_fallocate`."""
        if os.fstat(descriptor).st_size >= offset + length:
            return
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
        """Whether each store is served, each host has joined, everything sent is acknowledged, and samplers follow."""
        have_sent = all(host.joined and not host.sender.in_flight for host in self.hosts)
        return self.is_served and have_sent and all(sampler.follows for sampler in self.samplers)

    def close(self):
        for server in self.servers.values():
            server.close()

    def fault(self):
        """Draws one fault."""
        kind = self.rng.choices(list(self.faults), self.faults.values())[0]
        live = [server for server in self.servers.values() if server.joined]
        server = self.rng.choice(live) if live else None
        if server is None and kind in OF_A_SERVER:
            return
        self.note(f"FAULT {kind.__name__.replace('_', ' ')} {server.name if kind in OF_A_SERVER else ''}".rstrip())
        self.counts[kind.__name__] += 1
        kind(self, server)


class RunWorld(World):
    """A run of the trainer: its learner gives the leases, and has a fence for each of two shards."""

    num_shards = 2
    lease_seconds = LEASE_SECONDS
    faults = FAULTS | FAULTS_OF_A_RUN

    def __init__(self, rng, seed, folder, kind):
        super().__init__(rng, seed, folder)
        capacity, max_bytes = self.rng.choice(SIZES)
        config = Config(
            network=NETWORK,
            actor=ActorConfig(num_actors=NUM_ACTORS, segment_length=8),
            learner=LearnerConfig(batch_size=2),
            replay=ReplayConfig(
                num_shards=self.num_shards, capacity=self.num_shards * capacity, max_bytes=self.num_shards * max_bytes,
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
        self.head = Learner(self)
        # The first host of each shard always has a server; the second one if an operator starts one there.
        servers = [
            ReplayProgram(self, host, shard, starts=host == "a", restarts=host == "a")
            for shard in range(self.num_shards)
            for host in "ab"
        ]
        self.servers = {server.name: server for server in servers}
        self.hosts = [ActorHost(self, number) for number in range(2)]
        self.programs = [self.head, *servers, *self.hosts]

    @property
    def is_served(self):
        return len({server.shard for server in self.servers.values() if server.joined}) == self.num_shards

    def patches(self):
        # Without a file, which a real server keeps open until it ends.
        yield mock.patch(
            "apexreplay.server.open_store.SamplerCounters", lambda num_rows, path: SamplerCounters(num_rows)
        )


class TablesWorld(World):
    """A server that runs alone, with one table or several, writers and samplers."""

    lease_seconds = leases.LEASE_SECONDS
    faults = FAULTS | FAULTS_OF_TABLES

    def __init__(self, rng, seed, folder, kind):
        super().__init__(rng, seed, folder)
        names = rng.sample(list(TABLES), 3) if kind == "several" else [kind]
        settings = [draw_settings(rng, TABLES[name], self.window) for name in names]
        self.head = TableServer(self, settings, keeps=rng.random() < 0.8)
        self.servers = {table.name: table for table in self.head.tables}
        of = [*self.head.tables, rng.choice(self.head.tables)]
        self.hosts = [WriterHost(self, number, table) for number, table in enumerate(of)]
        drawn = [table for table in of if not table.is_queue]  # A queue is drawn by the server alone.
        self.samplers = [SamplerHost(self, number, rng.choice(drawn)) for number in range(2) if drawn]
        self.programs = [self.head, *self.hosts, *self.samplers]

    @property
    def is_served(self):
        return all(table.joined for table in self.head.tables)

    def path_of(self, run_id):
        """Returns the path of the memory of a table."""
        return self.folder / f"apex-{run_id:016x}-0.replay"

    def patches(self):
        yield mock.patch("apexreplay.server.control_server.AsyncReceiver")
        yield mock.patch("apexreplay.client.sampler.store_path", self.path_of)
        yield mock.patch("apexreplay.server.control_server.memory_id", str)


@contextmanager
def _simulated(world):
    """Replaces what would make a history depend on the time, on chance or on this machine."""
    with ExitStack() as stack:
        for patch in (
            mock.patch("os.posix_fallocate", world.allocate),
            mock.patch("secrets.randbits", world.rng.getrandbits),
            mock.patch("secrets.randbelow", world.rng.randrange),
            mock.patch.object(logging.getLogger("apex"), "disabled", True),
            mock.patch.object(logging.getLogger("apexreplay"), "disabled", True),
            *world.patches(),
        ):
            stack.enter_context(patch)
        yield


def simulate(seed):
    """Runs the history of a seed."""
    rng = random.Random(seed)
    kind = rng.choice(DRAWN)
    kind = REPLACED.get(kind, kind) if seed % 2 else kind
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="sim-") as folder:
        world = (RunWorld if kind == "transitions" else TablesWorld)(rng, seed, Path(folder), kind)
        world.note(f"tables: {kind}")
        world.counts[kind] += 1
        failure = ""
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
