"""The roles of keys of a server that runs alone, and the sockets that each role may use."""

from pathlib import Path

from apexreplay.transport.curve.key_store import Endpoint, Keys, create_pair, disable_core_files, removed_if_unfinished

ROLES = ("server", "writer", "reader", "administrator")
CLIENTS = ("writer", "reader", "administrator")
SOCKETS = {
    "control": Endpoint("server", CLIENTS),
    "experience": Endpoint("server", ("writer", "administrator")),
    "priorities": Endpoint("server", ("reader", "administrator")),
    "receipts": Endpoint("server", ("writer", "administrator")),
    "batches": Endpoint("server", ("reader", "administrator")),
}
COMMAND = "apexreplay keys DIR"


def read_keys(folder: Path | None, role: str) -> Keys | None:
    """Returns the keys of a role from its folder; None, for no authentication, without a folder. Raises UsageError."""
    if folder is None:
        return None
    disable_core_files()
    return Keys(folder, role, SOCKETS, remedy=f"create it with {COMMAND}", command=COMMAND)


def create_keys(folder: Path) -> None:
    """Creates a pair of keys for each role in a new folder; raises OSError. Give a client the server's public key and
    the pair of its role only."""
    folder.mkdir(mode=0o700, parents=True)
    with removed_if_unfinished(folder):
        for role in ROLES:
            create_pair(folder, role)
