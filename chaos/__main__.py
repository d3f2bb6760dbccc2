"""`python -m chaos`: runs real programs under faults, and audits that no transition is lost or stored twice.

Actors write what they send, and what is acknowledged, to ledgers. At the end the ledgers are compared bit for bit with
the stored transitions. `python -m chaos deaths`, `hostile`, `saves` and `unusable` are separate programs.
"""

import argparse
import importlib
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from apex.command_line import parse_config
from apex.config import Config
from apex.config.arguments import Formatter, Parser, positive_float, positive_int
from apex.runtime.ports import choose_ports, is_free
from apexreplay.errors import FAILED, FINISHED, UsageError, require
from apexreplay.process.lifecycle import reports_errors
from chaos.audit import Verdict
from chaos.environment import ID, PACED_ID
from chaos.proxy import Proxy
from chaos.recovery import FaultInjector
from chaos.report import Figure, ScenarioReporter, audit_figures
from chaos.run import ChaosRun
from chaos.scenarios import DEFAULTS, ESSENTIAL, HOSTS, OPTIONS, SCENARIOS, ScenarioOptions

COMMANDS = {
    "deaths": "chaos.deaths",
    "hostile": "chaos.hostile.command",
    "saves": "chaos.saves.command",
    "unusable": "chaos.unusable.command",
}
SETTINGS: dict[str, tuple[Callable[[str], Any], str, str]] = {  # options of ScenarioOptions: type, placeholder, meaning
    "minutes": (positive_float, "M", "how long"),
    "period": (positive_float, "SECONDS", "seconds between two faults"),
    "faults": (str, "KINDS", "which"),
    "rounds": (positive_int, "N", "kills of each role"),
    "part": (positive_int, "N", "only the first or second run of the scenario"),
    "size": (positive_int, "N", "transitions in the replay memory before the first kill"),
}
# Options of `apex train` before those of the scenario and the user. The memory holds the transitions of some minutes,
# so
# that the audit reads each transition before it is overwritten.
TRAIN = (
    *("--env", ID, "--actors", "8", "--run.no-tensorboard", "--learner.batch-size", "64"),
    *("--replay.capacity", "1000000", "--checkpoint.replay-period", "60"),
    *("--checkpoint.period", "500", "--checkpoint.period-seconds", "10"),
    *("--evaluator.period-seconds", "20", "--evaluator.episodes", "5", "--evaluator.num-envs", "5"),
)


@reports_errors("python -m chaos")
def main(argv: Sequence[str] | None = None) -> int:
    """The composition root; returns status 1 if the audit fails or the run does not continue."""
    command_line = list(sys.argv[1:] if argv is None else argv)
    if command_line and command_line[0] in COMMANDS:
        program: int = importlib.import_module(COMMANDS[command_line[0]]).main(command_line[1:])
        return program
    arguments, rest = _parser().parse_known_args(command_line)
    options = _read_options(arguments)
    return run_scenario(arguments.scenario, options, rest, ScenarioReporter(arguments.json))


def run_scenario(name: str, options: ScenarioOptions, train: Sequence[str], reporter: ScenarioReporter) -> int:
    """Runs the scenario with the options `train` of `apex train`, and reports the result."""
    figures: list[Figure] = []
    passed, parts = True, SCENARIOS[name].parts
    require(options.part <= len(parts), f"--part must be at most {len(parts)}, got {options.part}")
    for part, more in enumerate(parts, 1):
        if options.part not in (0, part):
            continue
        found, ok = _play(name, replace(options, part=part), [*OPTIONS.get(name, ()), *more, *train], reporter)
        prefix = f"{' '.join(more) or 'else'}: " if len(parts) > 1 else ""
        figures += [figure._replace(name=f"{prefix}{figure.name}") for figure in found]
        passed &= ok
    reporter.end({"scenario": name, "seed": options.seed}, figures, passed)
    return FINISHED if passed else FAILED


