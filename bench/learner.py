"""`python -m bench learner`: compares the learner's updates per second with and without a replay server.

Three rates of the same network and batch are measured. Plain: a straightforward step in float32, operation by
operation; on a GPU, the batch is copied from locked memory, as with `pin_memory` of a data loader. Resident: the
learner's own step on one batch in memory. Fed: the learner's step with loaders that draw from a real replay server, and
with priorities returned. Resident divided by plain is the gain of our implementation; fed divided by resident is the
cost of replay.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from apex.algorithms.gradient_step import DeviceBatch
from apex.algorithms.interface import make_algorithm
from apex.algorithms.optimizers import make_optimizer
from apex.config import Config
from apex.dqn.autograd_update import EagerUpdate
from apex.dqn.networks import make_network
from apex.environments.factory import describe
from apex.learning.batch_ring import Batch, BatchPart, BatchRing
from apex.learning.device_transfer import lock_memory
from apex.learning.setup import choose_device, prepare_torch
from apex.learning.trainer import BatchProvider, Trainer
from apex.schema import Schema
from apexreplay.item_kinds import Array
from apexreplay.process.lifecycle import Stop
from apexreplay.types import PriorityUpdate
from bench.harness.command import (
    NUM_STREAMS,
    Figures,
    make_parser,
    measure_in_child,
    names,
    read_config,
    record_games,
    run_bench,
)
from bench.harness.replay_fixture import open_replay_fixture
from bench.harness.report import ReportRow, print_rows

PIECES = 5  # intervals; a rate is their median
BATCH_SIZE = 512  # batch size of the bars; --batch-size changes it
NUM_FRAMES = 20_000  # distinct frames that are recorded
WARM_UP_UPDATES = 5  # CUDA graphs need three of them
LINES = [
    ReportRow("learner_updates_per_s", "fed by replay, with priorities returned", "/s", digits=2, bar=5.5, stretch=10),
    ReportRow("learner_resident_updates_per_s", "on a resident batch", "/s", digits=2),
    ReportRow("learner_plain_updates_per_s", "plain float32 steps", "/s", digits=2),
    ReportRow("learner_compiled_updates_per_s", "plain steps with torch.compile", "/s", digits=2),
    ReportRow("learner_fed_share", "fed relative to resident", "%", 100, 0, 95, 99),
    ReportRow("learner_gain", "fed relative to plain", "x", 1, 2, 2),
    ReportRow("learner_wait_share", "share of time waiting for batches", "%", 100, 1, less_is_better=True),
]


class Resident:
    """A batch provider with one batch that is always available."""

    def __init__(self, schema: Schema, batch_size: int) -> None:
        rng = np.random.default_rng(0)
        # The batch is in the same kind of memory as a real one, so that a GPU copies it in the same way.
        ring = BatchRing(schema, batch_size, 1)
        self.memory: Array = ring.memory
        stacks = ring.stacks[0]
        stacks[...] = rng.integers(0, 256, stacks.shape) if schema.frame_dtype == "uint8" else rng.random(stacks.shape)
        self._batch = Batch(
            stacks=stacks,
            keys=np.arange(batch_size),
            probability=rng.uniform(0.5, 2.0, batch_size) / 1e6,
            action=rng.integers(0, schema.num_actions, batch_size),
            n_step_return=rng.normal(size=batch_size).astype(np.float32),
            discount=np.full(batch_size, 0.97, np.float32),
            version=np.zeros(batch_size, np.int64),
            num_transitions=1_000_000,
            parts=[BatchPart(0, 1, 0, 0)],
            slot=0,
        )

    def receive(self, timeout: float) -> Batch | None:
        """Returns the batch."""
        return self._batch

    def release(self, slot: int) -> None:
        """Does nothing: the batch stays available."""


class Nowhere:
    """Discards priorities."""

    def send(self, update: PriorityUpdate) -> None:
        """Does nothing."""


def main(argv: Sequence[str]) -> int:
    """Measures; returns the exit status."""
    parser = make_parser(
        "learner",
        "Measures the learner. Other options are those of apex train.",
        seconds=60.0,
        of="duration of all three measurements",
    )
    parser.add_argument("--compiled", action="store_true", help="also measure torch.compile (needs a C++ compiler)")
    options, rest = parser.parse_known_args(argv)
    typed = names(rest, "--batch-size", "--learner.batch-size", "--config")
    config = read_config(rest if typed else [*rest, "--batch-size", str(BATCH_SIZE)], parser.prog)
    title = f"{config.environment.id}, batch {config.learner.batch_size}, {config.learner.num_threads} threads"
    return run_bench(
        lambda folder, stop: measure(config, folder, options.seconds, stop, compiled=options.compiled),
        lambda figures: print_rows(title, LINES, figures),
        as_json=options.json,
    )


def measure(config: Config, folder: Path, seconds: float, stop: Stop, *, compiled: bool = False) -> Figures:
    """Returns all figures; with `compiled`, also the plain step with torch.compile.

    The fed rate is measured in this process, which therefore initializes CUDA only after it has forked.
    """
    schema = describe(config.environment, config.actor.n_step)
    each = seconds / 3
    device = choose_device(config.learner)
    plain = measure_in_child("plain", lambda child_stop: {"rate": time_plain(config, schema, each, child_stop)}, stop)
    extra: Figures = {}
    if compiled:
        rate = measure_in_child(
            "compiled", lambda child_stop: {"rate": time_plain(config, schema, each, child_stop, compiled=True)}, stop
        )
        extra["learner_compiled_updates_per_s"] = rate["rate"]
    resident = measure_in_child(
        "resident", lambda child_stop: {"rate": time_resident(config, schema, each, child_stop)}, stop
    )
    fed, wait_share = _time_fed(config, schema, folder, each, stop)
    figures = {
        "learner_updates_per_s": fed,
        "learner_resident_updates_per_s": resident["rate"],
        "learner_plain_updates_per_s": plain["rate"],
        "learner_fed_share": fed / resident["rate"],
        "learner_gain": fed / plain["rate"],
        "learner_wait_share": wait_share,
        "batch_size": float(config.learner.batch_size),
        "network_width": config.network.width,
        "cuda": float(device.type == "cuda"),
        **extra,
    }
    return {name: float(f"{value:.6g}") for name, value in figures.items()}


def time_plain(config: Config, schema: Schema, seconds: float, stop: Stop, *, compiled: bool = False) -> float:
    """Returns the updates per second of a plain step: float32, eager or compiled, on all cores or on the GPU."""
    device = choose_device(config.learner)
    learner = replace(config.learner, bfloat16="off")
    online, target = (make_network(config.network, schema, seed=config.seed).to(device) for _ in range(2))
    optimizer = make_optimizer(learner, online.parameters())
    target.requires_grad_(False)
    if compiled:
        online, target = (cast(nn.Module, torch.compile(network)) for network in (online, target))
    update = EagerUpdate(learner, online, target, optimizer)
    resident = Resident(schema, learner.batch_size)
    batch = resident.receive(0.0)
    assert batch is not None
    if device.type != "cpu":
        with suppress(RuntimeError):  # The learner also continues with memory that cannot be locked.
            lock_memory(resident.memory)
    weights = np.ones(learner.batch_size, np.float32)

    def step() -> None:
        arrays = batch.stacks, batch.action, batch.n_step_return, batch.discount, weights
        updated = update(DeviceBatch(*(torch.from_numpy(array).to(device, non_blocking=True) for array in arrays)))
        updated.td_errors.cpu()  # The plain step returns the priorities immediately.

    return _median_rate(step, lambda: None, seconds, stop)


def time_resident(config: Config, schema: Schema, seconds: float, stop: Stop) -> float:
    """Returns the updates per second of the learner's own step on one resident batch."""
    device = choose_device(config.learner)
    prepare_torch(config.learner, device)
    trainer = make_bench_trainer(config, schema, device, Resident(schema, config.learner.batch_size), Nowhere())
    return _median_rate(lambda: trainer.step(0.0), trainer.flush, seconds, stop)


