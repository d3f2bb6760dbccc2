"""Measures the steps of replay, each alone and in this process."""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import numpy as np

from apex.config import Config
from apex.learning.batch_ring import BatchRing
from apex.runtime.ports import OFFSET_STEP, is_free
from apex.schema import Schema
from apex.transport.run_codec import RunCodec
from apexreplay.frame_blob import make_blob, read_table
from apexreplay.frames.lz4_blocks import make_blocks
from apexreplay.frames.stack_decoder import StackDecoder
from apexreplay.store.file import open_file
from apexreplay.store.layout import StoreSettings
from apexreplay.store.location import memory_folder, remove
from apexreplay.store.reader import StoreReader
from apexreplay.store.sum_tree import SumTree
from apexreplay.store.writer import StoreWriter
from apexreplay.transport.endpoints import BatchRequester, RequestReceiver
from apexreplay.transport.sockets import open_context
from apexreplay.types import BatchMessage, PriorityUpdate, Segment, Stream

TINY = Schema(frame_shape=(1,), frame_dtype="uint8", stack=1, num_actions=1, n_step=1, codec="raw")
SEGMENT_RECORDS = 4_096  # small stores, in which only the tree is measured
ROUNDS, CALLS = 7, 100  # A figure is the median of these rounds, each with the mean of these calls.


class StoreTimes(NamedTuple):
    """Milliseconds for one batch."""

    draw: float
    update: float


def time_store(num_slots: int, batch_size: int) -> StoreTimes:
    """Draws from a full store of `num_slots` transitions, and updates priorities of random keys."""
    # If this process is killed, `apex doctor --clean` removes the file of this name.
    path = memory_folder() / f"apex-{os.getpid():016x}-t.replay"
    rng = np.random.default_rng(0)
    length = min(SEGMENT_RECORDS, num_slots)
    writer = StoreWriter.create(
        path,
        TINY.table,
        StoreSettings(
            capacity=num_slots,
            max_bytes=64 * (num_slots // length + 2),
            num_streams=1,
            priority_exponent=0.6,
            min_priority=1e-6,
        ),
        store_incarnation=1,
    )
    try:
        records = np.zeros(length, TINY.table.record)
        records["next_frame"] = records["depth"] = records["next_depth"] = 1
        blob = make_blob([b"\0", b"\1"])
        for number in range(num_slots // length):
            records["priority"] = rng.random(length)
            writer.insert(Segment(Stream(0, 1), number, 0, records, blob, number))
        tree = open_file(path, TINY.table, writable=False).tree
        priorities = rng.random(batch_size).astype(np.float32)

        def update() -> None:
            keys = rng.integers(0, num_slots, batch_size)
            writer.update_priorities(PriorityUpdate(0, 1, 0, 0, keys, priorities))

        return StoreTimes(draw=time_draw(tree, batch_size, rng), update=median_ms(update))
    finally:
        writer.close()
        remove(path)


def time_draw(tree: SumTree, batch_size: int, rng: np.random.Generator) -> float:
    """Returns the milliseconds to find a transition in each of `batch_size` equal ranges of the sum, and its weight."""

    def draw() -> None:
        targets = (np.arange(batch_size) + rng.random(batch_size)) * (tree.total / batch_size)
        tree.weights(tree.find(targets))

    return median_ms(draw)


def time_batch(store: Path, config: Config, schema: Schema) -> dict[str, float]:
    """Returns the milliseconds of one batch by step, from the store at `store` to the trainer."""
    size, rng = config.learner.batch_size, np.random.default_rng(1)
    reader, codec = StoreReader(store, schema.table), RunCodec(1, schema)
    drawn = reader.sample(size, rng)
    if drawn is None:
        raise RuntimeError(f"nothing can be drawn from {store}")
    records, blob = drawn.records, drawn.blob
    batch = BatchMessage(0, 1, 0, 0, drawn.num_transitions, records, blob)
    message = codec.encode_batch(batch)
    stacks = np.empty((2, size, *schema.observation_shape), schema.frame_dtype)
    decoder = StackDecoder(schema.table, [stacks])
    calls = 20
    times = {"draw": time_draw(open_file(store, schema.table, writable=False).tree, size, rng)}
    sample = median_ms(lambda: reader.sample(size, rng), calls)
    times["gather"] = sample - times["draw"]
    times["encode"] = median_ms(lambda: codec.encode_batch(batch), calls)
    check = median_ms(lambda: codec.decode_batch([memoryview(part) for part in message], size), calls)
    times["send_receive"] = max(0.0, _time_travel(batch, config, codec, size) - times["encode"] - check)
    times["check"] = check
    whole = median_ms(lambda: decoder.decode(records, blob, np.arange(size)), calls)
    times["decompress"] = median_ms(_decompress(blob, schema), calls)
    times["place"] = max(0.0, whole - times["decompress"])
    return times


def time_direct(store: Path, config: Config, schema: Schema) -> float:
    """Returns the milliseconds to draw a batch and decode it from the store into the slots of a loader's ring."""
    size, rng = config.learner.batch_size, np.random.default_rng(1)
    reader = StoreReader(store, schema.table)
    decoders = cycle([StackDecoder(schema.table, [stacks]) for stacks in BatchRing(schema, size).stacks])
    rows = np.arange(size)

    def draw() -> None:
        drawn = reader.draw(size, rng)
        next(decoders).decode_located(drawn.frames, rows[: len(drawn.records)])
        reader.still_live(drawn)

    return median_ms(draw, 20)


def median_ms(call: Callable[[], object], calls: int = CALLS, rounds: int = ROUNDS) -> float:
    """Returns the milliseconds of one call: the median over the rounds of the mean of a round."""
    call()
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - began) / calls)
    return 1e3 * float(np.median(times))


def _time_travel(batch: BatchMessage, config: Config, codec: RunCodec, batch_size: int) -> float:
    """Returns the milliseconds from encoding to checking, over TCP within this process."""
    transport = config.transport
    first = transport.batches_port + transport.port_offset + OFFSET_STEP // 2
    port = next(port for port in range(first, first + 1_000) if is_free("127.0.0.1", port))
    endpoint = f"tcp://127.0.0.1:{port}"
    with open_context() as context:
        receiver = RequestReceiver(context, endpoint, codec)
        requester = BatchRequester(context, [endpoint], codec, batch_size=batch_size, credit=1)

        def travel() -> None:
            while not (requests := receiver.receive(0.01)):
                requester.receive(0.01)  # a greeting
            receiver.answer(requests[0][0], batch)
            if requester.receive(10.0) is None:
                raise RuntimeError("a batch was lost")

        return median_ms(travel, 20)


def _decompress(blob: bytes | memoryview, schema: Schema) -> Callable[[], object]:
    """Decodes all frames into one place."""
    table = read_table(blob)
    count = len(table)
    target = np.empty((1, schema.frame_bytes), np.uint8)
    blocks, places = make_blocks(target, schema.codec), np.full((count - 1, 2), (0, -1))
    return partial(blocks.decompress, blob, table[:-1], table[1:], places)


def read_memory(processes: list[int]) -> tuple[int, int]:
    """Returns the bytes of all processes: proportional set size, and the part in shared memory (the mapped file)."""
    whole = shared = 0
    for pid in processes:
        with suppress(FileNotFoundError, ProcessLookupError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                name, _, rest = line.partition(":")
                if name == "Pss":
                    whole += 1024 * int(rest.split()[0])
                elif name == "Pss_Shmem":
                    shared += 1024 * int(rest.split()[0])
    return whole, shared
