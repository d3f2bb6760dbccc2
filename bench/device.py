"""`python -m bench device`: checks on this machine's GPU what the tests check with fakes, and measures a step.

Flips each switch of `GpuSwitches` alone, and compares the step with the present one. If the steps agree and the speed
is above 1.03 in two runs, flip the switch in `GPU_SWITCHES`.

Each check runs in its own child process, because CUDA stays unusable after an error. On a CPU most checks are trivial,
but they run, so that a rehearsal shows that they work.
"""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from apex.algorithms.gradient_step import DeviceBatch, Update
from apex.algorithms.graph_update import GPU_SWITCHES, GpuSwitches, GraphUpdate, place
from apex.algorithms.optimizers import make_optimizer
from apex.algorithms.parameters import flatten
from apex.config import Config
from apex.config.presets import preset
from apex.dpg.algorithm import DpgAlgorithm
from apex.dpg.networks import ActorCritic
from apex.dqn.autograd_update import EagerUpdate, make_update
from apex.dqn.networks import make_network
from apex.environments.factory import describe
from apex.learning.batch_ring import BatchRing
from apex.learning.device_transfer import lock_memory
from apex.learning.setup import choose_device, prepare_torch
from apex.schema import Schema
from apexreplay.process.lifecycle import Stop
from bench.harness.command import Figures, make_parser, measure_in_child, read_config, run_bench
from bench.harness.report import ReportRow, print_rows
from bench.learner import Nowhere, Resident, make_bench_trainer

STEPS = 20  # updates of each check; even, because two buffers take turns
ROUNDS = 9  # in which a flipped step and the present one are timed by turns; one on a CPU, which ignores switches
BAD_STEPS = (7, 8)  # updates with non-finite returns; they come after the capture
# relative to the movement of the parameters: sums have another order, and Adam's first steps depend on signs only
MOST_DIFFERENCE = 0.1
LINES = [
    ReportRow("locks_memory", "batch memory can be locked", "", digits=0),
    ReportRow("survives_a_failed_lock", "kernels run after a failed lock", "", digits=0, bar=1),
    ReportRow("same_step_adam", "graph and eager step agree: Adam", "", digits=0, bar=1),
    ReportRow("same_step_rmsprop", "graph and eager step agree: RMSProp", "", digits=0, bar=1),
    ReportRow("leaves_out_adam", "skipped updates change nothing: Adam", "", digits=0, bar=1),
    ReportRow("leaves_out_rmsprop", "skipped updates change nothing: RMSProp", "", digits=0, bar=1),
    ReportRow("waits_for_nothing", "no step waits for the GPU", "", digits=0, bar=1),
    ReportRow("goes_on_without_a_graph", "a network that waits is trained", "", digits=0, bar=1),
    *(
        ReportRow(f"same_step_{name}", f"{name} flipped: steps agree", "", digits=0, bar=1)
        for name in GpuSwitches._fields
    ),
    *(ReportRow(f"speed_{name}", f"{name} flipped: speed", "x", digits=3) for name in GpuSwitches._fields),
    ReportRow("kernels_per_step", "kernels and copies per step", "", digits=0, less_is_better=True),
    ReportRow("device_us_per_step", "device time per step", "us", digits=0, less_is_better=True),
    ReportRow("publish_us", "trainer time per publication", "us", digits=0, less_is_better=True),
    ReportRow("snapshot_ms", "trainer time per checkpoint", "ms", digits=2, less_is_better=True),
    ReportRow("snapshot_ready_ms", "time until the copy is on the host", "ms", digits=2, less_is_better=True),
]
CONTROL = Schema(
    frame_shape=(17,), frame_dtype="float32", stack=1, num_actions=0, n_step=3, codec="raw", action_size=6, masked=False
)
CPU = torch.device("cpu")
MUST_HOLD = [line.name for line in LINES if line.bar == 1]


