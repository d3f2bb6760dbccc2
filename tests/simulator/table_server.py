"""A simulated server of tables with its writers and samplers: the product's control server, leases and clients."""

import os
from types import SimpleNamespace

from apexreplay.client.connection import BEAT_SECONDS, Connection
from apexreplay.client.sampler import Sampler, _MemoryReader
from apexreplay.client.writer import Writer
from apexreplay.errors import DataError, SnapshotError, UsageError
from apexreplay.server import standalone
from apexreplay.server.control_server import ControlServer, ServedTable
from apexreplay.server.leases import Leases
from apexreplay.server.open_store import open_store
from apexreplay.server.place import MEMORY_SAMPLERS, Place
from apexreplay.server.table_settings import TableSettings
from apexreplay.snapshots.folder import SnapshotFolder
from apexreplay.snapshots.writer import SnapshotWriter
from apexreplay.store.location import remove
from apexreplay.tables import Table
from apexreplay.transport.endpoints import max_segment_bytes
from apexreplay.types import Stream
from apexreplay.wire.codec import Codec
from apexreplay.wire.control import Alive, Bye, Hello, Refusal, Welcome

from .actor_host import Host
from .content import MAX_RECORDS, Steps
from .ledger import require
from .programs import Program
from .replay_program import BATCH, ReplayProcess, new_priorities

NUM_STREAMS, NUM_ROWS = 3, 1  # of each table


def draw_settings(rng, declared, window):
    """Returns the limits of a table, drawn at random."""
    segment = max_segment_bytes(declared, MAX_RECORDS)
    sizes = [(40, 200_000), (1_000, 2 * segment), (1_000, 400_000)]
    ratio, order, min_size = rng.choice([0.0, 0.5, 2.0]), {}, rng.choice([1, 20])
    if declared.name == "queue":  # The first two have just the room that a batch needs if inserts wait.
        smallest, item = max(BATCH, min_size), declared.item.segment_steps(1) * (declared.max_step_bytes + 16)
        sizes = [(smallest + 2 * MAX_RECORDS, 200_000), (1_000, smallest * item + 3 * segment), (1_000, 400_000)]
        ratio, order = 0.0, {"order": "queue", "draws_per_item": rng.choice([1, 3])}
    capacity, max_bytes = rng.choice(sizes)
    return TableSettings(
        table=declared, capacity=capacity, max_bytes=max_bytes, priority_exponent=rng.choice([0.0, 0.6]),
        min_priority=0.1, min_size=min_size, samples_per_insert=ratio,
        tolerance=40.0, inserts_wait=rng.random() < 0.5, num_streams=NUM_STREAMS, segment_length=MAX_RECORDS,
        window=min(window, 63), **order,
    )  # fmt: skip


class TableProcess(ReplayProcess):
    """The process of one table."""

    keeps_order = True

    def __init__(self, world, owner, settings):
        self.world, self.owner, self.limits = world, owner, settings
        self.name, self.host, self.path = settings.table.name, owner.name, None
        snapshots = owner.folder and owner.folder / self.name
        self.prepare(Codec(0, settings.table), settings.store, settings.limiter, snapshots, settings.selection)

    @property
    def alive(self):
        return self.owner.alive

    @property
    def session(self):
        return self.owner.session

    def start(self, run_id):
        self.codec, self.path = Codec(run_id, self.table), self.world.path_of(run_id)
        self.open()

    def open_memory(self, folder):
        rows = self.limits.num_samplers + MEMORY_SAMPLERS
        return open_store(self.path, self.table, self.settings, rows, run_id=self.codec.run_id, snapshots=folder)

    def finish(self):
        """Ends as after SIGTERM: saves a last snapshot and removes the memory, unless that fails."""
        store, self.is_finishing, saved = self.store, True, True
        if self.snapshots is not None:
            saved = not self.takes_snapshot  # Otherwise the process of the snapshots is busy.
            counts = {"run_id": self.codec.run_id, "num_drawn": lambda: 0}
            try:
                writer = SnapshotWriter(self.path, self.table, SnapshotFolder(self.snapshots.path), **counts)
                if saved and (snapshot := writer.take()) is not None:
                    self.world.ledger.note_snapshot(self, snapshot)
                    require(snapshot.end_key == store.num_inserted, "the last snapshot does not have the newest items")
            except (UsageError, SnapshotError):  # The file was removed a moment ago.
                saved = False
        self.close()
        if saved:
            remove(self.path)
        self.is_finishing = False

    def end(self, why, pause=None):
        self.owner.end(why, failed=None if why == "a server was killed" else self)


