"""`apex train`: starts or resumes a run, shows its progress until it ends, and prints a summary."""

import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TextIO

from apex.command_line import choose_preset, parse_config
from apex.config import Config
from apex.config.arguments import Parser, seeds
from apex.environments.foreign import require_trust
from apex.environments.inspection import Inspector
from apex.errors import ConfigError, StoppedError
from apex.launch.callbacks import Callbacks
from apex.launch.continuing import describe_over, read_continue
from apex.launch.end_notice import NOTICE_SECONDS, tell_over
from apex.launch.engine import RAY, RayEngine, add_engine_options, require_engine
from apex.launch.local import run_locally
from apex.launch.mirroring import upload_ended
from apex.launch.preflight.checks import check_limit
from apex.launch.preflight.fit import require_announced_ports, require_head
from apex.launch.preflight.report import require_all
from apex.launch.ray.driver import continue_on_ray, reopen_on_ray, run_on_ray
from apex.launch.resume import ACCEPT, CONTINUE, OPTION, reopen, resume_parser
from apex.launch.start import RunOutcome, Start, find_end
from apex.launch.summary import summary
from apex.launch.terminal.view import print_line
from apex.launch.trackers.choice import add_track_option, make_trackers
from apex.runs.folder import RunFolder
from apex.runtime.logs import log_to
from apex.runtime.trust import remember
from apex.sentences import describe_failure
from apexreplay.errors import FINISHED, NEIGHBOUR_GONE, UsageError, require
from apexreplay.process.lifecycle import KILLED_BY_CTRL_C, Stop, reports_errors, stop_on_signals
from apexreplay.process.watchdog import take_notifier


