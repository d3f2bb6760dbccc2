"""`python -m bench threads`: compares four ways to make the learner's updates on two cores, by turns.

One thread with gradients by hand; the same with the target network on a second thread; a half of the batch on each
thread, with gradients by hand; and the same halves with autograd, which the learner uses from 128 rows on. All run on
one batch in memory.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from apex.algorithms.gradient_step import DeviceBatch, Update, Updated
from apex.algorithms.optimizers import clip_gradients, make_optimizer
from apex.config import Config, LearnerConfig
from apex.dqn.autograd_update import EagerUpdate, make_twin
from apex.dqn.manual_backward.update import ManualUpdate, has_manual_backward
from apex.dqn.networks import make_network
from apex.environments.factory import describe
from apex.learning.setup import prepare_torch
from apex.schema import Schema
from apexreplay.errors import UsageError
from apexreplay.process.lifecycle import Stop
from bench.harness.command import Figures, make_parser, measure_in_child, names, read_config, run_bench
from bench.harness.report import ReportRow, print_rows
from bench.learner import BATCH_SIZE, Resident

ROUNDS = 15  # turns of each way
WAYS = {
    "one": "one thread, by hand",
    "target": "target network aside, by hand",
    "halves": "halves, by hand",
    "autograd": "halves, autograd (the default)",
}
BARS = {"one": 0.95, "halves": 1.15}  # one thread: then the second core is better used by actors
LINES = [
    *(ReportRow(f"{way}_updates_per_s", label, "/s", digits=2) for way, label in WAYS.items()),
    *(ReportRow(f"{way}_cpu_ms", f"{label}: CPU time", "ms", digits=1) for way, label in WAYS.items()),
    *(ReportRow(f"{way}_ratio", f"{WAYS[way]}: rate / default", "x", digits=3, bar=BARS.get(way)) for way in WAYS),
]


class Halves(Update):
    """The step of `ManualUpdate`, with a half of the batch on each of two threads. The batch has an even size."""

    torch_threads = 1

    def __init__(
        self, config: LearnerConfig, online: nn.Module, target: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        self._config, self._optimizer, twin = config, optimizer, make_twin(online)
        self._own, self._other = list(online.parameters()), list(twin.parameters())
        # Each half only computes its gradient.
        half, nothing = replace(config, max_gradient_norm=1e30), _NoOptimizer()
        self._halves = [ManualUpdate(half, network, target, nothing) for network in (online, twin)]
        self._second = ThreadPoolExecutor(1, "half", torch.set_num_threads, (1,))

    @torch.no_grad()
    def __call__(self, batch: DeviceBatch) -> Updated:
        """Updates the online network. The figures are those of the first half."""
        stacks = batch.stacks.chunk(2, 1)
        rows = zip(*(row.chunk(2) for row in batch.tensors[1:]), strict=True)
        one, other = (DeviceBatch(part, *row) for part, row in zip(stacks, rows, strict=True))
        second = self._second.submit(self._halves[1], other)
        first, last = self._halves[0](one), second.result()
        gradients, others = ([cast(Tensor, each.grad) for each in part] for part in (self._own, self._other))
        torch._foreach_add_(gradients, others)
        torch._foreach_mul_(gradients, 0.5)  # Each half has divided by its own number of rows.
        clip_gradients(self._own, self._config.max_gradient_norm)
        self._optimizer.step()
        increment_version(self._other)  # So that the twin rounds its weights again.
        return Updated(torch.cat([first.td_errors, last.td_errors]), first.finite & last.finite, first.figures)


class _NoOptimizer(torch.optim.Optimizer):
    """Leaves the parameters as they are."""

    def __init__(self) -> None:
        pass

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Does nothing."""


def main(argv: Sequence[str]) -> int:
    """Measures; returns the exit status."""
    about = "Compares four ways to use two threads for an update. Other options are those of apex train."
    parser = make_parser("threads", about, seconds=120.0, of="duration of all four together")
    options, rest = parser.parse_known_args(argv)
    typed = names(rest, "--batch-size", "--learner.batch-size", "--config")
    config = read_config(rest if typed else [*rest, "--batch-size", str(BATCH_SIZE)], parser.prog)
    schema = describe(config.environment, config.actor.n_step)
    run = lambda stop: measure(config, schema, options.seconds, stop)  # noqa: E731
    return run_bench(
        lambda folder, stop: measure_in_child("threads", run, stop),
        lambda figures: print_rows(f"{config.environment.id}, batch {config.learner.batch_size}", LINES, figures),
        as_json=options.json,
    )


def make_ways(config: Config, schema: Schema) -> dict[str, tuple[Update, nn.Module]]:
    """Returns the step and its network for each way; all networks are equal. Raises UsageError for other networks."""
    learner, ways = config.learner, {}
    make: dict[str, Callable[..., Update]] = {
        "one": ManualUpdate,
        "target": lambda *parts: ManualUpdate(*parts, target_in_background=True),
        "halves": Halves,
        "autograd": lambda *parts: EagerUpdate(*parts, num_parts=2),
    }
    for way, make_update in make.items():
        online, target = (make_network(config.network, schema, seed=seed) for seed in (1, 2))
        if learner.batch_size % 2 or not has_manual_backward(online, bfloat16=learner.bfloat16 == "on"):
            raise UsageError("this measurement needs an even batch size and a network with gradients by hand")
        optimizer = make_optimizer(learner, online.parameters())
        ways[way] = make_update(learner, online, target.requires_grad_(False), optimizer), online
    return ways


def measure(config: Config, schema: Schema, seconds: float, stop: Stop) -> Figures:
    """Returns the rate and the CPU time of each way, and the median of its ratios to autograd's rate in one round."""
    prepare_torch(replace(config.learner, num_threads=1), torch.device("cpu"))
    batch = Resident(schema, config.learner.batch_size).receive(0.0)
    assert batch is not None
    weights = np.ones(config.learner.batch_size, np.float32)
    arrays = batch.stacks, batch.action, batch.n_step_return, batch.discount, weights
    rows = DeviceBatch(*map(torch.from_numpy, arrays))
    ways = {way: update for way, (update, _) in make_ways(config, schema).items()}
    rates: dict[str, list[float]] = {way: [] for way in ways}
    cpu: dict[str, list[float]] = {way: [] for way in ways}
    torch.set_flush_denormal(True)  # as in the trainer, and only here
    try:
        for number in range(ROUNDS + 1):
            for way in sorted(ways, reverse=bool(number % 2)):
                began, used, count = time.perf_counter(), time.process_time(), 0
                while time.perf_counter() - began < seconds / (ROUNDS + 1) / len(ways) or not count:
                    if stop.poll():
                        raise KeyboardInterrupt
                    ways[way](rows)
                    count += 1
                if number:  # The first round warms up.
                    rates[way].append(count / (time.perf_counter() - began))
                    cpu[way].append(1e3 * (time.process_time() - used) / count)
    finally:
        torch.set_flush_denormal(False)
    figures: Figures = {"batch_size": float(config.learner.batch_size), "network_width": config.network.width}
    for way in ways:
        ratios = [one / other for one, other in zip(rates[way], rates["autograd"], strict=True)]
        figures |= {f"{way}_updates_per_s": statistics.median(rates[way]), f"{way}_cpu_ms": statistics.median(cpu[way])}
        figures[f"{way}_ratio"] = statistics.median(ratios)
    return {name: float(f"{value:.5g}") for name, value in figures.items()}
