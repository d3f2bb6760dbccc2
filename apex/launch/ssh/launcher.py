"""`apex train --hosts FILE`: a run on several machines, each role started there over ssh and kept running from here."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from apex.config import Config, RunConfig, dump_toml, flatten, load_toml
from apex.config.command_line import parse_config
from apex.config.sizing import ENVS_PER_PROCESS, TRANSITIONS_PER_ACTOR
from apex.environments.factory import kind
from apex.errors import ConfigError, require
from apex.launch.monitor import RunMonitor, StatusClient
from apex.launch.ssh.hosts_file import OPTION, Hosts, divide, read_hosts
from apex.launch.ssh.preflight import ask_hosts
from apex.launch.ssh.programs import BELOW, home, make_programs, new_secrets, place_programs
from apex.launch.summary import how_it_went
from apex.launch.terminal.dashboard import History
from apex.launch.terminal.view import WARNING, LogTail, open_view, say
from apex.runs.folder import make_folder
from apex.runtime.gpu import means_gpu
from apex.runtime.lifecycle import FAILED, FINISHED, Stop, log_to
from apex.runtime.supervisor import Ending, supervise
from apex.transport.control_client import ControlClient
from apex.transport.curve.key_store import read_keys
from apex.transport.messages.run_status import RunStatus
from apex.transport.sockets import open_context
from apex.types import Role

SET_HERE = ("transport.bind", "transport.keys", "transport.insecure_no_auth", "run.folder", "run.single_process")


class Launch(NamedTuple):
    """A run that can begin."""

    hosts: Hosts
    config: Config  # with its name, address and number of actors
    folder: Path  # of this launcher: logs, and what it needs to go on
    cores: list[int]  # of each actor host, for actors


def train_on_hosts(path: Path, resumed: str | None, arguments: Sequence[str], stop: Stop, argv: Sequence[str]) -> int:
    """Starts a run on the machines that `path` names, or goes on with `resumed`; returns the exit status.

    `argv` is only noted. Raises ConfigError, before anything is started, for what cannot be run.
    """
    hosts = read_hosts(path)
    launch = _begin(hosts, arguments) if resumed is None else _reopen(hosts, resumed, arguments)
    config, folder = launch.config, launch.folder
    if stop.requested:
        return FINISHED
    ending, status = _run(launch, stop, argv)
    learner, out = hosts.learner, sys.stdout if ending.status == FINISHED else sys.stderr
    where = f"{learner.host}:{learner.folder}/{config.run.folder}/{config.run.name}"
    for line in how_it_went(ending, status, folder / "logs"):
        say(line, out)
    say(f"run folder: {where}", out)
    say(f"logs: {folder / 'logs'}", out)
    say(f"copy: scp -r {where} {config.run.folder}/", out)
    say(f"go on: ./run.sh {OPTION} {path} --resume {config.run.name}", out)
    return ending.status


def _begin(hosts: Hosts, arguments: Sequence[str]) -> Launch:
    """A new run, by the options that were typed."""
    config = parse_config(arguments, prog=f"apex train {OPTION} FILE", description="", kind=kind, means_gpu=means_gpu)
    given, default = flatten(config), flatten(Config())
    for setting in SET_HERE:
        require(given[setting] == default[setting], f"{setting} cannot be set with {OPTION}: leave it out")
    name, learner = config.run.name, hosts.learner
    facts = ask_hosts(hosts, f"{config.run.folder}/{name}")
    if name and facts[learner].has_run:
        raise ConfigError(
            f"--name {name}: {learner.host} has such a run already; take another name, or --resume {name}"
        )
    cores = [actor.processes or facts[actor].cores for actor in hosts.actors]
    replay_bytes = facts[hosts.replay].memory_bytes if hosts.replay.host != learner.host else 0
    config = _size(config, sum(cores), replay_bytes)
    divide(config.actor.num_actors, cores)  # Or it says why not.
    folder = make_folder(replace(config, run=replace(config.run, folder=f"{config.run.folder}/{BELOW}")))
    config = replace(config, run=replace(config.run, name=folder.name))
    keys = f"{home(config, learner)}/keys"
    config = replace(config, transport=replace(config.transport, bind=learner.address, keys=keys))
    (folder / "config.toml").write_text(dump_toml(config), errors="surrogateescape")
    return Launch(hosts, config, folder, cores)


def _reopen(hosts: Hosts, name: str, arguments: Sequence[str]) -> Launch:
    """A run that was begun from here."""
    require(not arguments, f"--resume with {OPTION} goes on as the run was begun: leave out {' '.join(arguments)}")
    folder, learner = Path(RunConfig().folder) / BELOW / Path(name).name, hosts.learner
    require(
        (folder / "config.toml").is_file(), f"--resume {name}: no such run was begun from here, as {folder} is missing"
    )
    config = load_toml(folder / "config.toml")
    facts = ask_hosts(hosts, f"{config.run.folder}/{config.run.name}")
    require(
        facts[learner].has_run and f"{home(config, learner)}/keys" == config.transport.keys,
        f"--resume {name}: {learner.host} has no such run in {learner.folder}/{config.run.folder}",
    )
    require(
        config.transport.bind == learner.address,
        f"--resume {name}: its learner's address is {config.transport.bind}, not {learner.address}",
    )
    return Launch(hosts, config, folder, [actor.processes or facts[actor].cores for actor in hosts.actors])


def _size(config: Config, cores: int, replay_bytes: int) -> Config:
    """With a number of actors, if none was given: what the actor hosts bear, by the rule of one machine.

    `replay_bytes`: of the machine that the replay server has to itself, or 0; the learner, which sizes the rest, cannot
    know it.
    """
    actor, replay = config.actor, config.replay
    most = max(1, replay.capacity // TRANSITIONS_PER_ACTOR)
    fitting = cores * actor.envs_per_process if actor.envs_per_process else min(cores * ENVS_PER_PROCESS, most)
    # The learner's machine has no actors: what it would leave to them is its own.
    return replace(
        config,
        actor=replace(actor, num_actors=actor.num_actors or fitting, num_processes=1),
        replay=replace(replay, host_bytes=replay.host_bytes or replay_bytes),
    )


def _run(launch: Launch, stop: Stop, argv: Sequence[str]) -> tuple[Ending, RunStatus | None]:
    hosts, config, folder, cores = launch
    blocks = dict(zip(hosts.actors, divide(config.actor.num_actors, cores), strict=True))
    places, logs = place_programs(hosts, config), folder / "logs"
    logs.mkdir(exist_ok=True)
    curves = (
        f"TensorBoard http://127.0.0.1:{config.run.tensorboard_port}" if config.run.tensorboard else "no TensorBoard"
    )
    say(f"{config.environment.id}, seed {config.seed}, {config.actor.num_actors} actors; {curves}")
    for place in places:
        block = " processes x {} environments".format(*blocks[place][1:]) if place in blocks else ""
        say(f"  {place.name:<24} {place.address}{blocks[place][0] if block else ''}{block}")
    lost: list[str] = []
    with (
        new_secrets(folder, places) as secrets,
        log_to(logs / "launcher.log"),
        open_context(read_keys(str(secrets / "keys"), Role.OBSERVER)) as context,
        open_view(sys.stdout) as view,
    ):
        endpoint = config.transport.endpoint("control", hosts.learner.address)
        source = StatusClient(ControlClient(context, endpoint, linger=0.0))
        history = History(footer=f"{curves}   logs {logs}   Ctrl-C stops")
        watch = RunMonitor(source, view, HostLogs(logs, everything=not sys.stdout.isatty()), history)
        programs = make_programs(hosts, config, secrets, blocks, argv, lambda: not watch.ending)

        def tell(sentence: str) -> None:
            watch.tell(sentence)
            if sentence.startswith("going on without actor"):
                lost.append(sentence)
                if len(lost) == len(blocks):
                    stop.request()

        ending = supervise(programs, stop, logs=logs, tell=tell, tick=watch.tick)
        watch.tick()
    if len(lost) == len(blocks):
        ending = Ending(FAILED, f"no actor host is left; {lost[0]}")
    return ending, watch.status


class HostLogs(LogTail):
    """Lines of the logs with their host's name before them: all, or those of a warning or worse."""

    def __init__(self, folder: Path, *, everything: bool) -> None:
        super().__init__(folder)
        self._everything = everything

    def warnings(self) -> list[str]:
        """What is to be shown."""
        found = [(path.stem.rpartition("@"), line) for path, line in self.new_lines()]
        return [
            f"{host} {line}" for (role, _, host), line in found if role and (self._everything or WARNING.match(line))
        ]