class Waiting(nn.Module):
    """A network that reads its own values on the CPU, which is impossible while a CUDA graph is captured."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, observation: Tensor) -> Tensor:
        """The Q-values."""
        q: Tensor = self.network(observation)
        return q if float(q.detach().abs().max()) < 1e30 else q.clamp(-1e30, 1e30)


def main(argv: Sequence[str]) -> int:
    """Runs the checks; returns status 1 if one that must pass fails."""
    parser = make_parser("device", "Checks the learner's device. Other options are those of apex train.")
    options, rest = parser.parse_known_args(argv)
    config = read_config(rest, parser.prog)
    return run_bench(
        lambda folder, stop: measure(config, folder, stop),
        lambda figures: print_rows(f"{config.environment.id}, batch {config.learner.batch_size}", LINES, figures),
        as_json=options.json,
        passed=lambda figures: all(figures[name] == 1 for name in MUST_HOLD),
    )


def measure(config: Config, folder: Path, stop: Stop) -> Figures:
    """Returns all figures. If a check raises an exception, its first figure is 0, and the exception is printed."""
    schema = describe(config.environment, config.actor.n_step)
    device = choose_device(config.learner)
    checks: list[tuple[str, Callable[..., Figures]]] = [
        ("survives_a_failed_lock", check_locks),
        ("same_step_adam", partial(check_step, optimizer="adam")),
        ("same_step_rmsprop", partial(check_step, optimizer="rmsprop")),
        *((f"same_step_{name}", partial(check_switch, switch=name)) for name in GpuSwitches._fields),
        ("waits_for_nothing", check_waits),
        ("goes_on_without_a_graph", check_fallback),
        ("publish_us", time_copies),
    ]
    if device.type == "cuda":
        checks.append(("kernels_per_step", time_step))
    figures: Figures = dict.fromkeys(MUST_HOLD, 0.0)
    for name, check in checks:

        def run(child_stop: Stop, check: Callable[..., Figures] = check) -> dict[str, Any]:
            prepare_torch(config.learner, device)
            try:
                return check(config, schema, device)
            except Exception as error:  # The remaining checks run all the same.
                return {"failure": f"{type(error).__name__}: {error}"}

        found = measure_in_child(name, run, stop)
        if "failure" in found:
            print(f"{name}: {found.pop('failure')}")
        figures |= found
    return {**figures, "cuda": float(device.type == "cuda"), "batch_size": float(config.learner.batch_size)}


def check_locks(config: Config, schema: Schema, device: torch.device) -> Figures:
    """Checks whether memory can be locked, and whether the device stays usable after locking has failed."""
    torch.zeros(1, device=device)  # This call initializes CUDA.
    figures = {"locks_memory": 0.0, "survives_a_failed_lock": 0.0}
    for name, memory in (("nothing", np.zeros(0, np.uint8)), ("ring", BatchRing(schema, 64, 3).memory)):
        try:
            lock_memory(memory)
            figures["locks_memory"] = float(name == "ring")
        except RuntimeError as error:
            print(f"{name}: {error}")
    figures["survives_a_failed_lock"] = float(torch.ones(8, device=device).sum().item() == 8)
    return figures


def check_step(
    config: Config, schema: Schema, device: torch.device, *, optimizer: Literal["adam", "rmsprop"]
) -> Figures:
    """Compares the learner's step with the same step in eager mode; two of the updates are skipped."""
    _use_full_precision(device)
    learner = replace(config.learner, optimizer=optimizer, bfloat16="off", learning_rate=1e-4)
    online = place(make_network(config.network, schema, seed=1), device)
    target = place(make_network(config.network, schema, seed=2), device).requires_grad_(False)
    twin, start = copy.deepcopy(online), flatten(online)
    own, other = (make_optimizer(learner, network.parameters()) for network in (online, twin))
    step: Update = make_update(learner, online, target, own, device)
    one_pass = device.type == "cuda" and not GPU_SWITCHES.two_passes
    plain = EagerUpdate(learner, twin, target, other, one_pass=one_pass)
    kept = True
    buffers: list[DeviceBatch] = []  # two, by turns, as in the learner
    for number, fresh in enumerate(_batches(schema, learner.batch_size, device)):
        if number < 2:
            buffers.append(fresh)
        batch = buffers[number % 2]
        for own_rows, rows in zip(batch.tensors, fresh.tensors, strict=True):
            own_rows.copy_(rows)
        if number in BAD_STEPS:
            before = _contents(online, own)
            batch.n_step_return[number] = float("nan")
            finite = bool(step(batch).finite)
            kept &= not finite and all(map(torch.equal, before, _contents(online, own)))
            plain(batch)
        else:
            step(batch)
            plain(batch)
    moved = (flatten(twin) - start).norm()
    difference = float((flatten(online) - flatten(twin)).norm() / moved)
    same = float(moved) > 0 and difference < MOST_DIFFERENCE and (device.type == "cpu" or _is_recorded(step))
    return {
        f"same_step_{optimizer}": float(same),
        f"difference_{optimizer}": difference,
        f"leaves_out_{optimizer}": float(kept),
    }


