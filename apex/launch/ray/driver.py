"""`apex train --engine ray`: runs the head and the actor hosts as units on a Ray cluster and monitors them.

Ray places the units, restarts them after a process or node fails, and distributes the user's code. The programs of the
run communicate over ZeroMQ, with new keys for each start. When this process ends, all units end.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from apex.config import Config, flatten, from_dict, to_dict
from apex.config.sizing import ENVS_PER_PROCESS, TRANSITIONS_PER_ACTOR
from apex.errors import FINISHED, UsageError, require
from apex.launch.monitor import RunMonitor, StatusClient
from apex.launch.ray.cluster import open_cluster
from apex.launch.ray.fleet import Fleet
from apex.launch.ray.options import RayEngine
from apex.launch.resume import ACCEPT, OPTION
from apex.launch.summary import command_name, how_it_went, would_end
from apex.launch.terminal.dashboard import History
from apex.launch.terminal.view import WARNING, LogTail, open_view, say
from apex.runs.folder import make_folder
from apex.runs.lock import hold
from apex.runtime.lifecycle import POLL_SECONDS, Stop, log_to
from apex.runtime.supervisor import Ending
from apex.runtime.text import clean
from apex.transport.control_client import ControlClient
from apex.transport.curve.command import bundle_for, new_folder
from apex.transport.curve.key_store import read_keys
from apex.transport.messages.run_status import RunStatus
from apex.transport.sockets import open_context
from apex.types import Role

BELOW = "ray"  # folder inside run.folder for the files of the driver and of the guards on each host
SET_HERE = ("transport.bind", "transport.keys", "run.single_process", "run.head")
LAUNCH = "launch.json"
BEGUN = "begun"  # file in the driver's folder that exists if the head has created the run folder
SHOWN_BY_RAY = re.compile(r"(\x1b\[\d+m)?\([^)]*\)(\x1b\[0m)? (?P<log>\S+): (?P<line>.*)")


class Launch(NamedTuple):
    """A run that is ready to start or resume."""

    config: Config
    engine: RayEngine
    folder: Path  # folder of this driver
    begun: bool  # whether to resume the run

    @property
    def run_folder(self) -> Path:
        """The run folder on the head's host."""
        return Path(self.config.run.folder) / self.config.run.name


def train_on_ray(options: Namespace, config: Config, rest: Sequence[str], stop: Stop, argv: Sequence[str]) -> int:
    """Starts or resumes a run on Ray, prints its result and returns the exit status.

    `rest`: the arguments in `argv` that set `config`.
    """
    require(not options.accept_changes, f"{ACCEPT} cannot be used with --engine ray: leave it out")
    if options.resume is None:
        launch, ending, status = train(config, RayEngine.read(options), stop, argv)
    else:
        others = " ".join(word for word in rest if word != "--insecure-no-auth")
        require(not others, f"{OPTION} with --engine ray uses the settings of the original start: leave out {others}")
        launch = reopen(options.resume, options)
        with open_cluster(launch.engine) as ray:
            ending, status = run(ray, launch, stop, argv)
    lines = how_it_went(ending, status, launch.folder / "logs")
    lines.append(f"run folder, on the head's host: {launch.run_folder}")
    if not would_end(status):
        where = shlex.quote(str(launch.folder))
        lines.append(f"resume: {command_name('apex')} train --engine ray {OPTION} {where}")
    for line in lines:
        say(line, sys.stdout if ending.status == FINISHED else sys.stderr)
    return ending.status


def train(
    config: Config, engine: RayEngine, stop: Stop, argv: Sequence[str], out: TextIO | None = None
) -> tuple[Launch, Ending, RunStatus | None]:
    """Starts a new run, and runs it like `run`. Creates its folder only when the cluster is usable."""
    config = plan(config, engine)
    with open_cluster(engine) as ray:
        launch = begin(config, engine)
        return launch, *run(ray, launch, stop, argv, out)


