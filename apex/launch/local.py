"""`apex train`: one command that runs every program of a run on this machine, and shows them until the end."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from apex.config import Config
from apex.config.command_line import parse_config
from apex.config.role_command import learner_command, module_command, role_command
from apex.environments.factory import EnvironmentFailure, describe, kind
from apex.launch.monitor import RunMonitor, StatusClient
from apex.launch.preflight.fit import fit, fit_one_process
from apex.launch.resume import reopen, resume_parser
from apex.launch.ssh.hosts_file import OPTION as HOSTS
from apex.launch.ssh.launcher import train_on_hosts
from apex.launch.ssh.programs import NICE
from apex.launch.summary import summary
from apex.launch.terminal.dashboard import History
from apex.launch.terminal.view import LogTail, PlainView, open_view, say
from apex.replay_memory.store.location import store_path
from apex.runs.folder import RunFolder
from apex.runs.lock import hold
from apex.runtime.disk_monitor import DiskMonitor
from apex.runtime.gpu import means_gpu
from apex.runtime.lifecycle import FAILED, FINISHED, Stop, log_to, reports_errors, stop_on_signals
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
    """The composition root; returns the exit status."""
    try:
        with stop_on_signals(take_notifier()) as stop:
            arguments = sys.argv[1:] if argv is None else argv
            parser = resume_parser("apex train")
            parser.add_argument(HOSTS, type=Path, metavar="FILE", help="run on several machines: docs/own-machines.md")
            options, rest = parser.parse_known_args(arguments)
            if options.hosts is not None:
                return train_on_hosts(options.hosts, options.resume, rest, stop, arguments)
            if options.resume is not None:
                return resume(options.resume, rest, stop, accept=options.accept_changes)
            about = "Trains on this machine: replay, learner, actors, evaluator and TensorBoard."
            config = parse_config(
                rest, prog="apex train", description=about, kind=kind, means_gpu=means_gpu, own=[parser]
            )
            return train(config, stop, arguments)
    except KeyboardInterrupt:
        say("apex train: told to stop twice; every program was killed", sys.stderr)
        return FAILED


Composer = Callable[[Config, RunFolder, "RunMonitor"], list[Program]]


class RunOutcome(NamedTuple):
    """What became of a run."""

    folder: RunFolder
    ending: Ending
    status: RunStatus | None  # the last one that was heard


def train(config: Config, stop: Stop, argv: Sequence[str], compose: Composer | None = None) -> int:
    """Sizes the run to the machine, runs it to its end, and says how it went; `argv` is only noted.

    `compose` names the programs of the run; if it is None, `make_programs` does.
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
    """The same without the last words; None if it was stopped before it began.

    `out` is where it is shown, standard output if None; `environment` goes to the programs on top of this one's.
    """
    if config.run.single_process:
        schema = describe(config.environment, config.actor.n_step, partial(say, stream=out))
        return run_here(config, schema, stop, argv, out)
    with PortClaims() as claims:
        schema = describe(config.environment, config.actor.n_step, partial(say, stream=out))
        config, sizes = fit(config, schema, partial(say, stream=out), free=claims.claim)
        _check_keys(config)
        if stop.requested:
            return None
        folder = RunFolder.create(config, schema, argv=argv)
        with hold(folder.path):
            return _run(folder, config, sizes, stop, compose, out, environment)


def run_here(config: Config, schema: Schema, stop: Stop, argv: Sequence[str], out: TextIO | None) -> RunOutcome:
    """The same with every role in this process, see `single_process`. It shows plain lines: a debugger has the rest."""
    from apex.launch.serial.run import open_serial_run
    from apex.learning.run_save import DivergedError  # The launcher of several programs need not wait for torch.

    config, sizes = fit_one_process(config, schema)
    folder = RunFolder.create(config, schema, argv=argv)
    for line in (f"{config.environment.id}, seed {config.seed}", *sizes, f"run folder: {folder.path}"):
        say(line, out)
    # Its log has the learner's name, as it is the learner's loop that runs.
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
            reason = system.run(look)
            ending = Ending(FINISHED, reason, "" if stop.requested else "learner")
        except (DivergedError, EnvironmentFailure) as error:
            log.error("%s", error)
            ending = Ending(FAILED, str(error), "learner")
        watch.tick()
    return RunOutcome(folder, ending, watch.status)


