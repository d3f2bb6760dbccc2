"""`apex train --engine ray`: runs the head and the actor hosts as units on a Ray cluster and monitors them.

Ray places the units, restarts them after a process or node fails, and distributes the user's code. The programs of the
run communicate over ZeroMQ, with new keys for each start. When this process ends, all units end.
"""

import json
import shutil
import sys
import time
from argparse import Namespace
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TextIO

from apex.config import Config, flatten, from_saved, to_dict
from apex.facts import Ending, LogEntry, UnitEvent
from apex.launch.engine import RayEngine
from apex.launch.monitor import RunMonitor, StatusClient
from apex.launch.preflight.report import describe_limits
from apex.launch.ray.cluster import make_gauges, open_cluster, read_nodes
from apex.launch.ray.fleet import Fleet
from apex.launch.resume import CONTINUE, OPTION
from apex.launch.start import RunOutcome, Start
from apex.launch.terminal.dashboard import History
from apex.launch.terminal.view import open_view, print_line
from apex.runs.lock import hold
from apex.runs.new_folder import make_folder
from apex.runtime.logs import log_to
from apex.sizing import ENVS_PER_PROCESS, TRANSITIONS_PER_ACTOR
from apex.transport.curve.command import bundle_for, new_folder
from apex.transport.curve.key_store import Keys, read_keys
from apex.transport.messages.control import decode_answer
from apex.types import Role
from apexreplay.errors import FINISHED, UsageError, require
from apexreplay.process.lifecycle import POLL_SECONDS, Stop
from apexreplay.transport.control_socket import ControlSocket
from apexreplay.transport.sockets import open_context

BELOW = "ray"  # folder inside run.folder for the files of the driver and of the guards on each host
SET_HERE = ("transport.bind", "transport.keys", "run.single_process", "run.head")
SAVED_START = "launch.json"
BEGUN = "begun"  # file in the driver's folder that exists if the head has created the run folder


def run_on_ray(start: Start, engine: RayEngine, stop: Stop, out: TextIO | None) -> RunOutcome:
    """Runs the head and the actor hosts on a Ray cluster: see `execute`.

    Creates the folder of a new run only when the cluster is usable. Raises UsageError if the run already runs.
    """
    if start.folder is None:
        plan(start.config, engine)  # refuses settings before it connects
    with open_cluster(engine) as ray:
        nodes = read_nodes(ray)
        engine, device = engine.fit(nodes), start.config.learner.device
        if start.folder is None:
            config = plan(start.config, engine)
            made = create_on_ray(config, engine, start.argv, continues=start.repeated is not None)
            start = replace(made, callbacks=start.callbacks, repeated=start.repeated)
        gpu = device == "cuda" or (device == "auto" and any(has_gpu for has_gpu, _ in nodes))
        return _run_units(ray, start, engine, stop, out or sys.stdout, gpu=gpu)