class TableServer:
    """The server of tables: one process for each table, and one that answers clients."""

    name = "server"

    def __init__(self, world, settings, *, keeps):
        """`keeps`: whether it has a folder of snapshots."""
        self.world = world
        self.folder = world.folder / "saved" if keeps else None
        self.alive, self.session, self.number, self.back_at, self.stopped_until = False, 0, 0, 0.0, 0.0
        self.tables = [TableProcess(world, self, each) for each in settings]

    def step(self):
        now = self.world.clock.now
        if now < self.stopped_until:
            return
        if not self.alive and now >= self.back_at:
            self._start()
        for table in self.tables:
            if self.alive and table.joined:
                table.work(now)

    def _start(self):
        self.alive, self.session, self.number = True, self.world.rng.getrandbits(52), self.number + 1
        start, run_ids = standalone._open_folder(self.folder, [table.name for table in self.tables])
        self.world.note(f"the server starts for the {start}. time")
        served = []
        for position, (table, run_id) in enumerate(zip(self.tables, run_ids, strict=True)):
            leases = Leases(NUM_STREAMS, NUM_ROWS, start, clock=self.world.clock)
            leases.open()
            served.append(ServedTable(table.limits, position, run_id, None, leases))
        self.control = ControlServer(None, Place(), served)
        for table, run_id in zip(self.tables, run_ids, strict=True):
            if self.alive:
                table.start(run_id)
        if self.alive:
            self.control._status = {table.name: table.server.status() for table in self.tables}

    def take(self, program, request, number):
        """Called by the network when a request arrives. `number`: of the start to which its connection leads."""
        if not self.alive or self.world.clock.now < self.stopped_until or number != self.number:
            return
        answer = self.control._answer(request, "")
        if isinstance(answer, Alive):
            self.world.ledger.beat(request.session)
        self.world.ledger.joined(request, answer)
        if answer is not None:
            self.world.network.post(self.name, program.name, program.answer, request, answer, number, ordered=True)

    def end(self, why, *, failed=None, in_order=False):
        """`failed`: the process of a table that has ended by itself; then the others end in order."""
        if not self.alive:
            return
        self.alive, self.back_at = False, self.world.clock.now + self.world.rng.uniform(0, 4)
        self.world.counts[why] += 1
        self.world.note(f"the server ends: {why}")
        self.world.ledger.restart_learner()
        for table in self.tables:
            if table.joined and table is not failed and (in_order or failed is not None):
                table.finish()
            else:
                table.close()