def plan(config: Config, engine: RayEngine) -> Config:
    """Returns the configuration of a new run. Raises UsageError for settings that Ray does not support."""
    given, default = flatten(config), flatten(Config())
    for setting in SET_HERE:
        require(given[setting] == default[setting], f"{setting} cannot be set with --engine ray: leave it out")
    processes, actor = engine.actor_hosts * engine.cpus_per_host, config.actor
    fitting = min(ENVS_PER_PROCESS, max(1, config.replay.capacity // TRANSITIONS_PER_ACTOR // processes))
    # Each process has the same number of environments; num_actors is rounded up to a multiple of it.
    envs = -(-actor.num_actors // processes) or actor.envs_per_process or fitting
    # The current folder of a Ray job may be a copy that Ray removes.
    base = Path.home() if "_ray_pkg_" in str(Path.cwd()) else Path.cwd()
    return replace(
        config,
        actor=replace(actor, num_actors=processes * envs, envs_per_process=envs),
        transport=replace(config.transport, insecure_no_auth=False),
        run=replace(config.run, head=True, folder=str(base / config.run.folder)),
    )


def begin(config: Config, engine: RayEngine) -> Launch:
    """Creates this driver's folder of a new run. Raises UsageError if its name is taken."""
    path = Path(config.run.folder) / config.run.name
    require(not config.run.name or not path.exists(), f"run.name: {path} exists already; choose another name")
    folder = make_folder(replace(config, run=replace(config.run, folder=str(path.parent / BELOW))))
    config = replace(config, run=replace(config.run, name=folder.name))
    launch = {"config": to_dict(config), "engine": asdict(replace(engine, address="", insecure_no_auth=False))}
    (folder / LAUNCH).write_text(json.dumps(launch), errors="surrogateescape")
    return Launch(config, engine, folder, begun=False)


def reopen(name: str, typed: Any) -> Launch:
    """Prepares to resume the run with this name or path; `typed`: options of this command line."""
    named = Path(name)
    places = (named, named.parent / BELOW / named.name, Path("runs") / BELOW / named)
    folders = [base / place for base in (Path.cwd(), Path.home()) for place in places]
    folder = next((folder for folder in folders if (folder / LAUNCH).is_file()), None)
    if folder is None:
        searched = ", ".join(map(str, dict.fromkeys(folders)))
        raise UsageError(f"{OPTION} {name}: no such run was started on Ray from this host: no {LAUNCH} in {searched}")
    launch = json.loads((folder / LAUNCH).read_text(errors="surrogateescape"))
    engine = RayEngine.read(typed, launch["engine"])
    return Launch(from_dict(launch["config"]), engine, folder, begun=(folder / BEGUN).exists())


def run(
    ray: Any, launch: Launch, stop: Stop, argv: Sequence[str], out: TextIO | None = None
) -> tuple[Ending, RunStatus | None]:
    """Runs until the end; returns how it ended and the last status. Raises UsageError if the run already runs."""
    config, engine, folder, begun = launch
    logs, stream = folder / "logs", out or sys.stdout
    logs.mkdir(exist_ok=True)
    with (
        hold(folder),
        _new_secrets(folder / "secrets", engine.actor_hosts) as observer,
        log_to(logs / "driver.log"),
        open_context(read_keys(observer, Role.OBSERVER)) as context,
        open(logs / "units.log", "a", buffering=1) as units,
        open_view(stream) as view,
        redirect_stdout(units),  # Ray prints the output of units to stdout and stderr.
        redirect_stderr(units),
    ):
        source: list[StatusClient] = []  # client of the learner at its current address

        def point(learner: str) -> None:
            (folder / BEGUN).touch()
            source[:] = [StatusClient(ControlClient(context, f"tcp://{learner}", linger=0.0))]

        actors = f"{engine.actor_hosts} x {engine.cpus_per_host} x {config.actor.envs_per_process}"
        say(f"{config.environment.id}, seed {config.seed}, {config.actor.num_actors} actors on Ray = {actors}", stream)
        history = History(footer=(f"logs {logs}", "Ctrl-C stops"))
        tail = UnitLogs(logs, everything=not stream.isatty())
        watch = RunMonitor(lambda: source[0]() if source else None, view, tail, history)
        fleet = Fleet(ray, config, engine, folder, argv=argv, begun=begun, tell=watch.tell, point=point)
        try:
            while (ending := fleet.check()) is None and not stop.poll():
                watch.tick()
                time.sleep(POLL_SECONDS)
        finally:
            fleet.end()
        watch.tick()  # The learner sends its last status unrequested.
    return ending or Ending(FINISHED, ""), watch.status


class UnitLogs(LogTail):
    """The log lines of units that Ray forwards: all lines, or only warnings and errors."""

    def __init__(self, folder: Path, *, everything: bool) -> None:
        super().__init__(folder)
        self._everything = everything

    def warnings(self) -> list[str]:
        """Returns new lines without duplicates. Nodes that share a folder of Ray's logs each send every line."""
        found = [SHOWN_BY_RAY.fullmatch(line) for path, line in self.new_lines() if path.stem == "units"]
        lines = dict.fromkeys((line["log"], clean(line["line"])) for line in found if line)
        return [f"{log} {line}" for log, line in lines if self._everything or WARNING.match(line)]


@contextmanager
def _new_secrets(folder: Path, actor_hosts: int) -> Iterator[str]:
    """Creates a private folder with new keys and a key bundle for every unit; removes the folder at the end.

    Yields the folder of the observer's bundle, which this process uses.
    """
    shutil.rmtree(folder, ignore_errors=True)  # left by a killed driver
    try:
        folder.mkdir(mode=0o700)
        new_folder(folder / "keys")
        for name in (f"actor-{index}" for index in range(actor_hosts)):
            bundle_for(folder / "keys", Role.ACTOR, folder / name, name)
        bundle_for(folder / "keys", Role.OBSERVER, folder / "observer")
        yield str(folder / "observer")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