def plan(config: Config, engine: RayEngine) -> Config:
    """Returns the configuration of a new run. Raises UsageError for settings that Ray does not support.

    `engine`: with all sizes chosen; otherwise `num_actors` and `envs_per_process` are only preliminary.
    """
    given, default = flatten(config), flatten(Config())
    for setting in SET_HERE:
        require(given[setting] == default[setting], f"{setting} cannot be set with --engine ray", remedy="leave it out")
    processes, actor = max(1, engine.actor_hosts * engine.cpus_per_host), config.actor
    fitting = min(ENVS_PER_PROCESS, max(1, config.replay.capacity // TRANSITIONS_PER_ACTOR // processes))
    # Each process has the same number of environments; num_actors is rounded up to a multiple of it.
    envs = -(-actor.num_actors // processes) or actor.envs_per_process or fitting
    # The current folder of a Ray job may be a copy that Ray removes.
    base = Path.home() if "_ray_pkg_" in str(Path.cwd()) else Path.cwd()
    mirror = config.run.mirror
    mirror = str(base / Path(mirror).expanduser()) if mirror and "://" not in mirror else mirror
    return replace(
        config,
        actor=replace(actor, num_actors=processes * envs, envs_per_process=envs),
        transport=replace(config.transport, insecure_no_auth=False),
        run=replace(config.run, head=True, folder=str(base / config.run.folder), mirror=mirror),
    )


def create_on_ray(config: Config, engine: RayEngine, argv: Sequence[str], *, continues: bool = False) -> Start:
    """Creates the driver's folder of a new run. Raises UsageError if its name is taken, unless the run `continues`."""
    path = Path(config.run.folder) / config.run.name
    is_free = continues or not config.run.name or not path.exists()
    require(is_free, f"run.name: {path} exists already", remedy="choose another name")

    def named(name: str) -> Config:
        return replace(config, run=replace(config.run, name=name))

    def fill(folder: Path, name: str) -> None:
        saved = {"config": to_dict(named(name)), "engine": asdict(replace(engine, address="", insecure_no_auth=False))}
        (folder / SAVED_START).write_text(json.dumps(saved), errors="surrogateescape")

    folder = make_folder(replace(config, run=replace(config.run, folder=str(path.parent / BELOW))), fill)
    return Start(config=named(folder.name), argv=argv, folder=folder, engine=engine)


def continue_on_ray(config: Config, engine: RayEngine, typed: Namespace, argv: Sequence[str]) -> Start:
    """Returns the start of the run that `config` names. The head continues the run if it finds it, else begins it.

    Raises UsageError if the run has no name, or if this host began it with other settings.
    """
    name = config.run.name
    require(bool(name), f"{CONTINUE}: the run to continue has no name", remedy="add --name NAME")
    folder = Path(plan(config, engine).run.folder) / BELOW / name
    if not (folder / SAVED_START).is_file():
        return Start(config=config, argv=argv, engine=engine, repeated=config)
    start = reopen_on_ray(str(folder), typed, argv)
    planned = plan(config, start.engine or engine)
    remedy = f"type the first command again, or use {OPTION} {folder}"
    require(start.config == planned, f"{CONTINUE} --name {name} was begun with other settings", remedy=remedy)
    return replace(start, repeated=config)


def reopen_on_ray(name: str, typed: Namespace, argv: Sequence[str]) -> Start:
    """Returns the start that resumes the run with this name or path; `typed`: options of this command line."""
    named = Path(name)
    places = (named, named.parent / BELOW / named.name, Path("runs") / BELOW / named)
    folders = [base / place for base in (Path.cwd(), Path.home()) for place in places]
    folder = next((folder for folder in folders if (folder / SAVED_START).is_file()), None)
    if folder is None:
        searched = ", ".join(map(str, dict.fromkeys(folders)))
        problem = f"no such run was started on Ray from this host: no {SAVED_START} in {searched}"
        raise UsageError(f"{OPTION} {name}: {problem}")
    saved = json.loads((folder / SAVED_START).read_text(errors="surrogateescape"))
    engine = RayEngine.read(typed, saved["engine"])
    return Start(config=from_saved(saved["config"]), argv=argv, folder=folder, engine=engine)


def _run_units(ray: Any, start: Start, engine: RayEngine, stop: Stop, stream: TextIO, *, gpu: bool) -> RunOutcome:
    assert start.folder is not None
    config, folder = start.config, start.folder
    logs = folder / "logs"
    logs.mkdir(exist_ok=True)
    with (
        hold(folder),
        _new_keys(folder / "secrets", engine.actor_hosts) as (bundles, observer),
        log_to(logs / "driver.log"),
        open_context(observer) as context,
        open(logs / "units.log", "a", buffering=1) as units,
        open_view(stream) as view,
        redirect_stdout(units),  # Ray prints the output of units to stdout and stderr.
        redirect_stderr(units),
    ):
        parts = f"{engine.actor_hosts} x {engine.cpus_per_host} x {config.actor.envs_per_process}"
        actors = f"{config.actor.num_actors} actors on Ray = {parts}"
        print_line(f"{config.environment.id}, seed {config.seed}, {actors}", stream)
        print_line(describe_limits(config.run), stream)
        source: list[StatusClient] = []  # client of the learner at its current address
        entries: deque[tuple[str, LogEntry]] = deque()  # new warnings and errors, with the names of their logs
        history = History(footer=(f"logs {logs}", "Ctrl-C stops"))

        def take() -> list[tuple[str, LogEntry]]:
            return [entries.popleft() for _ in range(len(entries))]

        callbacks, run_folder = start.callbacks, Path(config.run.folder) / config.run.name
        watch = RunMonitor(lambda: source[0]() if source else None, view, take, history, callbacks=callbacks)

        def notify(event: UnitEvent) -> None:
            watch.show_event(event)
            if event.kind == "learner":
                (folder / BEGUN).touch()
                if not source:  # The head has created the run folder.
                    callbacks.begin(fleet.head_config, run_folder)
                socket = ControlSocket(context, f"tcp://{event.address}", decode_answer, linger=0.0)
                source[:] = [StatusClient(socket)]

        state = {"begun": (folder / BEGUN).exists(), "continues": start.repeated is not None, "gpu": gpu}
        fleet = Fleet(
            ray, config, engine, folder, bundles, argv=start.argv, **state, notify=notify, show=entries.append
        )
        show_gauges = make_gauges(config.run.name)
        try:
            while (ending := fleet.check()) is None and not stop.poll():
                watch.tick()
                show_gauges(watch.status)
                time.sleep(POLL_SECONDS)
        finally:
            fleet.end()
        watch.tick(failed=ending is not None and ending.failure is not None)  # The learner sends it unrequested.
        ending = ending or Ending(FINISHED)
    return RunOutcome(config, run_folder, ending, watch.status, folder)


@contextmanager
def _new_keys(folder: Path, actor_hosts: int) -> Iterator[tuple[dict[str, dict[str, str]], Keys | None]]:
    """Yields new keys for every unit, each bundle as file name -> text, and the observer's, which this process uses.

    No secret key stays on the disk meanwhile, because a driver can be killed at any time.
    """
    shutil.rmtree(folder, ignore_errors=True)  # left by a killed driver
    try:
        folder.mkdir(mode=0o700)
        new_folder(folder / "keys")
        for name in (f"actor-{index}" for index in range(actor_hosts)):
            bundle_for(folder / "keys", Role.ACTOR, folder / name, name)
        bundles = {path.name: {file.name: file.read_text() for file in path.iterdir()} for path in folder.iterdir()}
        bundle_for(folder / "keys", Role.OBSERVER, folder / "observer")
        observer = read_keys(str(folder / "observer"), Role.OBSERVER)
        for secret in folder.rglob("*.key_secret"):
            secret.unlink()
        yield bundles, observer
    finally:
        shutil.rmtree(folder, ignore_errors=True)
