"""The programs of a run on several machines, as the launcher's supervisor starts them: one ssh connection for each."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from apex.config import Config, to_dict
from apex.config.role_command import learner_command, module_command, role_command
from apex.launch.ssh.hosts_file import HostEntry, Hosts
from apex.launch.ssh.preflight import guard_script, ssh_command
from apex.launch.ssh.remote_guard import JobSpec
from apex.runtime.supervisor import Program
from apex.transport.curve.command import bundle_for, new_folder
from apex.transport.curve.key_store import write_private
from apex.types import Role

BELOW = "hosts"  # in the folder of runs, here and there: what belongs to such a run, and is no run folder
LINK_SECONDS = 4.0  # for the news that a program is to end, and that it has, beside the program's own grace
NICE = 10  # of what only watches the run, or has time


def place_programs(hosts: Hosts, config: Config) -> list[HostEntry]:
    """Where each program runs, in the order of their start."""
    num_shards = config.replay.num_shards
    shards = [f"replay-{shard}" if num_shards > 1 else "replay" for shard in range(num_shards)]
    return [
        *([hosts.learner._replace(role="tensorboard")] if config.run.tensorboard else []),
        *(hosts.replay._replace(role=shard) for shard in shards),
        hosts.learner,
        *([hosts.evaluator] if hosts.evaluator and config.evaluator.enabled else []),
        *hosts.actors,
    ]


def home(config: Config, place: HostEntry) -> str:
    """What a program has for itself on its machine, below the installation's folder; its keys are in home/keys."""
    return f"{config.run.folder}/{BELOW}/{config.run.name}/{place.name}"


@contextmanager
def new_secrets(folder: Path, places: Sequence[HostEntry]) -> Iterator[Path]:
    """A folder for its owner alone with new keys, and a bundle for every place; it is removed at the end."""
    secrets = folder / "secrets"
    shutil.rmtree(secrets, ignore_errors=True)  # Of a launcher that was killed.
    try:
        secrets.mkdir(mode=0o700)
        new_folder(secrets / "keys")
        for place in reversed(places):  # Each actor host gets a key of its own, before the lists of all are copied.
            if (role := _role(place)) in tuple(Role):
                name = place.name if role == Role.ACTOR else ""
                bundle_for(secrets / "keys", Role(role), secrets / place.name, name)
        yield secrets
    finally:
        shutil.rmtree(secrets, ignore_errors=True)


def make_programs(
    hosts: Hosts,
    config: Config,
    secrets: Path,
    blocks: Mapping[HostEntry, tuple[int, int]],
    argv: Sequence[str],
    goes_on: Callable[[], bool],
) -> list[Program]:
    """In the order of their start: the last one is stopped first.

    `blocks`: the processes of each actor host, and the environments of each process.
    """
    run, transport = config.run, config.transport
    port = run.tensorboard_port
    forward = ("-L", f"127.0.0.1:{port}:127.0.0.1:{port}")  # so that one may look from here
    curves = ("--logdir", f"{run.folder}/{run.name}/tensorboard", "--host", "127.0.0.1", "--port", str(port))
    program = partial(_make_program, hosts, config, secrets, argv)
    programs = []
    for place in place_programs(hosts, config):
        role, _, shard = place.role.partition("-")
        where = home(config, place)
        joins = partial(
            role_command, learner=f"{hosts.learner.address}:{transport.port('control')}", keys=f"{where}/keys"
        )
        if role == "tensorboard":
            options: dict[str, Any] = {"ssh": forward, "crash_budget": 1.0, "essential": False, "niceness": NICE}
            programs.append(program(place, 0.5, "tensorboard.main", *curves, "--reload_interval", "5", **options))
        elif role == Role.REPLAY:
            snapshots = Path(where) / "snapshots" if config.checkpoint.replay else None
            words = joins(Role.REPLAY, bind=place.address, shard=int(shard or 0), snapshots=snapshots)
            programs.append(program(place, 1.5, *module_command(words), stops_with="replay", ready=goes_on))
        elif role == Role.LEARNER:
            words = learner_command(run_folder=f"{run.folder}/{run.name}")
            programs.append(program(place, 4.0, *module_command(words), ends_run=True))
        elif role == Role.EVALUATOR:
            programs.append(program(place, 1.0, *module_command(joins(Role.EVALUATOR)), ready=goes_on))
        else:
            processes, envs = blocks[place]
            words = joins(Role.ACTOR, processes=processes, envs=envs)
            # One of several machines may go: the run goes on with fewer actors.
            options = {"stops_with": "actors", "essential": len(blocks) == 1, "ready": goes_on}
            programs.append(program(place, 2.0, *module_command(words), **options))
    return programs


def _make_program(
    hosts: Hosts,
    config: Config,
    secrets: Path,
    argv: Sequence[str],
    place: HostEntry,
    grace: float,
    *arguments: str,
    ssh: tuple[str, ...] = (),
    niceness: int = 0,
    **options: Any,
) -> Program:
    """A program at `place`, and the job file that the ssh client sends."""
    job = JobSpec(
        role=place.role,
        arguments=arguments,
        home=home(config, place),
        keys={file.name: file.read_text() for file in (secrets / place.name).glob("*.*")},
        grace_seconds=grace,
        stuck_seconds=config.run.stuck_seconds if _role(place) in tuple(Role) else 0.0,
        niceness=niceness,
        run=to_dict(config) if place is hosts.learner else None,
        argv=tuple(argv),
    )
    path = secrets / f"{place.name}.job"
    write_private(path, job.encode())
    client = (sys.executable, "-u", "-m", "apex.launch.ssh.client", str(path))
    return Program(
        role=place.name,
        command=(*client, *ssh_command(hosts, place, guard_script(place), *ssh)),
        grace_seconds=grace + LINK_SECONDS,
        stuck_seconds=config.run.stuck_seconds,
        **options,
    )


def _role(place: HostEntry) -> str:
    return place.role.partition("-")[0]
