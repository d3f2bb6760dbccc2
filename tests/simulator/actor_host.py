"""Simulated hosts that send: the product's sender with its windows, and the segments that it has in flight."""

from support.builders import RUN, VECTORS
from support.messages import make_heartbeat

from apex.transport.messages.control import Goodbye, RefusedAnswer, StateAnswer, WelcomeAnswer, generation_of
from apex.transport.run_codec import RunCodec
from apex.types import Role
from apexreplay.client.reliable_sender import ReliableSender, SupersededError
from apexreplay.types import Cut

from .content import MAX_RECORDS, Transitions
from .ledger import require
from .programs import Program

FULL_QUEUE = 0.02  # share of segments that the queue of a connection refuses
CODEC = RunCodec(RUN, VECTORS)


class Outlet:
    """The connection of a host to a replay server."""

    def __init__(self, host, server):
        self._host, self._server = host, server

    def send(self, message):
        world = self._host.world
        self._host.passed.append(message)
        if world.rng.random() < FULL_QUEUE:
            return False
        world.network.post(
            self._host.name, self._server.host, self._server.arrive, message, ordered=self._server.keeps_order
        )
        return True

    def reconnect(self):
        self._host.world.counts["reconnected"] += 1


class Host(Program):
    """A host that sends segments of some streams."""

    def __init__(self, world, name):
        super().__init__(world, name)
        self.sender = None
        self.passed = []  # messages that the sender has passed to its outlets in this turn

    @property
    def joined(self):
        return self.sender is not None

    def join(self, streams, servers, codec, sources, window):
        """Creates the sender. `sources`: of the content of each stream."""
        self.streams, self.servers, self.codec, self.sources = streams, servers, codec, sources
        self.receipts, self.receipt = [], None
        self.flying = {stream.actor_id: {} for stream in streams}  # actor id -> number -> label
        self.stores = {}  # actor id -> store incarnation in the newest receipt
        outlets = [Outlet(self, server) for server in servers]
        self.sender = ReliableSender(streams, codec, outlets, self, window=window, clock=self.world.clock)
        self.world.note(f"{self.name} has {streams}, sends to {[server.name for server in servers]}")

    def leave(self, why, pause=None):
        self.ask(self.goodbye())
        self.end(why, pause)

    def listens(self, server, group):
        """Whether this host has subscribed to the receipts of a group at a server."""
        is_same_run = self.joined and server.codec.run_id == self.codec.run_id
        return is_same_run and group == min(self.flying) and server in self.servers

    def hear(self, session, receipt):
        """Called by the network when a receipt arrives."""
        if self.joined and session == self.session:
            self.receipts.append(receipt)

    def receive(self, timeout=0.0):
        """The sender takes one receipt at a time, so that it is known which one acknowledges a segment."""
        return [] if self.receipt is None else [self.receipt]

    def work(self, now):
        while self.sender is not None:
            self.receipt = self.receipts.pop(0) if self.receipts else None
            self.passed = []
            try:
                self.sender.pump()
            except SupersededError:
                actor_id, incarnation = self.receipt.stream
                require(
                    incarnation <= self.world.ledger.highest[self.place(actor_id)],
                    f"incarnation {incarnation} was not leased",
                )
                return self.end("a host was superseded")
            if self.receipt is None:
                break
            self._note(self.receipt)
        if self.world.sends and not self.sender.blocked and self.world.rng.random() < 0.8:
            self._send()

    def _note(self, receipt):
        """Checks what a receipt has acknowledged, and that a new store is sent all segments that it lacks."""
        actor_id = receipt.stream.actor_id
        if actor_id not in self.flying:  # A host that had the lowest id earlier has sent segments of this stream.
            return
        window, flying = self.sender._by_actor[actor_id], self.flying[actor_id]
        if receipt.stream != window.stream:
            return
        if len(flying) > window.in_flight:
            for number in [number for number in flying if number not in window._unacknowledged]:
                self.world.note(f"{self.name}: store {receipt.store_incarnation} acknowledges {flying[number]}")
                self.world.ledger.acknowledged(flying.pop(number), receipt.store_incarnation)
        known, self.stores[actor_id] = self.stores.get(actor_id), receipt.store_incarnation
        if known not in (None, receipt.store_incarnation):
            passed = set(map(id, self.passed))
            again = all(id(message) in passed for message in window._unacknowledged.values())
            require(again, f"{self.name} does not send its window to the new store {receipt.store_incarnation}")
            self.world.counts["a window met a new store"] += 1

    def _send(self):
        world = self.world
        index, label = world.rng.randrange(len(self.streams)), len(world.ledger.sent) + 1
        stream, content = self.streams[index], self.sources[index].make(label, world.rng.randint(1, MAX_RECORDS))
        world.ledger.sent[label] = content
        number = self.sender._windows[index].next_number
        self.flying[stream.actor_id][number] = label
        world.note(f"{self.name} sends {label}: number {number} of {stream.actor_id}/{stream.incarnation}")
        self.sender.send([Cut(index, content.records, content.blob)], version=label)

    def end(self, why, pause=None):
        self.sender = None
        super().end(why, pause)


class ActorHost(Host):
    """An actor host of the trainer, with one worker process."""

    def __init__(self, world, number):
        super().__init__(world, f"host{number}")
        self.wishes = {"role": Role.ACTOR, "num_streams": world.rng.randint(1, 3)}

    def place(self, actor_id):
        """Returns what the ledger calls the stream."""
        return actor_id

    def heartbeat(self):
        return make_heartbeat("actor", self.session, host=self.name, streams=self.streams, run_id=RUN)

    def goodbye(self):
        return Goodbye(self.session)

    def take(self, answer):
        match answer:
            case WelcomeAnswer() if answer.streams and answer.replay:
                self.generation = generation_of(answer.replay)
                servers = [self.world.servers[endpoints["experience"]] for endpoints in answer.replay]
                self.join(answer.streams, servers, CODEC, [Transitions()] * len(answer.streams), self.world.window)
            case RefusedAnswer():
                self.end("a host was refused")
            case StateAnswer() if self.joined and answer.generation not in (0, self.generation):
                self.leave("a host follows a moved server", 0.0)
