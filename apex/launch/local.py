"""Runs every program of a run on this machine, and shows its progress until it ends."""

import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import TextIO

from apex.config import Config
from apex.launch.mirroring import Mirroring, require_unused, with_absolute_mirror
from apex.launch.monitor import RunMonitor, StatusClient
from apex.launch.preflight.fit import fit, require_keys
from apex.launch.preflight.report import describe_limits
from apex.launch.preflight.requirements import store_bytes
from apex.launch.preflight.warm_start import find_warm_start
from apex.launch.programs import make_programs
from apex.launch.resume import find_saved, report_losses
from apex.launch.start import RunOutcome, Start, judge
from apex.launch.terminal.dashboard import History
from apex.launch.terminal.view import open_view, print_line
from apex.runs.folder import KEYS, RunFolder
from apex.runs.lock import hold
from apex.runtime.logs import LogTail, log_to
from apex.runtime.ports import PortClaims
from apex.runtime.supervisor import supervise
from apex.sentences import describe_restored, describe_warm_start
from apex.transport.curve.command import new_folder
from apex.transport.curve.key_store import read_keys
from apex.transport.hello import advertised_host, local_host
from apex.transport.messages.control import decode_answer
from apex.types import Role
from apexreplay.errors import UsageError
from apexreplay.process.lifecycle import Stop
from apexreplay.server.open_store import reclaim
from apexreplay.store.location import claim_run, store_path
from apexreplay.transport.control_socket import ControlSocket
from apexreplay.transport.sockets import open_context


def run_locally(start: Start, stop: Stop, out: TextIO | None) -> RunOutcome | None:
    """Chooses the run's sizes and ports for this machine, and runs its programs: see `execute`."""
    config, tell = start.config, partial(print_line, stream=out)
    config = replace(config, run=with_absolute_mirror(config.run))
    require_keys(config)
    with PortClaims() as claims, ExitStack() as lock:
        if start.folder is None:
            schema = start.inspector.schema(config, tell)
            config, sizes = fit(config, schema, tell, free=claims.claim)
            start.inspector.try_algorithm(config, schema)
            if (warm := find_warm_start(config, schema, stop)) is not None:
                tell(describe_warm_start(warm))
            if stop.poll():
                return None
            require_unused(config.run, stop)
            folder = RunFolder.create(config, schema, argv=start.argv, asked=start.config)
            _claim(lock, folder)
        else:
            folder = RunFolder.open(start.folder)
            _claim(lock, folder)
            if start.restored_from:
                tell(f"restored {folder.path} from {start.restored_from}")
            saved = find_saved(folder, config, accept=start.accept_changes)
            for found in saved:
                tell(describe_restored(found))
            report_losses(folder, saved, ask=start.asks and not start.accept_changes)
            config, sizes = fit(config, folder.schema, tell, store_path(folder.run_id), free=claims.claim)
            start.inspector.try_algorithm(config, folder.schema)
            if config.learner.freeze != folder.config.learner.freeze:
                learner = replace(config.learner, init_from="")  # A run that is continued copies nothing.
                find_warm_start(replace(config, learner=learner), folder.schema, stop)
            if stop.poll():
                return None
            folder.record_resume(config, argv=start.argv, asked=start.repeated)
        mirroring = None
        if config.run.mirror:
            with _removes_new(folder if start.folder is None else None):
                mirroring = lock.enter_context(closing(Mirroring(config.run, folder, stop)))
        # For all shards together: servers that start at the same time each find the space for their own.
        reclaim(store_path(folder.run_id), store_bytes(config, folder.schema))
        for line in _introduce(config, folder, sizes):
            tell(line)
        with _keys_of_start(config, folder) as with_keys:
            outcome = _run_programs(start, with_keys, folder, stop, out or sys.stdout)._replace(config=config)
        return outcome if mirroring is None else outcome._replace(ending=mirroring.finish(outcome.ending))