@reports_errors("apex train")
def main(argv: Sequence[str] | None = None) -> int:
    """Runs `apex train`; returns the exit status."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        with stop_on_signals(take_notifier()) as stop:
            try:
                start = read_start(arguments, stop)
                if start.is_over and start.folder is not None:
                    return _show_over(start.config, start.folder, stop)
                outcome = execute(start, stop)
                status = show(outcome)
                is_stopped = status == FINISHED and not (outcome and outcome.ending.role)
            except StoppedError:
                if CONTINUE not in arguments or stop.signum != signal.SIGTERM:
                    raise
                return NEIGHBOUR_GONE
            # A scheduler that repeats the command must see that the run is not over.
            repeats = start.repeated is not None and stop.signum == signal.SIGTERM
            return NEIGHBOUR_GONE if is_stopped and repeats else status
    except KeyboardInterrupt:
        print_line("apex train: interrupted again while stopping; every program was killed", sys.stderr)
        return KILLED_BY_CTRL_C


def _show_over(config: Config, path: Path, stop: Stop) -> int:
    """Prints the result of a run that is over, and uploads what its mirror lacks; returns the exit status."""
    for line in describe_over(path):
        print_line(line)
    folder = RunFolder.open(path)
    ending = upload_ended(config.run, folder, stop)
    if ending.failure is not None:
        print_line(describe_failure(ending.failure), sys.stderr)
    if config.run.head:
        print_line(f"telling programs that join within {NOTICE_SECONDS:.0f} s that the run is over")
        try:
            tell_over(config, folder.run_id, stop)
        except UsageError as error:  # The run is over nevertheless.
            print_line(f"cannot tell them: {error}", sys.stderr)
    return ending.status


def read_start(arguments: Sequence[str], stop: Stop | None = None) -> Start:
    """Returns what a command line of `apex train` requests; raises UsageError, or StoppedError after a stop request."""
    inspector = Inspector(stop)
    parser = resume_parser("apex train")
    add_engine_options(parser)
    add_track_option(parser)
    add_seeds_option(parser)
    options, rest = parser.parse_known_args(arguments)
    require_engine(options)
    both = options.continue_run and options.resume is not None
    require(not both, f"{CONTINUE} and {OPTION} cannot be used together", remedy="leave one of them out")
    callbacks = Callbacks(make_trackers(options.track))
    if options.resume is not None and options.engine != RAY:
        folder, config = reopen(options.resume, rest, accept=options.accept_changes, inspector=inspector)
        require_announced_ports(config)
        accept, asks = options.accept_changes, sys.stdin is not None and sys.stdin.isatty()
        start = Start(config=config, argv=arguments, folder=folder.path, accept_changes=accept, asks=asks)
        return replace(start, inspector=inspector, callbacks=callbacks)
    about = "Trains on this machine or on a cluster: runs replay, learner, actors, evaluator and TensorBoard."
    parse = partial(parse_config, rest, prog="apex train", description=about, own=[parser], inspector=inspector)
    config = parse()
    if options.engine != RAY:
        require_announced_ports(config)
        if options.continue_run:
            presets = [partial(choose_preset, gpu=gpu) for gpu in (False, True)]
            start = read_continue(
                config,
                arguments,
                accept=options.accept_changes,
                inspector=inspector,
                stop=stop,
                elsewhere=lambda: _known(partial(parse, choose=choose) for choose in presets),
            )
            return replace(start, callbacks=callbacks)
        return Start(config=config, argv=arguments, inspector=inspector, callbacks=callbacks)
    require(not options.accept_changes, f"{ACCEPT} cannot be used with --engine ray", remedy="leave it out")
    options.insecure_no_auth = config.transport.insecure_no_auth
    if options.continue_run:
        return replace(continue_on_ray(config, RayEngine.read(options), options, arguments), callbacks=callbacks)
    if options.resume is None:
        return Start(config=config, argv=arguments, engine=RayEngine.read(options), callbacks=callbacks)
    others = " ".join(word for word in rest if word != "--insecure-no-auth")
    problem = f"{OPTION} with --engine ray uses the settings of the original start"
    require(not others, problem, remedy=f"leave out {others}")
    return replace(reopen_on_ray(options.resume, options, arguments), callbacks=callbacks)


def _known(commands: Iterable[Callable[[], Config]]) -> list[Config]:
    """Returns the configurations of commands that are valid."""
    configs = []
    for read in commands:
        with suppress(ConfigError):  # The typed settings may not fit the other preset.
            configs.append(read())
    return configs


def add_seeds_option(parser: Parser) -> None:
    """Adds the option, which `apex.sweep.seeds` carries out."""
    text = "train once with each of these seeds, such as 1-5 or 1,4,9, and plot the runs together"
    parser.add_argument("--seeds", type=seeds, metavar="LIST", help=text)


def execute(start: Start, stop: Stop, out: TextIO | None = None) -> RunOutcome | None:
    """Runs until the run ends or `stop` is requested; returns None if a stop was requested before the run began.

    `out`: the stream for progress; None: standard output. Raises UsageError if the run cannot be started, and
    StoppedError if a stop is requested while the environment is created.
    """
    remember(require_trust(start.config))
    require_all([check_limit(start.config)])
    outcome = _run(start, stop, out)
    if outcome is not None and start.callbacks.all:
        name = "launcher" if start.engine is None else "driver"
        name = "learner" if outcome.config.run.single_process else name
        with log_to((outcome.driver_folder or outcome.folder) / "logs" / f"{name}.log", name):
            end, before = find_end(outcome.ending, outcome.status), stop.signum

            def has_new_signal() -> bool:
                stop.tick()
                return bool(stop.signum) and not before

            problems = start.callbacks.end(outcome.ending, end, partial(print_line, stream=out), has_new_signal)
        for problem in problems:  # The view of the run, which shows what is logged, has been closed.
            print(problem, file=out or sys.stderr)
    return outcome


def _run(start: Start, stop: Stop, out: TextIO | None) -> RunOutcome | None:
    if start.engine is not None:
        return run_on_ray(start, start.engine, stop, out)
    if start.config.run.head:
        require_head(start.config)
    if start.config.run.single_process:
        # Imported here because other runs do not need torch here.
        from apex.launch.serial.run import run_in_one_process

        return run_in_one_process(start, stop, out)
    return run_locally(start, stop, out)


def show(outcome: RunOutcome | None) -> int:
    """Prints the summary of a run; returns the exit status."""
    if outcome is None:
        return FINISHED
    for line in summary(outcome):
        print_line(line, sys.stdout if outcome.ending.status == FINISHED else sys.stderr)
    return outcome.ending.status