def make_bench_trainer(
    config: Config, schema: Schema, device: torch.device, batches: BatchProvider, priorities: Any
) -> Trainer:
    """Returns the learner's own trainer, which publishes nothing."""
    trainer = Trainer(
        config.learner,
        make_algorithm(config, schema),
        device=device,
        batches=batches,
        priorities=priorities,
        publish=lambda parameters: None,
    )
    torch.set_num_threads(trainer.torch_threads)
    return trainer


def _time_fed(config: Config, schema: Schema, folder: Path, seconds: float, stop: Stop) -> tuple[float, float]:
    """Returns the updates per second from a replay server, and the share of time in which the learner waited."""
    capacity = max(50_000, 2 * config.learner.batch_size)
    config = replace(
        config,
        actor=replace(config.actor, num_actors=NUM_STREAMS),
        replay=replace(
            config.replay,
            capacity=capacity,
            min_size_to_sample=capacity // 2,
            samples_per_insert=0.0,
            inserts_wait=False,
            num_shards=1,
        ),
        transport=replace(config.transport, port_offset=6_000, lease_seconds=86_400.0),
    )
    recording = record_games(folder / "recording", config, schema, NUM_FRAMES, stop)
    device = choose_device(config.learner)
    with open_replay_fixture(config, recording, folder, "memory", stop, cuda=device.type == "cuda") as bed:
        bed.begin_insert(transitions=capacity - 5_000)
        bed.end_insert()
        prepare_torch(config.learner, device)
        trainer = make_bench_trainer(config, schema, device, bed.ring, bed.priorities)

        def step() -> None:
            bed.check()
            while not trainer.step(1.0):
                bed.check()

        _warm_up(step, trainer.flush)
        waited, began = trainer.wait_seconds, time.monotonic()
        rate = _median_rate(step, trainer.flush, seconds, stop)
        return rate, (trainer.wait_seconds - waited) / (time.monotonic() - began)


def _warm_up(step: Callable[[], object], flush: Callable[[], None]) -> None:
    for _ in range(WARM_UP_UPDATES):
        step()
    flush()


def _median_rate(step: Callable[[], object], flush: Callable[[], None], seconds: float, stop: Stop) -> float:
    """Returns steps per second. An interval ends when the device has finished all its steps."""
    _warm_up(step, flush)
    rates = []
    for _ in range(PIECES):
        began, count = time.perf_counter(), 0
        while time.perf_counter() - began < seconds / PIECES or not count:
            if stop.poll():
                raise KeyboardInterrupt
            step()
            count += 1
        flush()
        rates.append(count / (time.perf_counter() - began))
    return statistics.median(rates)
