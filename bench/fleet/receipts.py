"""What the receipts of many streams cost the writer of a replay server.

Store, server and sockets are real, with keys. A process subscribes to the receipts of all senders. Each stream has sent
one segment at the start; then the writer repeats receipts, as it does for all streams that send within a minute.
"""

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from apex.config import Config
from apex.config.addresses import REPLAY_SOCKETS
from apex.runtime.ports import choose_ports, is_free
from apex.schema import Schema
from apex.transport.curve.key_store import read_keys
from apex.transport.run_codec import RunCodec
from apex.types import Role
from apexreplay.errors import require
from apexreplay.frame_blob import make_blob
from apexreplay.process.children import start_child, stop_children
from apexreplay.process.lifecycle import POLL_SECONDS, Stop
from apexreplay.rate_limiter import RateLimiter
from apexreplay.sampling.batch_drawer import DrawSettings
from apexreplay.sampling.sampler_counters import SamplerCounters
from apexreplay.server.server import ReplayServer
from apexreplay.server.service import ReplaySockets, ServerSettings
from apexreplay.store.layout import StoreSettings
from apexreplay.store.writer import StoreWriter
from apexreplay.transport.endpoints import ReceiptReceiver
from apexreplay.transport.sockets import Context, InsecureBindWarning, open_context
from apexreplay.types import Segment, Stream
from apexreplay.wire.codec import Codec
from apexreplay.wire.header import receipt_topic
from bench.harness.command import Figures

SCHEMA = Schema(frame_shape=(2,), frame_dtype="float32", stack=1, num_actions=2, n_step=1, codec="raw")
CODEC = RunCodec(1, SCHEMA)
STREAMS_PER_SENDER = 16  # those of one actor process
WAIT_SECONDS = 30.0  # for the first receipts
NO_LIMIT = RateLimiter(1, 0.0, 0.0, False)


def measure_receipts(folder: Path, keys: str, num_streams: int, seconds: float) -> Figures:
    """Returns the cores that the writer's thread and its process use, and the longest pause of its other tasks."""
    transport = choose_ports(Config(), is_free, lambda sentence: None).transport
    settings = ServerSettings(
        codec=CODEC,
        path=folder / f"store-{num_streams}",
        store=StoreSettings(1_000, 1 << 20, num_streams, priority_exponent=1.0, min_priority=1e-6),
        draw=DrawSettings(0, 1, 1, 1, NO_LIMIT),
        num_rows=1,
        batch_endpoints=[],
        seed=0,
        snapshots=None,
        snapshot_seconds=1.0,
        last_snapshot_seconds=1.0,
        endpoints={name: transport.endpoint(name) for name in REPLAY_SOCKETS},
        max_segment_items=1,
        max_segments=8,
        max_segment_bytes=10_000,
        read_keys=partial(read_keys, keys, Role.REPLAY),
        stuck_seconds=0.0,
        warning=InsecureBindWarning("", ""),
    )
    store = StoreWriter.create(settings.path, SCHEMA.table, settings.store, store_incarnation=1)
    server = ReplayServer(store, CODEC, SamplerCounters(1), NO_LIMIT)
    ours, theirs = Pipe()
    child = start_child("senders", _subscribe, keys, settings.endpoints["receipts"], num_streams, theirs)
    try:
        return asyncio.run(_repeat(server, settings, num_streams, seconds, ours))
    finally:
        stop_children([child])
        store.close()


async def _repeat(
    server: ReplayServer, settings: ServerSettings, num_streams: int, seconds: float, pipe: Connection
) -> Figures:
    with open_context(settings.read_keys()) as context:
        sockets = ReplaySockets(context, settings, server)
        for actor_id in range(num_streams):  # A burst is short: its start counts as the time of its segments.
            server.insert([CODEC.encode_segment(_first_segment(actor_id))])
        stop, until = Stop(), time.monotonic() + WAIT_SECONDS
        repeat = asyncio.create_task(sockets.repeat_receipts(stop))
        while not pipe.poll():
            require(time.monotonic() < until, f"no receipts within {WAIT_SECONDS:.0f} s")
            await asyncio.sleep(POLL_SECONDS)
        began, used, writer_used = time.monotonic(), time.process_time(), time.thread_time()
        await asyncio.sleep(seconds)
        wall = time.monotonic() - began
        figures = {
            "receipts_writer_cores": (time.thread_time() - writer_used) / wall,
            "receipts_process_cores": (time.process_time() - used) / wall,
        }
        longest, until = 0.0, time.monotonic() + seconds
        while time.monotonic() < until:  # CPU time, because other programs may delay this one.
            turn = time.thread_time()
            await asyncio.sleep(0)
            longest = max(longest, time.thread_time() - turn)
        stop.request()
        await repeat
        return figures | {"receipts_longest_pause_ms": 1e3 * longest}


class AllReceipts(ReceiptReceiver):
    """Receives the receipts of all groups."""

    def __init__(self, context: Context, endpoints: Sequence[str], codec: Codec, streams: Sequence[Stream]) -> None:
        super().__init__(context, endpoints, codec, streams)
        for group in range(STREAMS_PER_SENDER, len(streams), STREAMS_PER_SENDER):
            self._socket.subscribe(receipt_topic(codec.run_id, 0, group))


def _first_segment(actor_id: int) -> Segment:
    records = np.zeros(1, SCHEMA.table.record)
    records["next_frame"], records["depth"], records["next_depth"] = 1, 1, 1
    blob = make_blob([np.zeros(2, "<f4").tobytes()] * 2)
    group = actor_id // STREAMS_PER_SENDER * STREAMS_PER_SENDER
    return Segment(Stream(actor_id, 1), 0, 0, records, blob, 0, group=group)


def _subscribe(stop: Stop, keys: str, endpoint: str, num_streams: int, pipe: Connection) -> None:
    with open_context(read_keys(keys, Role.ACTOR)) as context:
        receiver = AllReceipts(context, [endpoint], CODEC, [Stream(actor_id, 1) for actor_id in range(num_streams)])
        while not stop.poll() and not receiver.receive(POLL_SECONDS):
            pass
        pipe.send_bytes(b"receipts")
        while not stop.poll():
            receiver.receive(POLL_SECONDS)
