"""The `apex` command: maps each subcommand to a program, which is imported only when the subcommand is used."""

import importlib
import io
import platform
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import NamedTuple, NoReturn

import apex.runtime.logs  # noqa: F401  It formats the waits of a command that has no log.
from apex.config.arguments import reader_may_leave
from apex.version import VERSION
from apexreplay.errors import FINISHED, UsageError, require
from apexreplay.process.lifecycle import end_process, reports_errors

Main = Callable[[list[str]], int]  # arguments after the subcommand -> exit status


class Command(NamedTuple):
    """A subcommand of `apex`."""

    module: str  # module with the function main(argv)
    summary: str


COMMANDS = {
    "train": Command("apex.launch.train", "train an agent on this machine"),
    "evaluate": Command("apex.evaluation.command", "score a trained agent in full games, or record a video"),
    "watch": Command("apex.evaluation.watch", "show games of a run's newest policy, or record a video"),
    "doctor": Command("apex.launch.preflight.doctor", "check whether a run can start here, and how to fix problems"),
    "status": Command("apex.launch.status", "print what a run is doing"),
    "logs": Command("apex.runs.logs", "print the logs of a run's programs, merged by time"),
    "sweep": Command("apex.sweep.command", "search settings with Optuna: apex sweep FILE"),
    "plot": Command("apex.runs.plots.command", "draw learning curves of several runs in one picture"),
    "report": Command("apex.runs.report.command", "write one HTML page about a run"),
    "export": Command(
        "apex.evaluation.export.command", "write a run's weights as safetensors and ONNX, with a model card"
    ),
    "keys": Command("apex.transport.curve.command", "create the keys of a cluster: apex keys new DIR"),
    "learner": Command("apex.learner", "start a learner; the other programs connect to its address"),
    "replay": Command("apex.replay", "start a replay server: --learner HOST"),
    "actor": Command("apex.actor", "start actors on this host: --learner HOST"),
    "evaluator": Command("apex.evaluator", "start an evaluator: --learner HOST"),
    "cluster": Command("apex.cloud.cluster.command", "list clusters on EC2 and their problems"),
    "completion": Command("apex.completion", "print a completion script for bash or zsh"),
    "host": Command("apex.cloud.host.command", "commands that systemd calls on the hosts of a cluster"),
}

NEED_X86 = ("train", "sweep", "doctor", "replay")  # need the store order of an x86-64 CPU
NEED_LINUX = (*NEED_X86, "learner", "actor", "evaluator")  # need shared memory, process groups and signals of Linux
ANYWHERE = "apex evaluate, watch, plot, report, export and logs work here"


def load(module: str) -> Main:
    """Imports a program and returns its main function."""
    program: Main = importlib.import_module(module).main
    return program


@reports_errors("apex")
def main(argv: Sequence[str] | None = None, *, load: Callable[[str], Main] = load) -> int:
    """Runs the subcommand named by the first argument; returns the exit status of the subcommand."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        with reader_may_leave():
            print(overview())
        return FINISHED
    if arguments[0] == "--version":
        print(f"apex {VERSION}")
        return FINISHED
    has_seeds = any(word.partition("=")[0] == "--seeds" for word in arguments)
    program = load("apex.sweep.seeds" if arguments[0] == "train" and has_seeds else _find(arguments[0]).module)
    _require_platform(arguments[0], platform.system(), platform.machine())
    return reports_errors(f"apex {arguments[0]}")(program)(arguments[1:])


def run() -> NoReturn:
    """Runs the subcommand of this process's command line, and ends the process."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":  # A path need not be valid UTF-8.
        sys.stdout.reconfigure(errors="surrogateescape")
    end_process(main())


def overview() -> str:
    """Returns the text that `apex` without a subcommand prints."""
    about = "Ape-X over ZeroMQ: many actors, one prioritized replay, one learner."
    lines = [about, "", "usage: apex COMMAND [OPTIONS]", ""]
    lines += [f"  {name:<10} {command.summary}" for name, command in COMMANDS.items()]
    lines += ["", "begin with   apex train --preset cartpole, then apex evaluate --video game.mp4"]
    lines += ["more         apex COMMAND --help, apex --version"]
    return "\n".join(lines)


def _require_platform(name: str, system: str, machine: str) -> None:
    """Raises UsageError if the command does not work on this operating system and CPU."""
    is_linux, is_x86 = system == "Linux", machine.lower() in ("x86_64", "amd64")
    works = name not in (NEED_LINUX if not is_linux else () if is_x86 else NEED_X86)
    problem = f"apex {name} needs Linux on x86-64, but this host has {system} on {machine}"
    joins = "; so do learner, actor and evaluator, with a replay server on an x86-64 host" if is_linux else ""
    require(works, problem, remedy=f"use another host; {ANYWHERE}{joins}")


def _find(name: str) -> Command:
    if name in COMMANDS:
        return COMMANDS[name]
    known = f"choose one of {', '.join(COMMANDS)}"
    if name.startswith("-"):
        raise UsageError(f"the command is missing before {name}", f"write, for example, `apex train {name}`; {known}")
    near = get_close_matches(name, COMMANDS, n=1)
    raise UsageError(f"unknown command {name!r}", f"did you mean {near[0]}?" if near else known)
