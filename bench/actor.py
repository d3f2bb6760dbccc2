"""`python -m bench actor`: compares an actor process on one core with the bare environment on the same core.

The programs are real: a learner that publishes its first parameters and never trains, a replay server, and `apex actor`
with one process. The actor, its emulator threads and its sockets run on one core, all other programs on the other
cores. Steps are counted in the replay memory. Then each part of a step is measured alone.
"""

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from apex.acting.segment_builder import SegmentBuilder
from apex.acting.worker import acts_in_bfloat16
from apex.algorithms.exploration import epsilon_greedy, epsilon_ladder
from apex.config import Config
from apex.config.role_command import role_command
from apex.dqn.algorithm import DqnAgent
from apex.dqn.networks import make_network
from apex.environments.factory import describe, make_environment
from apex.runs.folder import RunFolder
from apex.runtime.hardware import read_bfloat16
from apex.runtime.ports import choose_ports, is_free
from apex.runtime.trust import allow_options
from apex.schema import Schema
from apex.types import Role
from apexreplay.process.lifecycle import Stop
from bench.harness.command import Figures, make_parser, measure_in_child, read_config, run_bench
from bench.harness.programs import control_address, map_stores, measure_rates, open_programs
from bench.harness.report import ReportRow, print_rows

PIECES = 5  # intervals; a rate is their median
PARTS = {  # parts of a step of one stream, in microseconds
    "forward": "Q-values of all streams in one batch",
    "choose": "epsilon-greedy",
    "environment": "step of the environment",
    "collect": "compress new frames, append the step",
    "cut": "n-step returns, priorities, segments",
}
LINES = [
    ReportRow("actor_steps_per_s", "steps stored by an actor on one core", "/s", digits=0, bar=2_000),
    ReportRow("bare_environment_steps_per_s", "steps of the bare environment", "/s", digits=0),
    ReportRow("actor_share_of_bare", "actor relative to the environment", "%", 100, 0, 65, 75),
]


def main(argv: Sequence[str]) -> int:
    """Measures; returns the exit status."""
    parser = make_parser(
        "actor",
        "Measures an actor on one core. Other options are those of apex train.",
        seconds=30.0,
        of="of the actor's part",
    )
    options, rest = parser.parse_known_args(argv)
    config = read_config(rest, parser.prog)

    def show(figures: Figures) -> None:
        print_rows(f"{config.environment.id}, {int(figures['envs_per_process'])} environments", LINES, figures)
        print_parts(figures)

    return run_bench(lambda folder, stop: measure(config, folder, options.seconds, stop), show, as_json=options.json)


def measure(config: Config, folder: Path, seconds: float, stop: Stop) -> Figures:
    """Returns all figures; takes about 2.5 x `seconds`."""
    core, others = divide_cores()
    actor = replace(config.actor, num_processes=1, num_actors=config.actor.envs_per_process)
    # The learner never trains, and the replay memory never delays inserts or fills up.
    replay_config = replace(config.replay, min_size_to_sample=config.replay.capacity, inserts_wait=False, num_shards=1)
    config = replace(
        config,
        actor=actor,
        replay=replay_config,
        evaluator=replace(config.evaluator, enabled=False),
        transport=replace(config.transport, port_offset=5_000),  # different from the ports of a run on this host
        run=replace(config.run, folder=str(folder), name="bench-actor", tensorboard=False, stop_score=None),
    )
    schema = describe(config.environment, config.actor.n_step)

    def bare(child_stop: Stop) -> dict[str, Any]:
        os.sched_setaffinity(0, {core})
        return {"rate": time_bare(config, child_stop, seconds / 3)}

    before = measure_in_child("bare", bare, stop)["rate"]
    rate = _time_actor(config, schema, folder, seconds, core, others, stop)
    after = measure_in_child("bare", bare, stop)["rate"]
    # The bare environment is measured before and after, because the machine may have become slower meanwhile.
    bare_rate = (before + after) / 2

    def parts(child_stop: Stop) -> dict[str, Any]:
        os.sched_setaffinity(0, {core})
        return dict(time_parts(config, schema, child_stop, seconds / 3))

    figures = {
        "actor_steps_per_s": rate,
        "bare_environment_steps_per_s": bare_rate,
        "actor_share_of_bare": rate / bare_rate,
        "envs_per_process": float(config.actor.envs_per_process),
        "network_width": config.network.width,
        **{f"part_{name}_us": value for name, value in measure_in_child("parts", parts, stop).items()},
    }
    return {name: float(f"{value:.6g}") for name, value in figures.items()}


