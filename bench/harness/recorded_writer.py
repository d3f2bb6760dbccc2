"""A writer that sends a recording at a given rate over one connection, with the sockets and messages of an actor."""

import json
import time
from multiprocessing.connection import Connection
from typing import NamedTuple

from apex.config import Config
from apex.transport.curve.key_store import read_keys
from apex.transport.hello import Route, greet
from apex.transport.run_codec import RunCodec
from apex.types import Role
from apexreplay.client.reliable_sender import Outlet, ReliableSender
from apexreplay.process.lifecycle import POLL_SECONDS, Stop
from apexreplay.transport.endpoints import ExperienceSender, ReceiptReceiver
from apexreplay.transport.sockets import open_context
from apexreplay.types import Cut
from bench.harness.recording import Compressor, Recording

IDLE_SECONDS = 0.02  # interval between two looks for orders
PUMP_PERIOD = 16  # segments between two looks for receipts; an actor process of 16 streams looks after each cut


class Inserted(NamedTuple):
    """Result of one order."""

    transitions: int
    seconds: float  # from the compression of the first frame to the last receipt
    num_bytes: int  # bytes of messages
    num_resent: int  # segments that were sent again


class _CountedOutlet:
    """A sender that counts bytes."""

    def __init__(self, outlet: Outlet) -> None:
        self._outlet = outlet
        self.num_bytes = 0

    def send(self, message: list[bytes]) -> bool:
        self.num_bytes += sum(map(len, message))
        return self._outlet.send(message)

    def reconnect(self) -> None:
        self._outlet.reconnect()


class RecordedWriter:
    """Sends the segments of a recording in order, repeatedly."""

    def __init__(self, recording: Recording, link: ReliableSender, outlet: _CountedOutlet) -> None:
        self._recording = recording
        self._link = link
        self._outlet = outlet
        self._compressor = Compressor(recording)
        self._ordinal = 0  # number of the next segment

    def idle(self) -> None:
        """Receives receipts, so that they do not accumulate."""
        self._link.pump(IDLE_SECONDS)

    def insert(self, stop: Stop, transitions: int, seconds: float, rate: float) -> Inserted:
        """Sends this number of transitions, or for this time, at `rate` per second (0: unlimited); waits for all
        receipts.
        """
        link, outlet = self._link, self._outlet
        began, bytes_before, resent_before, sent = time.monotonic(), outlet.num_bytes, link.num_resent, 0
        while not stop.poll():
            elapsed = time.monotonic() - began
            if sent >= transitions > 0 or elapsed >= seconds > 0:
                break
            early = sent / rate - elapsed if rate else 0.0
            if early > 0:
                link.pump(min(POLL_SECONDS, max(early, 0.001)))
            elif link.blocked:
                link.pump(POLL_SECONDS)
            else:
                sent += self._send_next()
        while link.in_flight and not stop.poll():
            link.pump(POLL_SECONDS)
        return Inserted(
            sent, time.monotonic() - began, outlet.num_bytes - bytes_before, link.num_resent - resent_before
        )

    def _send_next(self) -> int:
        """Sends one segment; returns its number of transitions."""
        piece = self._ordinal % len(self._recording.pieces)
        records = self._recording.records_of(piece)
        cut = Cut(int(self._recording.pieces["stream"][piece]), records, self._compressor.blob(piece))
        self._link.send([cut], self._ordinal)  # The version is the number of the segment, by which samples are checked.
        self._ordinal += 1
        if self._ordinal % PUMP_PERIOD == 0:
            self._link.pump()
        return len(records)


def write(stop: Stop, recording: Recording, config: Config, pipe: Connection, bench_end: Connection) -> None:
    """The child's main function: connects as an actor, then executes the orders from `pipe` and returns results."""
    bench_end.close()
    num_streams, window = config.actor.num_actors, config.actor.send_window
    port = config.transport.control_port + config.transport.port_offset
    route = Route(config.transport.bind, port, config.transport.keys)
    welcome = greet(route, Role.ACTOR, stop, num_streams=num_streams, needs_replay=True)
    if welcome is None:
        return
    codec, streams = RunCodec(welcome.run_id, welcome.schema), welcome.streams
    with open_context(read_keys(config.transport.keys, Role.ACTOR)) as context:
        (replay,) = welcome.replay
        sender = ExperienceSender(context, replay["experience"], num_messages=num_streams * window)
        outlet = _CountedOutlet(sender)
        receipts = ReceiptReceiver(context, [replay["receipts"]], codec, streams)
        link = ReliableSender(streams, codec, [outlet], receipts, window=window)
        writer = RecordedWriter(recording, link, outlet)
        while not stop.poll():
            if pipe.poll():
                inserted = writer.insert(stop, **json.loads(pipe.recv_bytes()))
                pipe.send_bytes(json.dumps(inserted).encode())
            else:
                writer.idle()
