"""`python -m bench observations`: trains on four kinds of observations, and measures what a transition takes."""

import importlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from time import monotonic
from typing import Any, NamedTuple

import cramjam
import numpy as np

import apex
from apex.acting.segment_builder import SegmentBuilder
from apex.config import EnvironmentConfig
from apex.config.presets import preset_for
from apex.environments.factory import describe, kind, make_environment
from apex.runtime.trust import allow
from apexreplay.process.lifecycle import Stop
from bench.harness.command import Figures, make_parser, run_bench

MINUTES, EPISODES = 3.0, 100
NUM_STEPS = 1_000  # of random play, whose transitions are measured


class Task(NamedTuple):
    """An environment, its best score, and the score to reach."""

    environment: str
    best: float
    share: float = 0.9  # of the best score


TASKS = {
    "colour": Task("examples.observations:Colour", 20.0),
    "camera": Task("examples.observations:Camera", 20.0),
    "grid": Task("examples.observations:Grid", 1.0),
    "planes": Task("examples.observations:Planes", 5.0),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measures; returns the exit status."""
    parser = make_parser("observations", f"Trains each kind of observations for at most {MINUTES:g} minutes.")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK", help="default: all")
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3], metavar="N", help="default: 1 2 3")
    arguments = parser.parse_args(argv)
    return run_bench(lambda folder, stop: measure(arguments, str(folder), stop), show, as_json=arguments.json)


def measure(arguments: Any, folder: str, stop: Stop) -> Figures:
    """Returns the scores of the best and the last policies in new games, seconds of runs, and bytes per transition."""
    allow(["examples.observations"])
    figures: Figures = {}
    for name in arguments.tasks:
        task = TASKS[name]
        environment = EnvironmentConfig(id=task.environment)
        figures[f"{name}_bytes"], figures[f"{name}_lz4_bytes"] = measure_bytes(environment)
        for seed in arguments.seeds:
            config = preset_for(kind(environment), task.environment, gpu=lambda: False)
            goal = task.best * (task.share + 1) / 2  # above the bar, which must hold for new games
            run = replace(config.run, folder=folder, max_minutes=MINUTES, stop_score=goal, tensorboard=False)
            begun = monotonic()
            done = apex.train(replace(config, seed=seed, run=run))
            figures[f"{name}_{seed}_seconds"] = monotonic() - begun
            for checkpoint in ("best", "last"):
                played = apex.evaluate(done, episodes=EPISODES, seed=seed, checkpoint=checkpoint)
                figures[f"{name}_{seed}_{checkpoint}"] = played.mean
    return figures


def measure_bytes(environment: EnvironmentConfig) -> tuple[float, float]:
    """Returns the bytes of a transition's frames as they are stored, and of the LZ4 blocks of the raw observations."""
    config = preset_for(kind(environment), environment.id, gpu=lambda: False)
    schema, rng = describe(environment, config.actor.n_step), np.random.default_rng(0)
    games, raw = make_environment(environment, 1, seed=1), make_raw(environment)
    builder = SegmentBuilder(config.actor, environment, schema, 1)
    builder.begin(games.reset())
    stored, transitions, blocks = 0, 0, [lz4_bytes(raw.reset(seed=1)[0])]
    zeros = np.zeros(1, np.float32)
    for _ in range(NUM_STEPS):
        action = rng.integers(schema.num_actions, size=1)
        builder.append(action, zeros, zeros, games.step(action), zeros)
        observation, _, terminated, truncated, _ = raw.step(int(action[0]))
        blocks.append(lz4_bytes(observation))
        if terminated or truncated:
            raw.reset()
        if builder.ready:
            cuts = builder.cut(zeros)
            stored += sum(len(cut.blob) for cut in cuts)
            transitions += sum(len(cut.records) for cut in cuts)
    return stored / transitions, float(np.mean(blocks))


def make_raw(environment: EnvironmentConfig) -> Any:
    """Returns the environment as its class makes it."""
    module, _, name = environment.id.partition(":")
    return getattr(importlib.import_module(module), name)()


def lz4_bytes(observation: Any) -> int:
    """Returns the size of an observation, whose parts are compressed each."""
    parts = observation.values() if isinstance(observation, dict) else [observation]
    return sum(len(cramjam.lz4.compress_block(part.tobytes(), store_size=False)) for part in parts)


def show(figures: Figures) -> None:
    """Prints the figures as a table."""
    print("task     bytes  LZ4 of raw  ratio  seed: scores of the best and of the last policy, seconds of the run")
    for name, task in TASKS.items():
        if f"{name}_bytes" not in figures:
            continue
        stored, raw = figures[f"{name}_bytes"], figures[f"{name}_lz4_bytes"]
        seeds = [key.split("_")[1] for key in figures if key.startswith(name) and key.endswith("seconds")]
        scores = [
            f"{seed}: {best:.2f}, {last:.2f}, {seconds:.0f} s"
            for seed in seeds
            for best, last, seconds in [[figures[f"{name}_{seed}_{what}"] for what in ("best", "last", "seconds")]]
        ]
        print(
            f"{name:8} {stored:5.0f}  {raw:10.0f}  {stored / raw:5.2f}  {'; '.join(scores)} (possible: {task.best:g})"
        )


if __name__ == "__main__":
    sys.exit(main())
