"""The `apex` command: which program each word starts. A program is imported only when it is asked for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import NamedTuple

from apex.config.arguments import reader_may_leave
from apex.errors import ConfigError
from apex.runtime.lifecycle import FINISHED, reports_errors
from apex.version import VERSION

Main = Callable[[list[str]], int]  # what follows its word -> exit status


class Command(NamedTuple):
    """A word after `apex`."""

    module: str  # whose main(argv) it calls
    summary: str


COMMANDS = {
    "train": Command("apex.launch.local", "a whole run on this machine"),
    "evaluate": Command("apex.evaluation.command", "full games of a trained agent, its score and a video"),
    "watch": Command("apex.evaluation.watch", "games of a run's newest policy, in a window or as a film"),
    "doctor": Command("apex.launch.preflight.doctor", "whether a run can start here, and the remedy if not"),
    "status": Command("apex.launch.status", "what a run is doing, from any shell"),
    "plot": Command("apex.runs.plots.command", "learning curves of runs and others in one picture"),
    "report": Command("apex.runs.report.command", "a page about a run, to send to a colleague"),
    "export": Command("apex.evaluation.export.command", "a run's weights for others: safetensors, a model card, ONNX"),
    "keys": Command("apex.transport.curve.command", "makes the keys of a cluster: apex keys new DIR"),
    "learner": Command("apex.learner", "the learner alone; the others find it by its address"),
    "replay": Command("apex.replay", "the replay server alone: --learner HOST"),
    "actor": Command("apex.actor", "actors on this host: --learner HOST"),
    "evaluator": Command("apex.evaluator", "plays the newest parameters: --learner HOST"),
    "cluster": Command("apex.cloud.cluster.command", "looks after clusters on EC2: list, tail, resize, kill, audit"),
    "host": Command("apex.cloud.host.command", "what a machine of a cluster does for itself, by its units"),
}


def load(module: str) -> Main:
    """Imports a program."""
    program: Main = importlib.import_module(module).main
    return program


@reports_errors("apex")
def main(argv: Sequence[str] | None = None, *, load: Callable[[str], Main] = load) -> int:
    """Runs the program that the first word names; returns its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        with reader_may_leave():
            print(overview())
        return FINISHED
    if words[0] == "--version":
        print(f"apex {VERSION}")
        return FINISHED
    return load(_find(words[0]).module)(words[1:])


def overview() -> str:
    """What `apex` alone prints."""
    lines = [
        "Ape-X over ZeroMQ: many actors, one prioritized replay, one learner.",
        "",
        "usage: apex COMMAND [OPTIONS]",
        "",
    ]
    lines += [f"  {name:<10} {command.summary}" for name, command in COMMANDS.items()]
    lines += ["", "apex train --preset cartpole   trains, shows it, and ends with the score"]
    lines += ["apex COMMAND --help            tells all about one", "apex --version"]
    return "\n".join(lines)


def _find(word: str) -> Command:
    if word in COMMANDS:
        return COMMANDS[word]
    known = f"known: {', '.join(COMMANDS)}"
    if word.startswith("-"):
        raise ConfigError(f"a command comes before {word}, as in `apex train {word}`; {known}")
    near = get_close_matches(word, COMMANDS, n=1)
    raise ConfigError(f"unknown command {word!r}; {f'did you mean {near[0]}? ' if near else ''}{known}")