class _Step(NamedTuple):
    """A step, the network that it updates, and the two buffers that its batches are in by turns."""

    update: Update
    online: nn.Module
    buffers: list[DeviceBatch]

    def run(self, device: torch.device) -> float:
        """Makes STEPS updates; returns the seconds."""
        began = time.perf_counter()
        for number in range(STEPS):
            self.update(self.buffers[number % 2])
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began


def check_switch(config: Config, schema: Schema, device: torch.device, *, switch: str) -> Figures:
    """Compares the step with `switch` flipped with the present step: its speed, then its result in float32."""
    flipped = GPU_SWITCHES._replace(**{switch: not getattr(GPU_SWITCHES, switch)})
    make = make_dpg_step if switch == "delayed_graphs" else make_dqn_step
    present, other = (make(config, schema, device, switches) for switches in (GPU_SWITCHES, flipped))
    for step in (present, other):  # Captures the graphs.
        step.run(device)
    ratios = [present.run(device) / other.run(device) for _ in range(ROUNDS if device.type == "cuda" else 1)]
    _use_full_precision(device)
    exact = replace(config, learner=replace(config.learner, optimizer="adam", bfloat16="off", learning_rate=1e-4))
    present, other = (make(exact, schema, device, switches) for switches in (GPU_SWITCHES, flipped))
    start = flatten(present.online)
    for step in (present, other):
        step.run(device)
    moved = (flatten(present.online) - start).norm()
    difference = float((flatten(other.online) - flatten(present.online)).norm() / moved)
    graphs = [step.update for step in (present, other) if isinstance(step.update, GraphUpdate)]
    same = float(moved) > 0 and difference < MOST_DIFFERENCE and all(map(_is_recorded, graphs))
    return {
        f"speed_{switch}": float(np.median(ratios)),
        f"same_step_{switch}": float(same),
        f"difference_{switch}": difference,
    }


def make_dqn_step(config: Config, schema: Schema, device: torch.device, switches: GpuSwitches) -> _Step:
    """Returns the step of DQN."""
    online, target = (place(make_network(config.network, schema, seed=seed), device, switches) for seed in (1, 2))
    optimizer = make_optimizer(config.learner, online.parameters())
    update = make_update(config.learner, online, target.requires_grad_(False), optimizer, device, switches=switches)
    batches = _batches(schema, config.learner.batch_size, device)
    return _Step(update, online, [next(batches), next(batches)])


def make_dpg_step(config: Config, schema: Schema, device: torch.device, switches: GpuSwitches) -> _Step:
    """Returns the step of preset `control` for HalfCheetah's sizes, without its noise."""
    control = preset("control")
    learner = replace(control.learner, learning_rate=config.learner.learning_rate, num_threads=1)
    control = replace(control, learner=learner, dpg=replace(control.dpg, target_noise=0.0))
    algorithm = DpgAlgorithm(control, CONTROL)
    online, target = (cast(ActorCritic, place(algorithm.make_network(), device)) for _ in range(2))
    update = algorithm.make_update(online, target, algorithm.make_optimizer(online), CPU)  # without graphs
    if device.type == "cuda" and switches.delayed_graphs:
        update = GraphUpdate(update, cycle=control.dpg.policy_period)
    rng, size, buffers = np.random.default_rng(1), learner.batch_size, []
    for _ in range(2):
        rows = rng.normal(size=(2, size, 1, *CONTROL.frame_shape)), rng.uniform(-1, 1, (size, CONTROL.action_size))
        others = rng.normal(size=size), np.full(size, 0.97), rng.uniform(0.1, 1, size)
        buffers.append(DeviceBatch(*(torch.from_numpy(row.astype(np.float32)).to(device) for row in (*rows, *others))))
    return _Step(update, online, buffers)


