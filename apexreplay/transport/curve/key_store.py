"""A folder of CURVE keys in pyzmq's certificate format.

`ROLE.key_secret` holds the role's own key pair; only the file's owner can read it. `ROLE.key` and `ROLE.NAME.key` hold
the public keys that are accepted for the role. A key is 40 characters of Z85. No error message or repr contains a
secret.
"""

import os
import resource
import shutil
import stat
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import zmq.auth
from zmq.utils import z85

from apexreplay.errors import UsageError, require

KEY_BYTES = 32


class Endpoint(NamedTuple):
    """A bound socket: the role that binds it and the roles that may connect."""

    bound_by: str
    open_to: tuple[str, ...]


Endpoints = Mapping[str, Endpoint]  # by name of the socket


def lists_for(endpoints: Endpoints, role: str) -> tuple[str, ...]:
    """Returns the roles whose public keys this role needs: those it connects to and those that connect to it."""
    needed = {endpoint.bound_by for endpoint in endpoints.values() if role in endpoint.open_to}
    needed |= {other for endpoint in endpoints.values() if endpoint.bound_by == role for other in endpoint.open_to}
    return tuple(name for name in roles_of(endpoints) if name in needed)


def roles_of(endpoints: Endpoints) -> tuple[str, ...]:
    """Returns all roles, in the order in which the table mentions them."""
    return tuple(
        dict.fromkeys(role for endpoint in endpoints.values() for role in (endpoint.bound_by, *endpoint.open_to))
    )


class Keys:
    """The keys of a program of one role, read from its key folder."""

    def __init__(self, folder: Path, role: str, endpoints: Endpoints, *, remedy: str, command: str) -> None:
        """Raises UsageError if a key is missing or invalid, or if other users can write a key or read a secret key.

        `remedy`: what to do if the folder does not exist. `command`: the command that creates keys.
        """
        require(folder.is_dir(), f"key folder {folder} does not exist", remedy=remedy)
        remedy = f"create new keys with {command}"
        require(not any(folder.glob("*.secret")), f"{folder} has keys in an older format (ROLE.secret)", remedy=remedy)
        _refuse_open(folder, stat.S_IWGRP | stat.S_IWOTH, "written")
        self.role = role
        self.endpoints = endpoints
        self.roles = roles_of(endpoints)
        self._command = command
        self.public, secret = load_own(folder, role, command)
        remedy = f"copy the keys of the {role} again"
        require(secret is not None, f"{folder / role}.key_secret contains no secret key", remedy=remedy)
        self.secret = secret or b""
        self._folder = folder
        for other in lists_for(endpoints, role):
            self.accepted(other)
        for other in {endpoint.bound_by for endpoint in endpoints.values() if role in endpoint.open_to}:
            self._only_key(other)

    def __repr__(self) -> str:
        return f"Keys({self._folder}, {self.role})"

    @property
    def exist(self) -> bool:
        """Whether the key folder still exists."""
        return self._folder.is_dir()

    def server_key(self, socket_name: str) -> bytes:
        """Returns the public key of the role that binds this socket."""
        return self._only_key(self.endpoints[socket_name].bound_by)

    def accepted(self, role: str) -> dict[bytes, str]:
        """Reads the public keys that are accepted for the role now; returns {key: name of its file}."""
        paths = certificates(self._folder, role)
        return {_load(path, stat.S_IWGRP | stat.S_IWOTH, "written", self._command)[0]: path.name for path in paths}

    def _only_key(self, role: str) -> bytes:
        keys = list(self.accepted(role))
        problem = f"{self._folder} must have exactly one public key of the {role}, but has {len(keys)}"
        require(len(keys) == 1, problem, remedy=f"create the folder with {self._command}")
        return keys[0]


def disable_core_files() -> None:
    """Disables core files: a stuck program aborts, and a core file would contain its secret key."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def certificates(folder: Path, role: str) -> list[Path]:
    """Returns the paths of the public keys of a role; raises UsageError if the folder cannot be read."""
    try:
        names = os.listdir(folder)  # `Path.glob` hides that no descriptor is free.
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UsageError(f"cannot read {folder}: {error.strerror}") from error
    return sorted(folder / name for name in names if name == f"{role}.key" or fnmatchcase(name, f"{role}.*.key"))


def create_pair(folder: Path, role: str) -> None:
    """Creates ROLE.key and ROLE.key_secret in `folder`, readable only by the owner; raises OSError."""
    for path in zmq.auth.create_certificates(folder, role):
        Path(path).chmod(0o600)


@contextmanager
def removed_if_unfinished(folder: Path) -> Iterator[None]:
    """Removes a folder of keys that is not complete, so that the same command can be repeated."""
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def load_own(folder: Path, role: str, command: str) -> tuple[bytes, bytes | None]:
    """Returns the public and the secret key of a role's own pair; raises UsageError. `command` creates keys."""
    return _load(folder / f"{role}.key_secret", stat.S_IRWXG | stat.S_IRWXO, "read", command)


def write_private(path: Path, text: str) -> None:
    """Writes a file that only its owner can read. Raises UsageError if the file exists."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(f"cannot create {path}: {error.strerror}", "choose another folder or name") from error
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


def _load(path: Path, forbidden: int, verb: str, command: str) -> tuple[bytes, bytes | None]:
    """Returns the public key, and the secret key or None. Errors never quote the file, as it may contain a secret."""
    try:
        _refuse_open(path, forbidden, verb)
        public, secret = zmq.auth.load_certificate(path)
        is_whole = all(len(z85.decode(key)) == KEY_BYTES for key in (public, secret) if key is not None)
    except OSError as error:
        remedy = f"create the host's keys with {command}"
        raise UsageError(f"cannot read {path}: {error.strerror}", remedy) from error
    except UsageError:
        raise
    except (KeyError, ValueError, struct.error):  # the last one for characters that stand for more than 32 bits
        is_whole = False
    require(is_whole, f"{path} is not a key certificate", remedy=f"create one with {command}")
    return public, secret


def _refuse_open(path: Path, bits: int, verb: str) -> None:
    mode = stat.S_IMODE(path.stat().st_mode)
    remedy = f"run chmod {mode & ~bits & 0o777:o} {path}; if another user may have {verb} it, create new keys"
    require(not mode & bits, f"{path} can be {verb} by other users (mode {mode:04o})", remedy=remedy)
