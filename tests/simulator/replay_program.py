"""A simulated replay server: the product's server, store and snapshots in a process that may die at any step."""

from errno import ENOSPC

import numpy as np
from support.builders import RUN, VECTORS
from support.memory import open_memory
from support.messages import make_heartbeat
from support.steps import Crash

from apex.replay_memory.settings import store_settings
from apex.transport.messages.control import Goodbye, RefusedAnswer, WaitAnswer, WelcomeAnswer
from apex.transport.run_codec import RunCodec
from apex.types import Role
from apexreplay.errors import LostMemoryError, SnapshotError, UsageError
from apexreplay.frames.encoder import make_targets, name_arrays
from apexreplay.frames.stack_decoder import StackDecoder
from apexreplay.rate_limiter import RateLimiter
from apexreplay.sampling.batch_drawer import BatchDrawer, DrawSettings
from apexreplay.sampling.sampler_counters import SamplerCounters
from apexreplay.sampling.selection import Selection
from apexreplay.server.server import ReplayServer
from apexreplay.snapshots.folder import SnapshotFolder
from apexreplay.snapshots.writer import SnapshotWriter
from apexreplay.store.reader import StoreReader
from apexreplay.transport.endpoints import max_segment_bytes
from apexreplay.transport.timing import RECEIPT_SECONDS
from apexreplay.types import PriorityUpdate

from .content import MAX_RECORDS
from .ledger import BrokenPromiseError, require
from .programs import Program

CODEC = RunCodec(RUN, VECTORS)
BATCH = 8  # items of a batch
NEW_PRIORITIES = np.array([0, 0.3, 1, 5, 3e6, -1, np.nan, np.inf], np.float32)


