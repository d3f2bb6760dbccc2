"""Finds listening sockets, in /proc."""

import os
import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

LISTEN = "0A"


def listening(pids: Iterable[int]) -> set[tuple[str, int]]:
    """Returns address and port of every TCP socket on which one of these processes listens."""
    found: dict[str, tuple[str, int]] = {}
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        path = Path(f"/proc/net/{table}")
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            _, local, _, state, *rest = line.split()
            digits, port = local.split(":")
            parts = [bytes.fromhex(digits[i : i + 8])[::-1] for i in range(0, len(digits), 8)]
            if state == LISTEN:
                found[rest[5]] = socket.inet_ntop(family, b"".join(parts)), int(port, 16)
    own = set()
    for pid in pids:
        with suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    link = os.readlink(entry)
                    if link.startswith("socket:["):
                        own.add(link[8:-1])
    return {found[inode] for inode in own & set(found)}
