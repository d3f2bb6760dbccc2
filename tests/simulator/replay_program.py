"""A simulated replay server: the product's server, store and snapshots in a process that may die at any step."""

from errno import ENOSPC

import numpy as np
from support.builders import RUN, VECTORS
from support.memory import open_memory
from support.messages import make_heartbeat
from support.steps import Crash

from apex.transport.messages.control import Goodbye, RefusedAnswer, WaitAnswer, WelcomeAnswer
from apex.transport.run_codec import RunCodec
from apex.types import Role
from apexreplay.errors import LostMemoryError, SnapshotError, UsageError
from apexreplay.rate_limiter import RateLimiter
from apexreplay.sampling.sampler_counters import SamplerCounters
from apexreplay.server.server import ReplayServer
from apexreplay.snapshots.folder import SnapshotFolder
from apexreplay.snapshots.writer import SnapshotWriter
from apexreplay.store.reader import StoreReader
from apexreplay.transport.timing import RECEIPT_SECONDS
from apexreplay.types import PriorityUpdate

from .ledger import BrokenPromiseError, require
from .programs import Program

CODEC = RunCodec(RUN, VECTORS)


class ReplayProgram(Program):
    """The replay server of a shard on one host, with its samplers and its snapshot process."""

    def __init__(self, world, host, shard, **options):
        super().__init__(world, f"{host}{shard}", **options)
        self.shard = shard
        self.path = world.folder / f"{self.name}.replay"
        self.snapshots = SnapshotFolder(world.folder / f"{self.name}-snapshots", steps=self.before_snapshot)
        self.wishes = {"role": Role.REPLAY, "shard": shard, "num_streams": 0}
        self.incarnation = 0  # of the memory at `path`
        self.flipped = False  # whether a bit of the memory was flipped since the last start
        self.crash_at = self.snapshot_crash_at = ""  # the next step at which a process dies
        self.disk_is_full = self.takes_snapshot = False
        self._forget()

    def _forget(self):
        self.store = self.server = self.reader = self.snapshotter = None
        self.inbox = []  # segments that have arrived

    @property
    def joined(self):
        return self.store is not None

    def heartbeat(self):
        counts = {"num_inserted": self.store.num_inserted, "store_incarnation": str(self.store.store_incarnation)}
        more = {"host": self.name, "shard": self.shard, "endpoints": {"experience": self.name}, "run_id": RUN}
        more["fence"] = self.fence
        return make_heartbeat("replay", self.session, size=self.store.size, **counts, **more)

    def take(self, answer):
        match answer:
            case WelcomeAnswer():
                self.fence = answer.fence
                self.open()
            case WaitAnswer() if answer.host == self.name and self.path.exists():  # as `predecessor_is_dead`
                self.ask(Goodbye(answer.holder))
            case RefusedAnswer():
                self.end("a server was refused", self.world.rng.uniform(1, 8))

    def open(self):
        """Attaches to the memory or restores it, as a real server does."""
        world, existed, folder = self.world, self.path.exists(), SnapshotFolder(self.snapshots.path)
        newest = folder.newest()
        try:
            store, _ = open_memory(self.path, world.welcome, folder)
        except UsageError as error:
            if world.clock.now < world.full_until:
                return self.end("tmpfs was full")
            if not self.flipped:
                raise BrokenPromiseError(f"{self.name} does not start: {error}") from error
            self.path.unlink(missing_ok=True)  # the remedy of the error
            self.flipped = False
            return self.end("a damaged memory was refused")
        world.ledger.note_open(self, store, newest, existed=existed, flipped=self.flipped)
        store._before = self.before_insert
        self.store, self.incarnation, self.flipped = store, store.store_incarnation, False
        counters, limiter = SamplerCounters(1), RateLimiter(1, 0.0, 0.0, False)
        self.server = ReplayServer(store, CODEC, counters, limiter, shard=self.shard, clock=world.clock)
        self.reader = StoreReader(self.path, VECTORS.table)
        self.snapshotter = SnapshotWriter(
            self.path, VECTORS.table, self.snapshots, run_id=RUN, num_drawn=lambda: 0, file_bytes=1_500,
            steps=self.before_snapshot,
        )  # fmt: skip
        self.repeat_at = 0.0
        world.note(f"{self.name} has store {self.incarnation} with {store.size} transitions")

    def arrive(self, message):
        """Called by the network when a segment arrives."""
        if self.joined:
            self.inbox.append(message)

    def work(self, now):
        try:
            if self.inbox:
                messages, self.inbox = self.inbox, []
                self.publish(self.server.insert(messages))
            if now >= self.repeat_at:
                self.repeat_at = now + RECEIPT_SECONDS
                self.publish(self.server.receipts())
            if self.world.rng.random() < 0.1:
                self.learn()
        except Crash:
            self.end("a server crashed during an insert")
        except LostMemoryError:
            self.world.ledger.note(self.store)
            if self.world.rng.random() < 0.8:  # as `service` does before it ends
                self.take_snapshot()
            if self.alive:
                self.end("a server lost its memory")

    def publish(self, receipts):
        self.world.ledger.note(self.store)
        for receipt in receipts:
            for host in self.world.hosts:
                if host.listens(self, receipt.stream.actor_id):
                    self.world.network.post(self.name, host.name, host.hear, host.session, receipt)

    def before_insert(self, step):
        """Is called before each step of an insert."""
        world = self.world
        if step == "watermark":  # Each segment is looked at before the next one can evict it.
            world.ledger.note(self.store)
        if step == self.crash_at:
            self.crash_at = ""
            world.ledger.stores[self.incarnation].num_crashes += 1
            raise Crash
        if world.rng.random() < 0.1:
            if step != "evict":  # The watermark was moved, and the leaves come next.
                world.ledger.check_leaves(self.store)
            self.draw()

    def draw(self):
        sample = self.reader.sample(8, self.world.numbers)
        if sample is not None:
            self.world.ledger.check_sample(self.store, sample)
        return sample

    def learn(self):
        """Draws a batch and returns its priorities."""
        if (sample := self.draw()) is not None:
            keys, priorities = sample.records["key"], self.world.numbers.random(8).astype(np.float32)
            update = PriorityUpdate(self.shard, self.incarnation, 0, 0, keys, priorities)
            self.server.update_priorities([CODEC.encode_priorities(update)])

    def take_snapshot(self):
        """Takes a snapshot, during which the run continues."""
        if self.takes_snapshot:
            return
        self.takes_snapshot, self.saving_session = True, self.session
        writer, end_key = self.snapshotter, self.snapshotter.num_inserted
        try:
            if (snapshot := self.snapshotter.take()) is not None:
                self.world.ledger.note_snapshot(self, snapshot)
                self.world.note(f"{self.name} has saved snapshot {snapshot.number}, {snapshot.size} transitions")
        except Crash:
            if self.alive and self.session == self.saving_session:
                self.end("a snapshot process crashed")
        except SnapshotError as error:  # A small memory may be overwritten during its snapshot.
            require(writer.first_key >= end_key, f"a snapshot failed: {error}")
        except OSError as error:
            require(self.disk_is_full, f"a snapshot failed: {error}")
            self.world.counts["a disk was full"] += 1
        finally:
            self.takes_snapshot = self.disk_is_full = False
            self.snapshot_crash_at = ""

    def before_snapshot(self, step):
        """Is called before each step of a snapshot."""
        if step == self.snapshot_crash_at:
            raise Crash
        if self.disk_is_full and step.startswith("write"):
            raise OSError(ENOSPC, "no space left")
        if self.world.rng.random() < 0.3:
            self.world.advance(0.1)
        if not self.alive or self.session != self.saving_session:
            raise Crash

    def end(self, why, pause=None):
        if self.store is not None:
            self.store.close()
        self._forget()
        super().end(why, pause)