class ReplayProcess:
    """The process of one store, with its samplers and its snapshot process.

    A subclass is a program with `world`, `name`, `host`, `alive`, `session` and `end`, and opens its memory.
    """

    shard = 0
    keeps_order = False  # whether segments arrive in order, as on one connection; else the network shuffles them

    def prepare(self, codec, settings, limiter, snapshots, selection=None):
        """`settings`: of the store. `snapshots`: folder; None: none are taken."""
        self.codec, self.table, self.settings, self.limiter = codec, codec.table, settings, limiter
        self.selection = selection or Selection()
        self.is_queue = self.selection.order == "queue"
        self.snapshots = None if snapshots is None else SnapshotFolder(snapshots, steps=self.before_snapshot)
        self.incarnation = 0  # of the memory at `path`
        self.flipped = False  # whether a bit of the memory was flipped since the last start
        self.crash_at = self.snapshot_crash_at = ""  # the next step at which a process dies
        self.disk_is_full = self.takes_snapshot = self.is_finishing = False
        self.forget()

    def forget(self):
        self.store = self.server = self.reader = self.snapshotter = None
        self.inbox = []  # segments that have arrived

    @property
    def joined(self):
        return self.store is not None

    def open(self):
        """Attaches to the memory or restores it, as a real server does."""
        world, existed = self.world, self.path.exists()
        folder = None if self.snapshots is None else SnapshotFolder(self.snapshots.path)
        newest = None if folder is None else folder.newest()
        try:
            store, counters = self.open_memory(folder)
        except UsageError as error:
            if world.clock.now < world.full_until:
                return self.end("tmpfs was full")
            if not self.flipped:
                raise BrokenPromiseError(f"{self.name} does not start: {error}") from error
            self.path.unlink(missing_ok=True)  # the remedy of the error
            self.flipped = False
            return self.end("a damaged memory was refused")
        world.ledger.note_open(self, store, newest, existed=existed, flipped=self.flipped)
        if self.is_queue and store.store_incarnation != self.incarnation and newest is not None:
            world.ledger.continue_queue(store, newest, counters.num_drawn, self.selection)
        world.damaged.discard(store.store_incarnation)
        store._before = self.before_insert
        self.store, self.incarnation, self.flipped = store, store.store_incarnation, False
        counters.rebase(store.num_inserted)
        self.base = max(store.num_inserted, self.limiter.min_size_to_sample), counters.num_drawn
        self.counters = counters
        queue = self.selection if self.is_queue and self.limiter.inserts_wait else None
        self.server = ReplayServer(
            store, self.codec, counters, self.limiter, shard=self.shard, queue=queue,
            segment=(MAX_RECORDS, max_segment_bytes(self.table, MAX_RECORDS)), clock=world.clock,
        )  # fmt: skip
        self.reader = StoreReader(self.path, self.table)
        draw = DrawSettings(self.shard, 1, BATCH, 2**62, self.limiter, self.selection)
        self.drawer = BatchDrawer(self.reader, counters, 0, draw, world.numbers, world.clock)
        if folder is not None:
            self.snapshotter = SnapshotWriter(
                self.path, self.table, self.snapshots, run_id=self.codec.run_id, num_drawn=lambda: counters.num_drawn,
                file_bytes=1_500, steps=self.before_snapshot,
            )  # fmt: skip
        self.repeat_at = 0.0
        world.note(f"{self.name} has store {self.incarnation} with {store.size} items")

    def arrive(self, message):
        """Called by the network when a segment arrives."""
        if self.joined:
            self.inbox.append(message)

    def work(self, now):
        try:
            while self.inbox and self.server.check_limiter():
                count = 1 if self.limiter.inserts_wait else len(self.inbox)
                messages, self.inbox = self.inbox[:count], self.inbox[count:]
                self.publish(self.server.insert(messages))
                self.check_ratio()
            if now >= self.repeat_at:
                self.repeat_at = now + RECEIPT_SECONDS
                self.publish(self.server.receipts())
            if self.world.rng.random() < 0.1 or not self.world.sends:
                self.learn()
        except Crash:
            self.end("a server crashed during an insert")
        except LostMemoryError:
            self.world.ledger.note(self.store)
            if self.world.rng.random() < 0.8:  # as `service` does before it ends
                self.take_snapshot()
            if self.alive:
                self.end("a server lost its memory")

    def check_ratio(self):
        """Checks the limits of draws and inserts; each may be exceeded by one batch or segment."""
        limiter, (base_inserted, base_drawn) = self.limiter, self.base
        if self.is_queue and limiter.inserts_wait:
            self.world.ledger.check_removed(self.store, self.selection.draws_per_item)
        per_insert = limiter.samples_per_insert
        slack = limiter.tolerance_fraction * per_insert * limiter.min_size_to_sample
        drawn, inserted = self.counters.num_drawn - base_drawn, self.store.num_inserted - base_inserted
        require(per_insert == 0 or drawn - per_insert * inserted <= slack + BATCH, "too much was drawn per insert")
        if limiter.inserts_wait:
            require(drawn - per_insert * (inserted - BATCH) >= -slack, "too little was drawn per insert")

    def publish(self, receipts):
        self.world.ledger.note(self.store)
        for message in receipts:
            parts = [*map(bytes, self.codec.encode_receipts(message, self.shard))]
            for host in self.world.hosts:
                if host.listens(self, message.group):
                    for receipt in self.codec.decode_receipts(parts).each():
                        self.world.network.post(self.host, host.name, host.hear, host.session, receipt)

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
            sample = self.reader.sample(BATCH, world.numbers)
            if sample is not None:
                self.check(sample.records, sample.blob)

    def check(self, records, blob):
        """Decodes drawn items, and compares them with what was sent."""
        targets = make_targets(self.table, len(records))
        decoded = StackDecoder(self.table, targets).decode(records, blob, np.arange(len(records)))
        require(decoded.all(), "a drawn item cannot be decoded")
        arrays = {**{name: records[name] for name in records.dtype.names}, **name_arrays(self.table, targets)}
        self.world.ledger.check_drawn(self.incarnation, records["key"], records["version"], arrays)

    def learn(self):
        """Draws a batch by messages and returns its priorities."""
        part = self.drawer.draw()
        if part is None:
            return
        self.drawer.confirm()
        self.check_ratio()
        received = self.codec.decode_batch([*map(bytes, self.codec.encode_batch(part))], BATCH, self.shard)
        self.check(received.records, received.blob)
        keys = received.records["key"]
        if self.is_queue:
            self.world.ledger.check_given(self.incarnation, keys, self.selection.draws_per_item)
        else:
            self.world.ledger.check_probabilities(self.store, keys, received.records["probability"])
        update = new_priorities(self.world, part, self.shard)
        self.take_priorities(self.codec.encode_priorities(update), update)

    def take_priorities(self, message, update):
        """Called by the network when new priorities arrive."""
        if self.joined:
            self.server.update_priorities([message])
            self.world.ledger.note_priorities(self.store, update)

    def take_snapshot(self):
        """Takes a snapshot, during which the run continues."""
        if self.takes_snapshot or self.snapshotter is None:
            return
        self.takes_snapshot, self.saving_session = True, self.session
        writer, end_key = self.snapshotter, self.snapshotter.num_inserted
        try:
            if (snapshot := self.snapshotter.take()) is not None:
                self.world.ledger.note_snapshot(self, snapshot)
                self.world.note(f"{self.name} has saved snapshot {snapshot.number}, {snapshot.size} items")
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
        if self.is_finishing:
            return
        if step == self.snapshot_crash_at:
            raise Crash
        if self.disk_is_full and step.startswith("write"):
            raise OSError(ENOSPC, "no space left")
        if self.world.rng.random() < 0.3:
            self.world.advance(0.1)
        if not self.alive or self.session != self.saving_session:
            raise Crash

    def close(self):
        if self.store is not None:
            self.store.close()
        self.forget()


def new_priorities(world, part, shard=0):
    """Returns priorities for a batch, some of them invalid."""
    values = world.numbers.choice(NEW_PRIORITIES, BATCH)
    return PriorityUpdate(shard, part.store_incarnation, part.sampler, part.number, part.records["key"], values)


class ReplayProgram(ReplayProcess, Program):
    """The replay server of a shard of the trainer on one host."""

    def __init__(self, world, host, shard, **options):
        super().__init__(world, f"{host}{shard}", **options)
        self.host, self.shard = self.name, shard
        self.path = world.folder / f"{self.name}.replay"
        self.wishes = {"role": Role.REPLAY, "shard": shard, "num_streams": 0}
        settings = store_settings(world.welcome.config.replay, world.welcome.config.actor.num_actors)
        self.prepare(CODEC, settings, RateLimiter(1, 0.0, 0.0, False), world.folder / f"{self.name}-snapshots")

    def open_memory(self, folder):
        store, _ = open_memory(self.path, self.world.welcome, folder)
        return store, SamplerCounters(1)

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

    def end(self, why, pause=None):
        self.close()
        super().end(why, pause)
