"""The machines of a run that is started over ssh, as a TOML file names them."""

from __future__ import annotations

import ipaddress
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

from apex.config import read_toml
from apex.errors import ConfigError, require
from apex.transport.curve.key_store import PINNED
from apex.types import Role

OPTION = "--hosts"
FOLDER = "apex-zeromq"  # as git clone calls it

_DESTINATION = re.compile(r"(ssh://)?[A-Za-z0-9_][A-Za-z0-9_.@:%-]*")  # never an option, never a word for a shell
_KEYS = {
    Role.LEARNER: {"host", "folder", "address"},
    Role.REPLAY: {"host", "folder", "address"},
    Role.EVALUATOR: {"host", "folder"},
    Role.ACTOR: {"host", "folder", "processes"},
}


class HostEntry(NamedTuple):
    """Where a role runs."""

    role: str
    host: str  # what follows the word ssh
    folder: str  # of the installation there, from the home folder or absolute
    address: str = ""  # learner and replay: where the others reach it
    processes: int = 0  # actors; 0: one for each core

    @property
    def name(self) -> str:
        """As it is shown, and as its log is called: actor@box3."""
        return f"{self.role}@{self.host.rpartition('@')[2].removeprefix('ssh://').replace(':', '-')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """What the file says."""

    ssh: tuple[str, ...]  # the program, and options of the user's own
    learner: HostEntry
    replay: HostEntry
    evaluator: HostEntry | None
    actors: tuple[HostEntry, ...]

    @property
    def places(self) -> list[HostEntry]:
        """Every role's, in the order of their start."""
        return [self.replay, self.learner, *filter(None, [self.evaluator]), *self.actors]


def read_hosts(path: Path) -> Hosts:
    """Reads the file; raises ConfigError for whatever is missing there, or is not understood."""
    try:
        tree = read_toml(path)
    except ConfigError as error:
        raise ConfigError(f"{OPTION}: {error}; docs/own-machines.md shows one") from error
    known = ("ssh", "folder", *_KEYS)
    for name in tree:
        require(name in known, f"{path}: unknown {name!r}; known: {', '.join(known)}")
    ssh, folder = tree.get("ssh", "ssh"), tree.get("folder", FOLDER)
    try:
        words = tuple(shlex.split(ssh)) if isinstance(ssh, str) else ()
    except ValueError:  # an open quote
        words = ()
    require(bool(words), f"{path}: ssh must be a command, got {ssh!r}")

    def place(role: Role, table: Any) -> HostEntry:
        return _place(path, role, table, folder)

    for role in PINNED:
        require(role in tree, f'{path} has no [{role}]: it needs host = "..." and address = "..."')
    actors = tree.get(Role.ACTOR, [])
    require(isinstance(actors, list) and bool(actors), f'{path} has no [[actor]]: each needs host = "..."')
    hosts = Hosts(
        ssh=words,
        learner=place(Role.LEARNER, tree[Role.LEARNER]),
        replay=place(Role.REPLAY, tree[Role.REPLAY]),
        evaluator=place(Role.EVALUATOR, tree[Role.EVALUATOR]) if Role.EVALUATOR in tree else None,
        actors=tuple(place(Role.ACTOR, table) for table in actors),
    )
    names = [actor.name for actor in hosts.actors]
    for name in names:
        require(names.count(name) == 1, f"{path}: {name} is there twice; one [[actor]] with more processes does it")
    return hosts


def divide(num_actors: int, cores: Sequence[int]) -> list[tuple[int, int]]:
    """Shares actors among hosts by the cores that each has for them: its processes, and the environments of each.

    Every host gets one at least. Together they take `num_actors`; only the last one's places may be more than are left.
    """
    require(
        num_actors >= len(cores),
        f"--actors {num_actors} cannot be shared among {len(cores)} actor hosts: raise it, or name fewer hosts",
    )
    left, found = num_actors, []
    for index, own in enumerate(cores):
        others = len(cores) - index - 1
        share = min(left - others, ceil(left * own / sum(cores[index:])))
        envs = ceil(share / own)
        processes = ceil(share / envs)
        if others and processes * envs > left - others:
            processes, envs = 1, share
        found.append((processes, envs))
        left -= processes * envs
    return found


def _place(path: Path, role: Role, table: Any, folder: Any) -> HostEntry:
    where = f"{path}, {role}"
    require(isinstance(table, dict), f"{where}: must be a table, got {table!r}")
    for name in table:
        require(name in _KEYS[role], f"{where}: unknown {name!r}; known: {', '.join(sorted(_KEYS[role]))}")
    host, folder = table.get("host"), table.get("folder", folder)
    require(
        isinstance(host, str) and bool(_DESTINATION.fullmatch(host)),
        f"{where}: host must be what follows the word ssh, as in ada@box3, got {host!r}",
    )
    require(isinstance(folder, str) and bool(folder), f"{where}: folder must be a path on {host}, got {folder!r}")
    processes = table.get("processes", 0)
    require(
        type(processes) is int and (processes >= 1 or "processes" not in table),
        f"{where}: processes must be a whole number >= 1, got {processes!r}",
    )
    address = table.get("address", "")
    if "address" in _KEYS[role]:
        try:
            address = str(ipaddress.IPv4Address(address))
        except ValueError as error:
            raise ConfigError(
                f"{where}: address must be an IPv4 address of {host} that the others reach, got {address!r}"
            ) from error
        require(address != "0.0.0.0", f"{where}: address 0.0.0.0 is no host's; name the one that the others reach")
    return HostEntry(role, host, folder.removeprefix("~/"), address, processes)
