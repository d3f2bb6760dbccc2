"""`apex train`: runs every program of a run on this machine, and shows its progress until it ends."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TextIO

from apex.command_line import parse_config
from apex.config import Config
from apex.config.role_command import learner_command, module_command, role_command
from apex.environments.factory import describe
from apex.errors import FAILED, FINISHED, EnvironmentFailure
from apex.launch.monitor import RunMonitor, StatusClient
from apex.launch.niceness import NICE, actor_niceness
from apex.launch.preflight.fit import fit, fit_one_process, require_head, require_keys
from apex.launch.ray.options import RAY, add_engine_options, require_engine
from apex.launch.resume import reopen, resume_parser
from apex.launch.summary import summary
from apex.launch.terminal.dashboard import History
from apex.launch.terminal.view import LogTail, PlainView, open_view, say
from apex.replay_memory.store.location import store_path
from apex.runs.folder import RunFolder
from apex.runs.lock import hold
from apex.runtime.disk_monitor import DiskMonitor
from apex.runtime.lifecycle import Stop, log_to, reports_errors, stop_on_signals
from apex.runtime.ports import PortClaims
from apex.runtime.run_claim import claim_run
from apex.runtime.supervisor import Ending, Program, supervise
from apex.runtime.watchdog import take_notifier
from apex.transport.control_client import ControlClient
from apex.transport.curve.key_store import read_keys
from apex.transport.hello import local_host
from apex.transport.messages.run_status import RunStatus
from apex.transport.sockets import open_context
from apex.types import Role, Schema

log = logging.getLogger("apex")


@reports_errors("apex train")
def main(argv: Sequence[str] | None = None) -> int:
    """Runs `apex train`; returns the exit status."""
    try:
        with stop_on_signals(take_notifier()) as stop:
            arguments = sys.argv[1:] if argv is None else argv
            parser = resume_parser("apex train")
            add_engine_options(parser)
            options, rest = parser.parse_known_args(arguments)
            require_engine(options)
            if options.resume is not None and options.engine != RAY:
                return resume(options.resume, rest, stop, accept=options.accept_changes)
            about = "Trains on this machine or on a cluster: runs replay, learner, actors, evaluator and TensorBoard."
            config = parse_config(rest, prog="apex train", description=about, own=[parser])
            if options.engine == RAY:
                options.insecure_no_auth = config.transport.insecure_no_auth
                from apex.launch.ray.driver import train_on_ray  # Imported here because Ray may not be installed.

                return train_on_ray(options, config, rest, stop, arguments)
            return train(config, stop, arguments)
    except KeyboardInterrupt:
        say("apex train: interrupted again while stopping; every program was killed", sys.stderr)
        return FAILED


Composer = Callable[[Config, RunFolder, "RunMonitor"], list[Program]]


class RunOutcome(NamedTuple):
    """How a run ended."""

    folder: RunFolder
    ending: Ending
    status: RunStatus | None  # the last status that the learner reported; None: the learner reported no status


def train(config: Config, stop: Stop, argv: Sequence[str], compose: Composer | None = None) -> int:
    """Chooses the run's sizes for this machine, trains until the run ends, prints a summary, returns the exit status.

    `argv` is only recorded in the run's manifest. `compose` returns the programs of the run; None: `make_programs`.
    """
    return _tell(run(config, stop, argv, compose))


def run(
    config: Config,
    stop: Stop,
    argv: Sequence[str],
    compose: Composer | None = None,
    *,
    out: TextIO | None = None,
    environment: Mapping[str, str] | None = None,
) -> RunOutcome | None:
    """Does the same as `train`, but prints no summary; returns None if a stop was requested before the run began.

    `out`: the stream for progress; None: standard output. `environment`: environment variables for the programs, in
    addition to those of this process.
    """
    if config.run.head:
        require_head(config)
    if config.run.single_process:
        schema = describe(config.environment, config.actor.n_step, partial(say, stream=out))
        return run_here(config, schema, stop, argv, out)
    with PortClaims() as claims:
        schema = describe(config.environment, config.actor.n_step, partial(say, stream=out))
        config, sizes = fit(config, schema, partial(say, stream=out), free=claims.claim)
        require_keys(config)
        if stop.poll():
            return None
        folder = RunFolder.create(config, schema, argv=argv)
        with hold(folder.path):
            return _run(folder, config, sizes, stop, compose, out, environment)


def run_here(config: Config, schema: Schema, stop: Stop, argv: Sequence[str], out: TextIO | None) -> RunOutcome:
    """Does the same as `run`, but with every role in this process: see the setting `run.single_process`.

    Progress is printed as plain lines, so that a debugger can use the terminal.
    """
    from apex.errors import DivergedError
    from apex.launch.serial.run import open_serial_run

    config, sizes = fit_one_process(config, schema)
    folder = RunFolder.create(config, schema, argv=argv)
    for line in (f"{config.environment.id}, seed {config.seed}", *sizes, f"run folder: {folder.path}"):
        say(line, out)
    # The log has the learner's name because the learner's loop runs here.
    with (
        hold(folder.path),
        log_to(folder.logs / "learner.log", "learner"),
        open_serial_run(folder, stop) as system,
    ):
        watch = RunMonitor(system.coordinator.report, PlainView(out or sys.stdout), LogTail(folder.logs), History())
        disk = DiskMonitor(folder.path, watch.tell)

        def look() -> None:
            watch.tick()
            disk.look()

        try:
            system.run(look)
            ending = Ending(FINISHED, "", "" if stop.poll() else "learner")
        except (DivergedError, EnvironmentFailure) as error:
            log.error("%s", error)
            ending = Ending(FAILED, str(error), "learner")
        watch.tick()
    return RunOutcome(folder, ending, watch.status)


def resume(name: str, argv: Sequence[str], stop: Stop, compose: Composer | None = None, *, accept: bool = False) -> int:
    """Resumes the run `name` in its folder, from its newest checkpoint and snapshot; returns the exit status.

    `argv` may change the run's limits. If `accept` is True, `argv` may change other settings too.
    """
    return _tell(go_on(name, argv, stop, compose, accept=accept))


def go_on(
    name: str,
    argv: Sequence[str],
    stop: Stop,
    compose: Composer | None = None,
    *,
    accept: bool = False,
    out: TextIO | None = None,
) -> RunOutcome | None:
    """Does the same as `resume`, but prints no summary; returns None if a stop was requested before the run began.

    `out`: the stream for progress; None: standard output.
    """
    folder, config = reopen(name, argv, accept=accept)
    require_keys(config)
    from apex.launch.resume_check import check_resume  # Imported here because new runs do not need torch here.

    with hold(folder.path), PortClaims() as claims:
        for line in check_resume(folder, config, accept=accept):
            say(line)
        config, sizes = fit(config, folder.schema, say, store_path(folder.run_id), free=claims.claim)
        if stop.poll():
            return None
        folder.go_on(config, argv=argv)
        return _run(folder, config, sizes, stop, compose, out)


def _tell(outcome: RunOutcome | None) -> int:
    """Prints the summary of a run; returns the exit status."""
    if outcome is None:
        return FINISHED
    folder, ending, status = outcome
    for line in summary(ending, status, folder):
        say(line, sys.stdout if ending.status == FINISHED else sys.stderr)
    return ending.status


def _run(
    folder: RunFolder,
    config: Config,
    sizes: list[str],
    stop: Stop,
    compose: Composer | None,
    out: TextIO | None = None,
    environment: Mapping[str, str] | None = None,
) -> RunOutcome:
    host = config.run.tensorboard_bind
    url = f"http://{socket.gethostname() if host == '0.0.0.0' else host}:{config.run.tensorboard_port}"
    curves = f"TensorBoard {url}" if config.run.tensorboard else "no TensorBoard"
    introduction = [f"{config.environment.id}, seed {config.seed}", *sizes, f"run folder: {folder.path}"]
    introduction += [f"{curves}/#custom_scalars, available once training has begun"] if config.run.tensorboard else []
    transport = config.transport
    if config.run.head:
        learner = f"{local_host(transport)}:{transport.port('control')}"
        introduction.append(f"start actors on other hosts with: apex actor --learner {learner} --keys BUNDLE")
    for line in introduction:
        say(line, out)
    observer = read_keys(transport.keys, Role.OBSERVER)
    with (
        claim_run(folder.run_id),
        log_to(folder.logs / "launcher.log"),
        open_context(observer) as context,
        open_view(out or sys.stdout) as view,
    ):
        source = StatusClient(ControlClient(context, transport.endpoint("control", local_host(transport)), linger=0.0))
        history = History(footer=(curves, f"logs {folder.logs}", "Ctrl-C stops"))
        watch = RunMonitor(source, view, LogTail(folder.logs), history)
        disk = DiskMonitor(folder.path, watch.tell)
        programs = (compose or make_programs)(config, folder, watch)

        def tick() -> None:
            watch.tick()
            disk.look()

        ending = supervise(programs, stop, logs=folder.logs, tell=watch.tell, tick=tick, environment=environment or {})
        watch.tick()  # Shows the learner's last status, which the learner sends without a request.
    return RunOutcome(folder, ending, watch.status)


def make_programs(config: Config, folder: RunFolder, watch: RunMonitor) -> list[Program]:
    """Returns the programs of a run in the order of their start. They are stopped in reverse order.

    The sum of their grace periods is less than 10 s, the time within which a run must stop.
    """
    python = (sys.executable, "-u", "-P", "-m")  # See `add_current_folder`.
    control = config.transport.port("control")
    joins = partial(
        role_command,
        learner=f"{local_host(config.transport)}:{control}",
        keys=config.transport.keys,
        insecure_no_auth=config.transport.insecure_no_auth,
    )
    snapshots = folder.checkpoints / "replay" if config.checkpoint.replay else None
    num_shards = config.replay.num_shards

    def goes_on() -> bool:
        return not watch.ending

    def ours(name: str, words: tuple[str, ...], **options: Any) -> Program:
        command = (*python, *module_command(words))
        stuck_seconds, crash_budget = config.run.stuck_seconds, config.run.crash_budget
        return Program(role=name, command=command, stuck_seconds=stuck_seconds, crash_budget=crash_budget, **options)

    programs = []
    for shard in range(num_shards):
        name = f"replay-{shard}" if num_shards > 1 else "replay"
        words = joins(Role.REPLAY, shard=shard, snapshots=snapshots)
        programs.append(ours(name, words, grace_seconds=1.5, stops_with="replay", ready=goes_on))
    words = learner_command(config=folder.config_file, run_folder=folder.path)
    programs.append(ours("learner", words, grace_seconds=4.0, ends_run=True))
    if config.evaluator.enabled:
        # With a stop score, the run waits for evaluations. Beside busy actors, niceness makes them ten times slower.
        niceness = NICE if config.run.stop_score is None else 0
        options = {"grace_seconds": 1.0, "niceness": niceness, "ready": lambda: goes_on() or watch.evaluating}
        programs.append(ours("evaluator", joins(Role.EVALUATOR), **options))
    if not config.run.head:
        niceness = actor_niceness(config)
        programs.append(ours("actor", joins(Role.ACTOR), grace_seconds=2.0, niceness=niceness, ready=goes_on))
    if config.run.tensorboard:
        host, port = config.run.tensorboard_bind, str(config.run.tensorboard_port)
        where = ("--logdir", str(folder.tensorboard), "--host", host, "--port", port)
        curves = Program(
            role="tensorboard",
            command=(*python, "tensorboard.main", *where, "--reload_interval", "5"),
            crash_budget=1.0,
            grace_seconds=0.5,
            essential=False,
            niceness=NICE,
            ready=lambda: watch.training and goes_on(),  # Starting TensorBoard takes seconds of CPU time.
        )
        programs.insert(0, curves)
    return programs
