"""A folder of CURVE keys, as pyzmq's certificates, and the matrix that says which role's key opens which socket.

`ROLE.key_secret` is that role's own pair, readable by its owner alone. `ROLE.key` and `ROLE.NAME.key` are the public
keys that are accepted as that role's. A key is 40 characters of Z85. No error message or repr contains a secret.
"""

from __future__ import annotations

import os
import resource
import stat
from pathlib import Path
from typing import NamedTuple

import zmq.auth
from zmq.utils import z85

from apex.errors import ConfigError, require
from apex.types import Role

PINNED = (Role.LEARNER, Role.REPLAY)  # who binds: all clients expect this one key there
KEY_BYTES = 32


class Endpoint(NamedTuple):
    """A socket that is bound, and who may connect to it."""

    bound_by: Role
    open_to: tuple[Role, ...]


ENDPOINTS = {
    "experience": Endpoint(Role.REPLAY, (Role.ACTOR,)),
    "priorities": Endpoint(Role.REPLAY, (Role.LEARNER,)),
    "receipts": Endpoint(Role.REPLAY, (Role.ACTOR,)),
    "parameters": Endpoint(Role.LEARNER, (Role.ACTOR, Role.EVALUATOR)),
    "batches": Endpoint(Role.LEARNER, (Role.REPLAY,)),
    "control": Endpoint(Role.LEARNER, (Role.REPLAY, Role.ACTOR, Role.EVALUATOR, Role.OBSERVER)),
    "metrics": Endpoint(Role.LEARNER, (Role.ACTOR,)),
}


def lists_for(role: Role) -> tuple[Role, ...]:
    """The roles whose public keys this role needs: of whom it connects to, and of who connects to it."""
    needed = {endpoint.bound_by for endpoint in ENDPOINTS.values() if role in endpoint.open_to}
    for endpoint in ENDPOINTS.values():
        if endpoint.bound_by == role:
            needed.update(endpoint.open_to)
    return tuple(name for name in Role if name in needed)


class Keys:
    """The keys that a program of one role takes from its folder."""

    def __init__(self, folder: Path, role: Role) -> None:
        """Raises ConfigError for what is missing, is no key, or lies open to others."""
        require(folder.is_dir(), f"there is no folder of keys {folder}: make one with apex keys new {folder}")
        require(
            not any(folder.glob("*.secret")),
            f"{folder} holds keys of an older format (ROLE.secret): make new ones with apex keys new, and new bundles",
        )
        _refuse_open(folder, stat.S_IWGRP | stat.S_IWOTH, "written")
        self.role = role
        self.public, secret = _load(folder / f"{role}.key_secret", stat.S_IRWXG | stat.S_IRWXO, "read")
        require(secret is not None, f"{folder / role}.key_secret holds no secret key")
        self.secret = secret or b""
        self._folder = folder
        for other in lists_for(role):
            self.accepted(other)
        for other in {endpoint.bound_by for endpoint in ENDPOINTS.values() if role in endpoint.open_to}:
            self._only_key(other)

    def __repr__(self) -> str:
        return f"Keys({self._folder}, {self.role})"

    def server_key(self, socket_name: str) -> bytes:
        """The public key that whoever binds this socket must have."""
        return self._only_key(ENDPOINTS[socket_name].bound_by)

    def accepted(self, role: Role) -> dict[bytes, str]:
        """The public keys that are accepted as the role's now, each with the name of its file."""
        paths = certificates(self._folder, role)
        return {_load(path, stat.S_IWGRP | stat.S_IWOTH, "written")[0]: path.name for path in paths}

    def _only_key(self, role: Role) -> bytes:
        keys = list(self.accepted(role))
        require(
            len(keys) == 1,
            f"{self._folder} must have one key of the {role}, which all others expect there, but has {len(keys)}: "
            "apex keys bundle copies what is needed",
        )
        return keys[0]


def read_keys(folder: str, role: Role) -> Keys | None:
    """Reads the keys of a role, and forbids core files; None where no folder is given: there is no authentication."""
    if not folder:
        return None
    # No core file: a program that is stuck aborts, and its memory holds the secret.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    return Keys(Path(folder), role)


def certificates(folder: Path, role: Role) -> list[Path]:
    """The files with the public keys of a role."""
    return sorted(path for pattern in (f"{role}.key", f"{role}.*.key") for path in folder.glob(pattern))


def create_pair(folder: Path, role: Role) -> None:
    """Makes ROLE.key and ROLE.key_secret in `folder`, which nobody else can look into; raises OSError."""
    for path in zmq.auth.create_certificates(folder, role):
        Path(path).chmod(0o600)


def public_digits(folder: Path, role: Role) -> str:
    """The public key of the role's own pair, as 64 hexadecimal digits; raises ConfigError."""
    return z85.decode(_load(folder / f"{role}.key_secret", stat.S_IRWXG | stat.S_IRWXO, "read")[0]).hex()


def certificate(digits: str) -> str:
    """The text of a certificate with this public key, which is 64 hexadecimal digits; raises ValueError."""
    return f'curve\n    public-key = "{z85.encode(bytes.fromhex(digits)).decode()}"\n'


def write_private(path: Path, text: str) -> None:
    """Writes a file that its owner alone may read; never over one that is there."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot make {path}: {error.strerror}; keys are never overwritten") from error
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


def _load(path: Path, forbidden: int, verb: str) -> tuple[bytes, bytes | None]:
    """The public key, and the secret one where there is one. Errors do not quote the file: it may hold a secret."""
    try:
        _refuse_open(path, forbidden, verb)
        public, secret = zmq.auth.load_certificate(path)
        is_whole = all(len(z85.decode(key)) == KEY_BYTES for key in (public, secret) if key is not None)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; apex keys bundle makes what a host needs") from error
    except ConfigError:
        raise
    except (KeyError, ValueError):
        is_whole = False
    require(is_whole, f"{path} is not a certificate of a key, as apex keys makes them")
    return public, secret


def _refuse_open(path: Path, bits: int, verb: str) -> None:
    mode = stat.S_IMODE(path.stat().st_mode)
    require(
        not mode & bits,
        f"{path} can be {verb} by others (mode {mode:04o}): chmod {mode & ~bits & 0o777:o} {path}, "
        "and make new keys if somebody may have done so",
    )
