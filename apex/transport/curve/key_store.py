"""The sockets of a run with the roles that may connect to each, and the keys of a role."""

from pathlib import Path

from zmq.utils import z85

from apex.types import Role
from apexreplay.transport.curve import key_store
from apexreplay.transport.curve.key_store import Endpoint, disable_core_files, load_own

PINNED = (Role.LEARNER, Role.REPLAY)  # roles that bind sockets: clients expect exactly the one key of the role
COMMAND = "apex keys"  # creates keys
KEYS_REMEDY = f"run {COMMAND} new"

ENDPOINTS = {
    "experience": Endpoint(Role.REPLAY, (Role.ACTOR,)),
    "priorities": Endpoint(Role.REPLAY, (Role.LEARNER,)),
    "receipts": Endpoint(Role.REPLAY, (Role.ACTOR,)),
    "parameters": Endpoint(Role.LEARNER, (Role.ACTOR, Role.EVALUATOR)),
    "batches": Endpoint(Role.REPLAY, (Role.LEARNER,)),
    "control": Endpoint(Role.LEARNER, (Role.REPLAY, Role.ACTOR, Role.EVALUATOR, Role.OBSERVER)),
}


def lists_for(role: Role) -> tuple[Role, ...]:
    """Returns the roles whose public keys this role needs: those it connects to and those that connect to it."""
    needed = key_store.lists_for(ENDPOINTS, role)
    return tuple(name for name in Role if name in needed)


class Keys(key_store.Keys):
    """The keys of a program of one role of a run, read from its key folder."""

    def __init__(self, folder: Path, role: Role) -> None:
        """Raises UsageError if a key is missing or invalid, or if other users can write a key or read a secret key."""
        remedy = f"run {COMMAND} new {folder}"
        if role not in (Role.LEARNER, Role.OBSERVER):  # New keys of another role would fit no learner.
            remedy = f"copy the bundle that {COMMAND} bundle writes on the learner's host"
        super().__init__(folder, role, ENDPOINTS, remedy=remedy, command=f"{COMMAND} bundle")


def read_keys(folder: str, role: Role) -> Keys | None:
    """Reads the keys of a role and disables core files. Returns None, for no authentication, if `folder` is empty."""
    if not folder:
        return None
    disable_core_files()
    return Keys(Path(folder), role)


def public_digits(folder: Path, role: Role) -> str:
    """Returns the public key of the role's own pair as 64 hexadecimal digits; raises UsageError."""
    return z85.decode(load_own(folder, role, f"{COMMAND} bundle")[0]).hex()


def certificate(digits: str) -> str:
    """Returns the text of a certificate for a public key of 64 hexadecimal digits; raises ValueError."""
    return f'curve\n    public-key = "{z85.encode(bytes.fromhex(digits)).decode()}"\n'