def _play(
    name: str, options: ScenarioOptions, train: Sequence[str], reporter: ScenarioReporter
) -> tuple[list[Figure], bool]:
    """Starts a run, applies the scenario, and audits the run before and after its end; returns whether it passed."""
    command_line = [*TRAIN, "--seed", str(options.seed), *train]
    config = parse_config(command_line, prog="python -m chaos")
    own = config.environment.id in (ID, PACED_ID)
    require(own, f"unsupported environment {config.environment.id}: only transitions of {ID} all differ")
    config = choose_ports(config, is_free, reporter.say)
    folder = _make_folder(config)
    command_line += ["--transport.port-offset", str(config.transport.port_offset)]
    command_line += ["--run.folder", str(folder), "--run.name", "run"]
    config = parse_config(command_line, prog="python -m chaos")
    reporter.say(f"chaos {name}, seed {options.seed}, in {folder}")
    figures: list[Figure] = []
    verdicts: list[Verdict] = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # End as after Ctrl-C, so that everything is cleaned up.
    proxy = Proxy(config.transport, config.replay.num_shards, options.seed)
    try:
        run = ChaosRun(config, folder, command_line, HOSTS.get(name, ()))
        injector = FaultInjector(run, proxy, options.seed)
        try:
            run.start()
            figures += SCENARIOS[name].play(run, proxy, injector, reporter, options)
            alive = run.look()
            run.end()
            verdicts = [alive.judge(), run.look_at_end().judge()]
            reporter.say(f"audit during the run {verdicts[0].sentence()}")
            reporter.say(f"audit after the run {verdicts[1].sentence()}")
        finally:
            injector.end()
            run.end()
            run.clear()
    finally:
        proxy.close()
    for verdict, when in zip(verdicts, ("alive", "after the end"), strict=True):
        figures += audit_figures(verdict, when)
    essential = [figure for figure in figures if figure.name.endswith(ESSENTIAL)]
    return figures, all(verdict.passed for verdict in verdicts) and all(figure.reached for figure in essential)


def _make_folder(config: Config) -> Path:
    path = Path(config.run.folder) / f"chaos-{datetime.now():%Y%m%d-%H%M%S}"
    try:
        path.mkdir(parents=True)
    except OSError as error:
        raise UsageError(
            f"cannot create the folder {path}: {error.strerror}; choose another with --run.folder"
        ) from error
    return path.absolute()


def _read_options(arguments: argparse.Namespace) -> ScenarioOptions:
    name = arguments.scenario
    given = {setting: getattr(arguments, setting) for setting in SETTINGS if getattr(arguments, setting) is not None}
    for setting in given:
        require(setting in SCENARIOS[name].settings, f"--{setting} has no effect in the scenario {name}")
    if "faults" in given:
        given["faults"] = tuple(word for word in given["faults"].split(",") if word)
    return ScenarioOptions(seed=arguments.seed, **{**DEFAULTS.get(name, {}), **given})


def _parser() -> Parser:
    known = "\n".join(f"  {name:<12} {scenario.summary}" for name, scenario in SCENARIOS.items())
    defaults = ScenarioOptions()
    parser = Parser(
        prog="python -m chaos",
        description="Trains on this machine under faults, and audits the stored transitions.\n\nscenarios\n" + known,
        epilog="All other options are those of `apex train`. deaths, hostile, saves and unusable have their own.",
        formatter_class=Formatter,
    )
    parser.add_argument("--scenario", choices=list(SCENARIOS), default="random", help="scenario; default: random")
    parser.add_argument(
        "--seed", type=int, default=defaults.seed, metavar="S", help="seed of faults and run; default: 0"
    )
    for setting, (read, metavar, meaning) in SETTINGS.items():
        users = [name for name, scenario in SCENARIOS.items() if setting in scenario.settings]
        values = {name: DEFAULTS.get(name, {}).get(setting, getattr(defaults, setting)) for name in users}
        usual = getattr(defaults, setting)
        default = ",".join(usual) if setting == "faults" else f"{usual:,.12g}"
        others = "".join(f"; {name}: {value:g}" for name, value in values.items() if value != usual)
        text = f"{meaning} ({', '.join(users)}); default: {default}{others}"
        parser.add_argument(f"--{setting}", type=read, metavar=metavar, help=text)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    return parser


if __name__ == "__main__":
    sys.exit(main())
