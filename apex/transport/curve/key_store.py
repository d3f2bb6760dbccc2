"""A folder of keys, and the matrix that says which role's key opens which socket.

`ROLE.secret` is that role's secret key, readable by its owner alone. `ROLE.public` lists the public keys that are
believed to be that role's, one in a line, with a name behind it. No secret ever stands in an error message or a repr.
"""

from __future__ import annotations

import os
import resource
import stat
from pathlib import Path
from typing import NamedTuple

from apex.errors import ConfigError, require
from apex.types import Role

PINNED = ("learner", "replay")  # who binds: all clients expect this one key there
KEY_DIGITS = 64  # hexadecimal, of 32 bytes

Signature = tuple[tuple[int, int, int] | None, ...]


class Endpoint(NamedTuple):
    """A socket that is bound, and who may connect to it."""

    bound_by: str
    open_to: tuple[str, ...]


ENDPOINTS = {
    "experience": Endpoint("replay", ("actor",)),
    "priorities": Endpoint("replay", ("learner",)),
    "receipts": Endpoint("replay", ("actor",)),
    "parameters": Endpoint("learner", ("actor", "evaluator")),
    "batches": Endpoint("learner", ("replay",)),
    "control": Endpoint("learner", ("replay", "actor", "evaluator", "observer")),
    "metrics": Endpoint("learner", ("actor",)),
}


def lists_for(role: str) -> tuple[str, ...]:
    """The roles whose public keys this role needs: of whom it connects to, and of who connects to it."""
    needed = {socket_name.bound_by for socket_name in ENDPOINTS.values() if role in socket_name.open_to}
    for socket_name in ENDPOINTS.values():
        if socket_name.bound_by == role:
            needed.update(socket_name.open_to)
    return tuple(name for name in Role if name in needed)


class Keys:
    """What a program of one role takes from its folder."""

    def __init__(self, folder: Path, role: str) -> None:
        """Raises ConfigError for what is missing, is no key, or lies open to others."""
        require(folder.is_dir(), f"there is no folder of keys {folder}: make one with apex keys new {folder}")
        _refuse_open(folder, stat.S_IWGRP | stat.S_IWOTH, "written")
        # A program that is stuck aborts: what the kernel would write then has the secret in it.
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        self.role = role
        self.secret = _read_secret(folder, role)
        self._folder = folder
        for other in lists_for(role):
            self.believed(other)
        for other in {socket_name.bound_by for socket_name in ENDPOINTS.values() if role in socket_name.open_to}:
            self._only_key(other)

    def __repr__(self) -> str:
        return f"Keys({self._folder}, {self.role})"

    def server_key(self, socket_name: str) -> bytes:
        """The public key, 32 bytes, that whoever binds this socket must have."""
        return self._only_key(ENDPOINTS[socket_name].bound_by)

    def believed(self, role: str) -> dict[bytes, str]:
        """The names of all keys that are believed to be the role's, as its list says now."""
        path = self._folder / f"{role}.public"
        try:
            lines = path.read_text().splitlines()
            _refuse_open(path, stat.S_IWGRP | stat.S_IWOTH, "written")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {path}: {_why(error)}; apex keys bundle copies it where needed") from error
        found: dict[bytes, str] = {}
        for number, line in enumerate(lines, 1):
            digits, _, name = line.strip().partition(" ")
            if digits and not digits.startswith("#"):
                found[_key(digits, f"{path}, line {number}")] = name.strip()
        return found

    def signature(self) -> Signature:
        """Differs once a list has been changed."""
        return tuple(_signature(self._folder / f"{role}.public") for role in Role)

    def _only_key(self, role: str) -> bytes:
        keys = list(self.believed(role))
        require(
            len(keys) == 1,
            f"{self._folder / role}.public must list one key, which all others expect of the {role}, got {len(keys)}",
        )
        return keys[0]


def read_keys(folder: str, role: str) -> Keys | None:
    """The keys of a role; None where no folder is given: then there is no authentication."""
    return Keys(Path(folder), role) if folder else None


def write_private(path: Path, text: str) -> None:
    """Writes a file that its owner alone may read; never over one that is there."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot make {path}: {error.strerror}; keys are never overwritten") from error
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


def _read_secret(folder: Path, role: str) -> bytes:
    path = folder / f"{role}.secret"
    try:
        _refuse_open(path, stat.S_IRWXG | stat.S_IRWXO, "read")
        text = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read {path}: {_why(error)}; apex keys bundle --role {role} makes a folder for such a host"
        ) from error
    return _key(text, str(path))


def _key(digits: str, where: str) -> bytes:
    """The 32 bytes of a key. What stands there instead is not told: it may be a secret."""
    try:
        key = bytes.fromhex(digits)
    except ValueError:
        key = b""
    if len(digits) != KEY_DIGITS or len(key) != KEY_DIGITS // 2:
        raise ConfigError(f"{where}: a key is {KEY_DIGITS} hexadecimal digits, and this is none")
    return key


def _refuse_open(path: Path, bits: int, verb: str) -> None:
    mode = stat.S_IMODE(path.stat().st_mode)
    require(
        not mode & bits,
        f"{path} can be {verb} by others (mode {mode:04o}): chmod {mode & ~bits & 0o777:o} {path}, "
        "and make new keys if somebody may have done so",
    )


def _signature(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ctime_ns, found.st_size, found.st_ino  # ctime: a change of the mode counts too


def _why(error: OSError | UnicodeDecodeError) -> str:
    return error.strerror or "?" if isinstance(error, OSError) else "it is no text"