class Client(Program):
    """A program with one lease. The product's connection decides what an answer means."""

    def __init__(self, world, name, table):
        super().__init__(world, name)
        self._process = table

    def join_request(self):
        return Hello(session=self.session, role=self.role, table=self._process.name)

    def ask(self, request):
        """Sends a request. It is lost with its connection; without one, it waits for the next start of the server."""
        head = self.world.head
        self.number = head.number + (not head.alive)
        self.world.network.post(self.name, head.name, head.take, self, request, self.number, ordered=True)

    def answer(self, request, answer, number):
        if number == self.number:  # Otherwise it came over an earlier connection.
            super().answer(request, answer)

    def expects(self, request):
        return True

    def heartbeat(self):
        sent = []
        self.connection._beat(SimpleNamespace(send=sent.append))
        return sent[0]

    def goodbye(self):
        return Bye(session=self.session)

    def take(self, answer):
        if self.joined:
            self.connection._take(SimpleNamespace(send=self.ask), answer)
            if self.session in self.connection._refused:
                self.end(f"a {self.role} has lost its lease")
        elif isinstance(answer, Welcome):
            self.lease = lease = self.kind.__new__(self.kind)  # without sockets and threads
            lease.hello, lease.table, lease._pid, lease._closed = (
                self.join_request(), Table.from_dict(answer.table), os.getpid(), False,
            )  # fmt: skip
            lease.take(answer)
            self.connection = lease._connection = Connection.__new__(Connection)  # without its thread
            self.connection.address, self.connection.unanswered = "server", 0
            self.connection._answers, self.connection._leases, self.connection._refused = {}, {self.session: lease}, {}
            self.connection._failure = None
            self.connection._unknown = set()
            self.beat_at = self.world.clock.now + BEAT_SECONDS
            self.begin(answer)
        elif isinstance(answer, Refusal):
            self.end(f"a {self.role} was refused")


class WriterHost(Client, Host):
    """A writer of one stream."""

    role, kind = "writer", Writer

    def __init__(self, world, number, table):
        Host.__init__(self, world, f"writer{number}")
        self._process = table

    def begin(self, welcome):
        stream = Stream(welcome.stream, int(welcome.incarnation, 16))
        source = Steps(self.lease.table, self.world.rng.getrandbits(32))
        codec = Codec(int(welcome.run_id, 16), self.lease.table)
        self.join([stream], [self._process], codec, [source], welcome.window)

    def place(self, actor_id):
        return self.lease.hello.run_id, actor_id


class SamplerHost(Client):
    """A sampler that reads the memory."""

    role, kind = "sampler", Sampler

    def __init__(self, world, number, table):
        super().__init__(world, f"sampler{number}", table)
        self.lease = None

    @property
    def joined(self):
        return self.lease is not None and self.lease._reader is not None

    @property
    def follows(self):
        """Whether it reads the present memory, or none."""
        drawer = self.lease._reader._drawer if self.joined else None
        return drawer is None or drawer.reader.store_incarnation == self._process.incarnation

    def begin(self, welcome):
        lease = self.lease
        lease.batch_size, lease._used, lease._remote, lease._reader = BATCH, welcome, None, None
        lease._closed_since = 0.0
        try:
            lease._reader = _MemoryReader(lease.table, welcome, BATCH)
        except UsageError:  # The memory was removed a moment ago.
            self.end("a sampler found no memory")

    def work(self, now):
        try:
            self.lease._check()
            self.lease._follow()
        except DataError:
            return self.end("a sampler waited for long")
        except UsageError:  # The memory was removed a moment ago.
            return self.end("a sampler found no memory")
        world, reader = self.world, self.lease._reader
        if reader._drawer is None:
            return  # It waits for the memory of the next start.
        reader._drawer.rng = world.numbers
        incarnation = reader._drawer.reader.store_incarnation
        if incarnation in world.damaged or incarnation not in world.ledger.stores:
            return  # Only a server that attaches notices damage.
        if world.rng.random() < 0.3 and (batch := reader.draw(refuse)) is not None:
            world.ledger.check_drawn(batch.part.store_incarnation, batch.keys, batch.versions, batch.fields)
            update, process = new_priorities(world, batch.part), self._process
            message = Codec(int(self.lease.hello.run_id, 16), self.lease.table).encode_priorities(update)
            world.network.post(self.name, process.host, process.take_priorities, message, update)
            world.counts["batches of samplers"] += 1

    def end(self, why, pause=None):
        self.lease = None
        super().end(why, pause)


def refuse(part, keys):
    raise AssertionError(f"items cannot be decoded: {keys}")
