"""`python -m bench curve`: compares the rate of one stream of segments with and without CURVE.

One process encodes and sends segments as an actor does, as fast as its socket accepts them. Another receives and checks
them as the replay server's writer does. Nothing is played, compressed or stored, because that would hide the cost. Both
rates are measured alternately, so that other work on the machine affects both.
"""

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from apex.config import Config
from apex.runtime.ports import choose_ports, is_free
from apex.schema import Schema
from apex.transport.curve.command import new_folder
from apex.transport.curve.key_store import read_keys
from apex.transport.run_codec import RunCodec
from apex.types import Role
from apexreplay.frame_blob import make_blob
from apexreplay.process.children import check_children, start_child, stop_children
from apexreplay.process.lifecycle import POLL_SECONDS, Stop
from apexreplay.transport.async_receiver import PULL, AsyncReceiver
from apexreplay.transport.endpoints import ExperienceSender, max_segment_bytes
from apexreplay.transport.sockets import open_context
from apexreplay.types import Segment, Stream
from bench.harness.command import Figures, make_parser, run_bench
from bench.harness.report import ReportRow, print_rows

PIECES = 5  # measurements with and without keys; a rate is their median
TRANSITIONS = 50  # transitions in a segment [section 4.1 of the paper]
FRAME_BYTES = 1_000  # bytes of a compressed transition, about as many as in Atari games
SCHEMA = Schema(frame_shape=(84, 84), frame_dtype="uint8", stack=4, num_actions=18, n_step=3, codec="lz4")
RUN_ID = 1
WINDOW = 64  # segments in flight
LINES = [
    ReportRow("curve_off_transitions_per_s", "one stream of segments without keys", "/s", digits=0),
    ReportRow("curve_on_transitions_per_s", "one stream of segments with keys", "/s", digits=0),
    ReportRow("curve_share", "rate with keys relative to without", "%", 100, 0, 35),
]


def main(argv: Sequence[str]) -> int:
    """Measures; returns the exit status."""
    parser = make_parser("curve", "Measures the cost of keys on this machine.", seconds=20.0, of="in all")
    options = parser.parse_args(argv)
    title = f"segments of {TRANSITIONS} transitions, {TRANSITIONS * FRAME_BYTES:,} bytes"
    return run_bench(
        lambda folder, stop: measure(folder / "keys", options.seconds, stop),
        lambda figures: print_rows(title, LINES, figures),
        as_json=options.json,
    )


def measure(folder: Path, seconds: float, stop: Stop) -> Figures:
    """Returns both rates and their ratio; creates keys in `folder`."""
    new_folder(folder)
    rates: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(PIECES):
        for curve, pieces in rates.items():
            pieces.append(_rate(str(folder) if curve else "", seconds / PIECES / 2, stop))
    off, on = (statistics.median(rates[curve]) for curve in (False, True))
    figures = {"curve_off_transitions_per_s": off, "curve_on_transitions_per_s": on, "curve_share": on / off}
    return {name: float(f"{value:.6g}") for name, value in figures.items()}


def _rate(folder: str, seconds: float, stop: Stop) -> float:
    """Returns the transitions received per second, counted from the first segment."""
    transport = choose_ports(Config(), is_free, lambda sentence: None).transport
    endpoint = transport.endpoint("experience")
    pipe, child_pipe = Pipe(duplex=False)
    children = [
        start_child("receiver", _receive, folder, endpoint, seconds, child_pipe),
        start_child("sender", _send, folder, endpoint),
    ]
    child_pipe.close()
    try:
        while not pipe.poll(POLL_SECONDS):
            if stop.poll():
                raise KeyboardInterrupt
            check_children(children[1:])
        return float(json.loads(pipe.recv_bytes()))
    finally:
        stop_children(children)
        pipe.close()


def _receive(stop: Stop, folder: str, endpoint: str, seconds: float, pipe: Connection) -> None:
    async def receive() -> float:
        codec, limit = RunCodec(RUN_ID, SCHEMA), max_segment_bytes(SCHEMA.table, TRANSITIONS)
        with open_context(read_keys(folder, Role.REPLAY)) as context:
            receiver = AsyncReceiver(context, PULL, endpoint, "experience", high_water_mark=WINDOW, max_bytes=limit)
            while not stop.poll() and not await receiver.burst(POLL_SECONDS, limit=1):
                pass
            began, count = time.perf_counter(), 0
            while not stop.poll() and time.perf_counter() - began < seconds:
                for frames in await receiver.burst(POLL_SECONDS):
                    count += len(codec.decode_segment(frames).records)
            return count / (time.perf_counter() - began)

    pipe.send_bytes(json.dumps(asyncio.run(receive())).encode())


def _send(stop: Stop, folder: str, endpoint: str) -> None:
    codec, segment = RunCodec(RUN_ID, SCHEMA), _make_segment()
    with open_context(read_keys(folder, Role.ACTOR)) as context:
        sender = ExperienceSender(context, endpoint, num_messages=WINDOW // 2)
        while not stop.poll():
            message = codec.encode_segment(segment)
            while not sender.send(message) and not stop.poll():
                time.sleep(0.0002)


def _make_segment() -> Segment:
    """Returns the first steps of an episode, with frames that cannot be compressed."""
    rng, steps = np.random.default_rng(0), np.arange(TRANSITIONS)
    records = np.zeros(TRANSITIONS, SCHEMA.table.record)
    records["frame"], records["next_frame"] = steps, steps + 1
    records["depth"] = np.minimum(steps + 1, SCHEMA.stack)
    records["next_depth"] = np.minimum(steps + 2, SCHEMA.stack)
    blob = make_blob([rng.bytes(FRAME_BYTES) for _ in range(TRANSITIONS + 1)])
    return Segment(Stream(0, 1), 0, 0, records, blob, 0)