def check_waits(config: Config, schema: Schema, device: torch.device) -> Figures:
    """Raises an exception if an operation of a step waits for the device, as far as torch notices."""
    with _trainer(config, schema, device) as trainer:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        for _ in range(STEPS):
            trainer.step(0.0)
        trainer.publish_newest()
        trainer.snapshot()
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    return {"waits_for_nothing": 1.0}


def check_fallback(config: Config, schema: Schema, device: torch.device) -> Figures:
    """Trains a network for which no graph can be captured."""
    online, target = (place(Waiting(make_network(config.network, schema, seed=seed)), device) for seed in (1, 2))
    optimizer = make_optimizer(config.learner, online.parameters())
    step = make_update(config.learner, online, target.requires_grad_(False), optimizer, device)
    good = True
    for batch in _batches(schema, config.learner.batch_size, device):
        before = flatten(online)
        updated = step(batch)
        good &= bool(updated.finite) and not torch.equal(before, flatten(online))
    return {"goes_on_without_a_graph": float(good and not _is_recorded(step))}


def time_step(config: Config, schema: Schema, device: torch.device) -> Figures:
    """Counts the launches of a step with torch's profiler."""
    with _trainer(config, schema, device) as trainer:
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(STEPS):
                trainer.step(0.0)
            torch.cuda.synchronize()
    on_device = [event for event in profile.events() or () if "CUDA" in str(event.device_type)]
    return {
        "kernels_per_step": len(on_device) / STEPS,
        "device_us_per_step": sum(event.time_range.elapsed_us() for event in on_device) / STEPS,
    }


def time_copies(config: Config, schema: Schema, device: torch.device) -> Figures:
    """Measures how long publications and checkpoints block the trainer."""
    with _trainer(config, schema, device) as trainer:
        times: dict[str, list[float]] = {"publish_us": [], "snapshot_ms": [], "snapshot_ready_ms": []}
        for _ in range(STEPS):
            trainer.step(0.0)
            began = time.perf_counter()
            trainer.publish_newest()
            times["publish_us"].append(1e6 * (time.perf_counter() - began))
            began = time.perf_counter()
            _, copied = trainer.snapshot()
            times["snapshot_ms"].append(1e3 * (time.perf_counter() - began))
            copied()
            times["snapshot_ready_ms"].append(1e3 * (time.perf_counter() - began))
    return {name: float(np.median(values)) for name, values in times.items()}


@contextmanager
def _trainer(config: Config, schema: Schema, device: torch.device) -> Iterator[Any]:
    """Returns a trainer on one batch, whose step is captured already."""
    trainer = make_bench_trainer(config, schema, device, Resident(schema, config.learner.batch_size), Nowhere())
    for _ in range(STEPS):
        trainer.step(0.0)
    trainer.flush()
    yield trainer
    trainer.flush()


def _batches(schema: Schema, batch_size: int, device: torch.device) -> Iterator[DeviceBatch]:
    resident = Resident(schema, batch_size).receive(0.0)
    assert resident is not None
    rng = np.random.default_rng(1)
    for _ in range(STEPS):
        order = rng.permutation(batch_size)
        arrays = (resident.stacks[:, order], resident.action[order], resident.n_step_return[order])
        weights = rng.uniform(0.1, 1, batch_size).astype(np.float32)
        rows = (*arrays, resident.discount[order], weights)
        yield DeviceBatch(*(torch.from_numpy(np.ascontiguousarray(row)).to(device) for row in rows))


def _use_full_precision(device: torch.device) -> None:
    """Lets float32 products differ by rounding only."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False


def _contents(network: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    averages = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return [tensor.detach().clone() for tensor in (*network.parameters(), *averages)]


def _is_recorded(step: Update) -> bool:
    return isinstance(step, GraphUpdate) and step.recorded