def divide_cores() -> tuple[int, set[int]]:
    """Returns (the core for the actor, the cores for all else). With one core, all share it."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[-1], set(cores[:-1]) or {cores[-1]}


def _time_actor(
    config: Config, schema: Schema, folder: Path, seconds: float, core: int, others: set[int], stop: Stop
) -> float:
    config = choose_ports(config, is_free, lambda sentence: None)
    run = RunFolder.create(config, schema, argv=[])
    learner = control_address(config)
    with open_programs(folder, stop) as programs:
        trusted = allow_options()
        programs.start("learner", [*role_command(Role.LEARNER, run_folder=run.path), *trusted], others)
        programs.start("replay", role_command(Role.REPLAY, learner=learner), others)
        stores = programs.wait_for(lambda: map_stores(run), "replay memory")
        programs.start("actor", [*role_command(Role.ACTOR, learner=learner), *trusted], {core})

        def count() -> int:
            return sum(store.num_inserted for store in stores)

        programs.wait_for(count, "first transition")
        return statistics.median(measure_rates(count, seconds, PIECES, programs.check))


def time_bare(config: Config, stop: Stop, seconds: float) -> float:
    """Returns the steps per second of the same number of environments with random actions."""
    count = config.actor.envs_per_process
    environment = make_environment(config.environment, count, seed=1, num_threads=1)
    num_actions = describe(config.environment, config.actor.n_step).num_actions
    rng = np.random.default_rng(0)
    environment.reset()
    rates = []
    for _ in range(PIECES):
        began, steps = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - began) < seconds / PIECES:
            if stop.poll():
                raise KeyboardInterrupt
            environment.step(rng.integers(num_actions, size=count))
            steps += count
        rates.append(steps / elapsed)
    environment.close()
    return statistics.median(rates)


def time_parts(config: Config, schema: Schema, stop: Stop, seconds: float) -> Figures:
    """Returns the microseconds of each part of a step, per stream, without sockets."""
    count = config.actor.envs_per_process
    torch.set_num_threads(config.actor.num_threads)
    environment = make_environment(config.environment, count, seed=1, num_threads=1)
    builder = SegmentBuilder(config.actor, config.environment, schema, count)
    fast = acts_in_bfloat16(config, schema, has_bfloat16=read_bfloat16())
    agent = DqnAgent(make_network(config.network, schema, seed=0), bfloat16=fast)
    epsilon = epsilon_ladder(count, config.actor.epsilon_base, config.actor.epsilon_exponent)
    rng = np.random.default_rng(0)
    spent = dict.fromkeys(PARTS, 0.0)

    def timed(part: str, work: Any) -> Any:
        began = time.perf_counter()
        result = work()
        spent[part] += time.perf_counter() - began
        return result

    observation = environment.reset()
    builder.begin(observation)
    steps, began = 0, time.perf_counter()
    while time.perf_counter() < began + seconds:
        if stop.poll():
            raise KeyboardInterrupt
        seen = observation
        q = timed("forward", lambda seen=seen: agent.q_values(seen))
        if builder.ready:
            timed("cut", lambda q=q: builder.cut(q.max(1)))
        action = timed("choose", lambda q=q: epsilon_greedy(q, epsilon, rng))
        step = timed("environment", lambda action=action: environment.step(action))
        cut_short = (step.truncated & ~step.terminated).any()
        final_q = agent.q_values(step.final_observation) if cut_short else None
        final_value = None if final_q is None else final_q.max(1)
        played = action if step.played is None else step.played
        timed(
            "collect",
            lambda a=played, q=q, s=step, f=final_value: builder.append(a, q[np.arange(count), a], q.max(1), s, f),
        )
        observation = step.observation
        steps += count
    environment.close()
    return {name: 1e6 * value / steps for name, value in spent.items()}


def print_parts(figures: Figures) -> None:
    """Prints a table of the parts of a step."""
    values = {name: figures[f"part_{name}_us"] for name in PARTS}
    whole = sum(values.values())
    print(f"\n{'parts of one step of one stream, no sockets':<48}{'us':>12}{'share':>9}")
    for name, value in values.items():
        print(f"  {PARTS[name]:<46}{value:>12.1f}{value / whole:>9.0%}")
    print(f"  {'sum':<46}{whole:>12.1f}")
