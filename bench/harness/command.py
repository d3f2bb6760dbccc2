"""What all benchmarks share: their options, a folder that goes with them, and figures that end as one JSON object."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from apex.command_line import parse_config
from apex.config import Config
from apex.config.arguments import Parser, positive_float
from apex.environments.factory import describe
from apex.errors import FAILED, FINISHED, ApexError
from apex.evaluation.evaluator import make_policy
from apex.runs.checkpoints.policy_file import read_policy
from apex.runtime.children import call_in_child
from apex.runtime.hardware import read_machine
from apex.runtime.lifecycle import Stop, stop_on_signals
from apex.sizing import size_to_machine
from apex.types import Schema
from bench.harness.recording import ActFunction, Recording, load, record

GAME = "ALE/Seaquest-v5"  # unless the options name another
NAME_A_GAME = ("--env", "--environment.id", "--preset", "--config")
NUM_STREAMS = 16  # of games that are recorded
TRAINED_EPSILON = 0.01

Figures = dict[str, float]


class VerificationError(ApexError):
    """Something arrived that is not what was sent."""


def make_parser(name: str, about: str, *, seconds: float = 0.0, of: str = "") -> Parser:
    """The options of `python -m bench NAME`; the benchmark adds its own.

    `seconds`: the default of --seconds, the duration `of` a part of the benchmark; 0: there is no such option.
    """
    parser = Parser(prog=f"python -m bench {name}", description=about)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    if seconds:
        text = f"{of}; default {seconds:g}"
        parser.add_argument("--seconds", type=positive_float, default=seconds, metavar="S", help=text)
    return parser


def read_config(arguments: Sequence[str], prog: str) -> Config:
    """The configuration of a benchmark's run: that of `apex train` with these options, sized to this machine."""
    words = list(arguments) if names(arguments, *NAME_A_GAME) else ["--preset", "atari", *arguments, "--env", GAME]
    config = parse_config(words, prog=prog)
    return size_to_machine(config, read_machine(), describe(config.environment, config.actor.n_step)).config


def names(arguments: Sequence[str], *options: str) -> bool:
    """Whether one of these options is typed, as `--option VALUE` or `--option=VALUE`."""
    return any(word.partition("=")[0].replace("_", "-") in options for word in arguments)


def measure_in_child(name: str, function: Callable[[Stop], dict[str, Any]], stop: Stop) -> dict[str, Any]:
    """What `function(stop)` returns, in a child of its own; raises KeyboardInterrupt when asked to stop."""
    facts = call_in_child(name, function, stop)
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
    """Measures and shows; returns the exit status: 1 if the figures do not pass."""
    with stop_on_signals() as stop, tempfile.TemporaryDirectory(prefix="apex-bench-") as name:
        figures = measure(Path(name), stop)
    show(figures)
    if as_json:
        print(json.dumps(figures))
    return FINISHED if passed(figures) else FAILED


def record_games(
    place: Path, config: Config, schema: Schema, num_frames: int, stop: Stop, policy: Path | None = None
) -> Recording:
    """So many distinct frames of games, into the folder `place`, which it makes. Without a policy they are random.

    They are played in a child: the emulators' threads must not be there at the next fork.
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
