"""Where a server of tables listens, and what it keeps."""

from pathlib import Path
from typing import NamedTuple

PORT = 23_000  # default port of the control socket
PORTS_PER_TABLE = 10  # experience, priorities, receipts, then one for each sampler process
MEMORY_SAMPLERS = 64  # samplers that may read a table's memory at a time


class Place(NamedTuple):
    """Where a server listens and what it keeps."""

    bind: str = "127.0.0.1"  # IPv4 address
    port: int = PORT
    snapshots: Path | None = None  # folder of the snapshots, a folder for each table in it; None: nothing is kept
    snapshot_seconds: float = 60.0
    keys: Path | None = None  # folder of CURVE keys; None: no authentication


def first_port(place: Place, position: int) -> int:
    """Returns the port of experience of the table at this position; its other ports follow."""
    return place.port + 1 + PORTS_PER_TABLE * position
