"""Parts of all benchmarks: options, a temporary folder, and output as one JSON object."""

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from apex.command_line import parse_config
from apex.config import Config, RunConfig
from apex.config.arguments import Parser, positive_float
from apex.environments.factory import describe
from apex.evaluation.evaluator import make_policy
from apex.runs.checkpoints.policy_file import read_policy
from apex.runtime.hardware import read_machine
from apex.schema import Schema
from apex.sizing import size_to_machine
from apexreplay.errors import FAILED, FINISHED, ApexError
from apexreplay.process.children import call_in_child
from apexreplay.process.lifecycle import Stop, stop_on_signals
from bench.harness.recording import ActFunction, Recording, load, record

GAME = "ALE/Seaquest-v5"  # default game
NAME_A_GAME = ("--env", "--environment.id", "--preset", "--config")
NUM_STREAMS = 16  # recorded streams of games
TRAINED_EPSILON = 0.01

Figures = dict[str, float]


class VerificationError(ApexError):
    """Received data differs from the data that was sent."""


def make_parser(name: str, about: str, *, seconds: float = 0.0, of: str = "") -> Parser:
    """Returns a parser of the options of `python -m bench NAME`; the benchmark adds its own.

    `seconds`: default of --seconds, the duration `of` a part of the benchmark. 0: there is no such option.
    """
    parser = Parser(prog=f"python -m bench {name}", description=about)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    if seconds:
        text = f"{of}; default {seconds:g}"
        parser.add_argument("--seconds", type=positive_float, default=seconds, metavar="S", help=text)
    return parser


def read_config(arguments: Sequence[str], prog: str) -> Config:
    """Returns the configuration of `apex train` with these options, sized to this machine."""
    chosen = list(arguments) if names(arguments, *NAME_A_GAME) else ["--preset", "atari", *arguments, "--env", GAME]
    config = parse_config(chosen, prog=prog)
    return size_to_machine(config, read_machine(), describe(config.environment, config.actor.n_step)).config


def names(arguments: Sequence[str], *options: str) -> bool:
    """Returns whether one of these options is given, as `--option VALUE` or `--option=VALUE`."""
    return any(word.partition("=")[0].replace("_", "-") in options for word in arguments)


def measure_in_child(name: str, function: Callable[[Stop], dict[str, Any]], stop: Stop) -> dict[str, Any]:
    """Returns the result of `function(stop)` in a child process; raises KeyboardInterrupt if a stop was requested."""
    facts = call_in_child(name, function, stop, stuck_seconds=RunConfig().stuck_seconds)
    if not facts or stop.poll():
        raise KeyboardInterrupt
    return facts


def run_bench(
    measure: Callable[[Path, Stop], Figures],
    show: Callable[[Figures], None],
    *,
    as_json: bool,
    passed: Callable[[Figures], bool] = lambda figures: True,
) -> int:
    """Measures and shows the figures; returns status 1 if they do not pass."""
    with stop_on_signals() as stop, tempfile.TemporaryDirectory(prefix="apex-bench-") as name:
        figures = measure(Path(name), stop)
    show(figures)
    if as_json:
        print(json.dumps(figures))
    return FINISHED if passed(figures) else FAILED


def record_games(
    place: Path, config: Config, schema: Schema, num_frames: int, stop: Stop, policy: Path | None = None
) -> Recording:
    """Records this number of distinct frames of games in the new folder `place`. Without a policy, actions are random.

    A child process plays the games, because this process must not have the emulators' threads when it forks.
    """
    place.mkdir()
    config = replace(config, actor=replace(config.actor, num_actors=NUM_STREAMS))

    def play(child_stop: Stop) -> dict[str, Any]:
        return record(child_stop, place, config, schema, _make_policy(config, schema, policy), num_frames)

    return load(place, schema, measure_in_child("recorder", play, stop))


def _make_policy(config: Config, schema: Schema, path: Path | None) -> ActFunction:
    rng = np.random.default_rng(config.seed)
    if path is None:
        return lambda observation: rng.integers(schema.num_actions, size=len(observation))
    policy = make_policy(read_policy(path)[1], TRAINED_EPSILON, rng)
    return lambda observation: policy(observation, None)