def resume(name: str, argv: Sequence[str], stop: Stop, compose: Composer | None = None, *, accept: bool = False) -> int:
    """Goes on with a run, in its folder, from its newest checkpoint and snapshot; `argv` may change limits."""
    folder, config = reopen(name, argv, accept=accept)
    _check_keys(config)
    from apex.launch.resume_check import check_resume  # It reads tensors; a run that begins need not wait for torch.

    with hold(folder.path), PortClaims() as claims:
        for line in check_resume(folder, config, accept=accept):
            say(line)
        config, sizes = fit(config, folder.schema, say, store_path(folder.run_id), free=claims.claim)
        if stop.requested:
            return FINISHED
        folder.go_on(config, argv=argv)
        return _tell(_run(folder, config, sizes, stop, compose))


def _tell(outcome: RunOutcome | None) -> int:
    """Says how a run went; returns the exit status."""
    if outcome is None:
        return FINISHED
    folder, ending, status = outcome
    for line in summary(ending, status, folder):
        say(line, sys.stdout if ending.status == FINISHED else sys.stderr)
    return ending.status


def _check_keys(config: Config) -> None:
    """Raises ConfigError, before anything is started, if a program of the run would find its keys wanting."""
    for role in Role:
        read_keys(config.transport.keys, role)


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
    introduction += [f"{curves}/#custom_scalars once training has begun"] if config.run.tensorboard else []
    for line in introduction:
        say(line, out)
    transport = config.transport
    observer = read_keys(transport.keys, Role.OBSERVER)
    with (
        claim_run(folder.run_id),
        log_to(folder.logs / "launcher.log"),
        open_context(observer) as context,
        open_view(out or sys.stdout) as view,
    ):
        source = StatusClient(ControlClient(context, transport.endpoint("control", local_host(transport)), linger=0.0))
        history = History(footer=f"{curves}   logs {folder.logs}   Ctrl-C stops")
        watch = RunMonitor(source, view, LogTail(folder.logs), history)
        disk = DiskMonitor(folder.path, watch.tell)
        programs = (compose or make_programs)(config, folder, watch)

        def tick() -> None:
            watch.tick()
            disk.look()

        ending = supervise(programs, stop, logs=folder.logs, tell=watch.tell, tick=tick, environment=environment or {})
        watch.tick()  # The last status comes without a question.
    return RunOutcome(folder, ending, watch.status)


def make_programs(config: Config, folder: RunFolder, watch: RunMonitor) -> list[Program]:
    """The programs of a run, in the order of their start: the last one is stopped first.

    Their grace adds up to less than 10 s, in which a run must be over.
    """
    python = (sys.executable, "-u", "-P", "-m")  # See `add_current_folder`.
    control = config.transport.control_port + config.transport.port_offset
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
        return Program(role=name, command=command, stuck_seconds=config.run.stuck_seconds, **options)

    programs = []
    for shard in range(num_shards):
        name = f"replay-{shard}" if num_shards > 1 else "replay"
        words = joins(Role.REPLAY, shard=shard, snapshots=snapshots)
        programs.append(ours(name, words, grace_seconds=1.5, stops_with="replay", ready=goes_on))
    words = learner_command(config=folder.config_file, run_folder=folder.path)
    programs.append(ours("learner", words, grace_seconds=4.0, ends_run=True))
    if config.evaluator.enabled:
        # Who says when the run is over does more than watch: beside busy actors it would take ten times as long.
        niceness = NICE if config.run.stop_score is None else 0
        programs.append(ours("evaluator", joins(Role.EVALUATOR), grace_seconds=1.0, niceness=niceness, ready=goes_on))
    # Where inserts wait for samples, the learner's updates are what is scarce, and actors take the cores in between.
    niceness = NICE if config.replay.inserts_wait else 0
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
            ready=lambda: watch.training and goes_on(),  # Its start takes seconds of a core that the run needs then.
        )
        programs.insert(0, curves)
    return programs
