"""`python -m chaos`: a real run under faults, and the proof that nothing of it is lost or stored twice.

Actors write down what they send and what is acknowledged to them; at the end that is compared with what is stored, bit
for bit. `python -m chaos deaths`, `hostile`, `saves` and `unusable` are programs of their own.
"""

from __future__ import annotations

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
from apex.errors import FAILED, FINISHED, UsageError, require
from apex.runtime.lifecycle import reports_errors
from apex.runtime.ports import choose_ports, is_free
from apex.transport.sockets import open_context
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
SETTINGS: dict[str, tuple[Callable[[str], Any], str, str]] = {  # of ScenarioOptions: type, placeholder, meaning
    "minutes": (positive_float, "M", "how long"),
    "period": (positive_float, "SECONDS", "between two faults"),
    "faults": (str, "KINDS", "which"),
    "rounds": (positive_int, "N", "kills of each role"),
    "part": (positive_int, "N", "only the first or second run of the scenario"),
    "size": (positive_int, "N", "transitions in memory before the first kill"),
}
# What `apex train` is told before what the scenario and the user say. The memory holds some minutes; beyond that the
# audit reads each transition before it is overwritten.
TRAIN = (
    *("--env", ID, "--actors", "8", "--run.no-tensorboard", "--learner.batch-size", "64"),
    *("--replay.capacity", "1000000", "--checkpoint.replay-period", "60"),
    *("--checkpoint.period", "500", "--checkpoint.period-seconds", "10"),
    *("--evaluator.period-seconds", "20", "--evaluator.episodes", "5", "--evaluator.num-envs", "5"),
)


@reports_errors("python -m chaos")
def main(argv: Sequence[str] | None = None) -> int:
    """The composition root; 1 if the audit fails or the run does not go on."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in COMMANDS:
        program: int = importlib.import_module(COMMANDS[words[0]]).main(words[1:])
        return program
    arguments, rest = _parser().parse_known_args(words)
    options = _read_options(arguments)
    return run_scenario(arguments.scenario, options, rest, ScenarioReporter(arguments.json))


def run_scenario(name: str, options: ScenarioOptions, train: Sequence[str], reporter: ScenarioReporter) -> int:
    """Starts the scenario's runs with the options `train`, does it to them, and says what came of it."""
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
    """Starts a run, does the scenario to it, and audits it alive and after its end; tells whether it passed."""
    words = [*TRAIN, "--seed", str(options.seed), *train]
    config = parse_config(words, prog="python -m chaos")
    own = config.environment.id in (ID, PACED_ID)
    require(own, f"python -m chaos plays {ID} only: of another game no two transitions need differ")
    config = choose_ports(config, is_free, reporter.say)
    folder = _make_folder(config)
    words += ["--transport.port-offset", str(config.transport.port_offset)]
    words += ["--run.folder", str(folder), "--run.name", "run"]
    config = parse_config(words, prog="python -m chaos")
    reporter.say(f"chaos {name}, seed {options.seed}, in {folder}")
    figures: list[Figure] = []
    verdicts: list[Verdict] = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # As Ctrl-C: what was begun is cleared away.
    proxy = Proxy(config.transport, config.replay.num_shards, options.seed)
    try:
        with open_context() as context:
            run = ChaosRun(config, folder, words, HOSTS.get(name, ()), context)
            try:
                run.start()
                figures += SCENARIOS[name].play(run, proxy, FaultInjector(run, proxy, options.seed), reporter, options)
                alive = run.look()
                run.end()
                verdicts = [alive.judge(), run.look_at_end().judge()]
                reporter.say(f"audit of the living run {verdicts[0].sentence()}")
                reporter.say(f"audit of what is left of it {verdicts[1].sentence()}")
            finally:
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
        raise UsageError(f"cannot make the folder {path}: {error.strerror}; --run.folder names another") from error
    return path.absolute()


def _read_options(arguments: argparse.Namespace) -> ScenarioOptions:
    name = arguments.scenario
    given = {setting: getattr(arguments, setting) for setting in SETTINGS if getattr(arguments, setting) is not None}
    for setting in given:
        require(setting in SCENARIOS[name].settings, f"the scenario {name} has no use for --{setting}")
    if "faults" in given:
        given["faults"] = tuple(word for word in given["faults"].split(",") if word)
    return ScenarioOptions(seed=arguments.seed, **{**DEFAULTS.get(name, {}), **given})


def _parser() -> Parser:
    known = "\n".join(f"  {name:<12} {scenario.summary}" for name, scenario in SCENARIOS.items())
    defaults = ScenarioOptions()
    parser = Parser(
        prog="python -m chaos",
        description="Trains on this machine while things go wrong, and audits what is stored.\n\nscenarios\n" + known,
        epilog="All other options are those of `apex train`. deaths, hostile, saves, unusable have their own.",
        formatter_class=Formatter,
    )
    parser.add_argument("--scenario", choices=list(SCENARIOS), default="random", help="what is done; default: random")
    parser.add_argument("--seed", type=int, default=defaults.seed, metavar="S", help="of faults and run; default: 0")
    for setting, (read, metavar, words) in SETTINGS.items():
        users = [name for name, scenario in SCENARIOS.items() if setting in scenario.settings]
        values = {name: DEFAULTS.get(name, {}).get(setting, getattr(defaults, setting)) for name in users}
        usual = getattr(defaults, setting)
        default = ",".join(usual) if setting == "faults" else f"{usual:,.12g}"
        others = "".join(f"; {name}: {value:g}" for name, value in values.items() if value != usual)
        text = f"{words} ({', '.join(users)}); default: {default}{others}"
        parser.add_argument(f"--{setting}", type=read, metavar=metavar, help=text)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    return parser


if __name__ == "__main__":
    sys.exit(main())