@contextmanager
def _removes_new(folder: RunFolder | None) -> Iterator[None]:
    """Removes the folder of a run that cannot begin, so that the same command can make it again."""
    try:
        yield
    except UsageError:  # After another error, such as an outage of the mirror, the run is continued with --continue.
        if folder is not None:
            shutil.rmtree(folder.path, ignore_errors=True)
        raise


@contextmanager
def _keys_of_start(config: Config, folder: RunFolder) -> Iterator[Config]:
    """Makes new keys in the run folder, unless the configuration has keys or excludes them; removes them at the end.

    Yields the configuration with the keys. Raises UsageError if the keys cannot be written, or are not private.
    """
    transport, keys = config.transport, folder.path / KEYS
    if transport.keys or transport.insecure_no_auth:
        yield config
        return
    shutil.rmtree(keys, ignore_errors=True)  # left by a killed launcher
    config = replace(config, transport=replace(transport, keys=str(keys)))
    try:
        try:
            new_folder(keys)
            require_keys(config)
        except (OSError, UsageError) as error:
            remedy = "set run.folder to a disk with free space and file modes, or add --insecure-no-auth"
            raise UsageError(f"cannot make private keys in {keys}: {error}", remedy) from error
        yield config
    finally:
        shutil.rmtree(keys, ignore_errors=True)


def _claim(lock: ExitStack, folder: RunFolder) -> None:
    """Makes this process the only launcher of the run, and keeps the run's replay memory until `lock` is closed."""
    lock.enter_context(hold(folder.path))
    lock.enter_context(claim_run(folder.run_id, folder.path))


def _introduce(config: Config, folder: RunFolder, sizes: list[str]) -> list[str]:
    """Returns the lines that a run shows first."""
    lines = [f"{config.environment.id}, seed {config.seed}", *sizes, describe_limits(config.run)]
    lines.append(f"run folder: {folder.path}")
    if config.run.mirror:
        lines.append(f"mirror: {config.run.mirror}")
    if config.run.tensorboard:
        lines.append(f"{_curves(config)}/#custom_scalars, available once training has begun")
    if config.run.head:
        learner = f"{advertised_host(config.transport)}:{config.transport.port('control')}"
        keys = "" if config.transport.is_loopback else " --keys BUNDLE"
        keys = " --insecure-no-auth" if config.transport.insecure_no_auth else keys
        lines.append(f"start actors with: apex actor --learner {learner}{keys}")
    return lines


def _curves(config: Config) -> str:
    host = config.run.tensorboard_bind
    url = f"http://{socket.gethostname() if host == '0.0.0.0' else host}:{config.run.tensorboard_port}"
    return f"TensorBoard {url}" if config.run.tensorboard else "no TensorBoard"


def _run_programs(start: Start, config: Config, folder: RunFolder, stop: Stop, out: TextIO) -> RunOutcome:
    transport = config.transport
    with (
        log_to(folder.logs / "launcher.log"),
        open_context(read_keys(transport.keys, Role.OBSERVER)) as context,
        open_view(out) as view,
    ):
        endpoint = transport.endpoint("control", local_host(transport))
        source = StatusClient(ControlSocket(context, endpoint, decode_answer, linger=0.0))
        history = History(footer=(_curves(config), f"logs {folder.logs}", "Ctrl-C stops"))
        tail, callbacks = LogTail(folder.logs), start.callbacks
        watch = RunMonitor(source, view, tail.entries, history, folder=folder.path, callbacks=callbacks)
        callbacks.begin(folder.config, folder.path)
        ending = supervise(
            start.edit_programs(make_programs(config, folder, watch)),
            stop,
            logs=folder.logs,
            notify=watch.show_event,
            tick=watch.tick,
            environment=start.environment,
        )
        # Shows the learner's last status, which the learner sends without a request.
        watch.tick(failed=ending.failure is not None)
        ending = judge(ending, watch.status, folder)
    return RunOutcome(config, folder.path, ending, watch.status)
