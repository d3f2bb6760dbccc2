"""Starts a server of tables as a child process that ends with this one."""

import errno
import json
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import SystemRandom
from signal import SIGTERM
from typing import Any, Self

from apexreplay.client.client import Client
from apexreplay.errors import FINISHED, DataError, require
from apexreplay.process.spawn import PIPE, Process, spawn
from apexreplay.server.place import PORTS_PER_TABLE
from apexreplay.server.table_settings import TableSettings
from apexreplay.tables import Table

_ATTEMPTS = 50


class Server:
    """A server of tables in a child process. As a context manager, it stops the server at the end."""

    def __init__(self, process: Process, host: str, port: int, keys: Path | None) -> None:
        """Use `serve`."""
        self.process = process
        self.host = host
        self.port = port
        self._keys = keys

    def client(self) -> Client:
        """Returns a client of this server."""
        return Client(self.host, self.port, keys=self._keys)

    def close(self) -> None:
        """Stops the server. With a folder of snapshots, it saves a last one before.

        Raises DataError if the server has failed, was killed, or could not save the snapshot.
        """
        self.process.terminate()
        status = self.process.wait()
        problem = f"the server has ended with status {status}; it has printed the reason, if any, to standard error"
        require(status in (FINISHED, -SIGTERM), problem, error=DataError)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with suppress(*[DataError] if kind else []):  # An error that is on its way matters more.
            self.close()


def serve(
    tables: Sequence[Table | TableSettings],
    *,
    bind: str = "127.0.0.1",
    port: int = 0,
    snapshots: str | Path | None = None,
    snapshot_seconds: float = 60.0,
    keys: str | Path | None = None,
    insecure: bool = False,
) -> Server:
    """Starts a server of the tables, as `apexreplay serve` does, and returns it when it is ready.

    `bind`: IPv4 address of this host. `port`: of the control socket; those of the tables follow. 0: free ones.
    `snapshots`: folder from which the tables are restored, and in which they are saved, every `snapshot_seconds` and at
    the end. `keys`: folder of keys. `insecure`: allows other hosts without keys.

    The server ends with the thread that calls this. Raises UsageError and DataError with the reason if it cannot start.
    """
    require(isinstance(tables, Sequence), f"tables must be a list, got {tables!r}", remedy="pass [table]")
    settings = [each if isinstance(each, TableSettings) else TableSettings(table=each) for each in tables]
    names = [each.table.name for each in settings]
    require(len(set(names)) == len(names) > 0, f"a server needs tables with different names, got {names}")
    port = port or _find_ports(bind, 1 + PORTS_PER_TABLE * len(settings))
    options = {"--snapshots": snapshots, "--snapshot-seconds": snapshot_seconds, "--keys": keys}
    options |= {"--port": port, "--bind": bind}
    command = [sys.executable, "-P", "-m", "apexreplay", "serve", "--table", "-", "--ready"]
    command += [f"{name}={value}" for name, value in options.items() if value is not None]
    command += ["--insecure-no-auth"] if insecure else []
    process = spawn(command, input=PIPE, output=PIPE, errors=None, ends_by=SIGTERM)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with process.stdin, process.stdout:
            process.stdin.write(json.dumps([to_dict(each) for each in settings]).encode())
            process.stdin.close()
            said = process.stdout.readline()
    except BaseException:  # such as Ctrl-C while the server restores
        process.terminate()
        process.wait()
        raise
    if said.strip() == b"ready":
        host = "127.0.0.1" if bind == "0.0.0.0" else bind
        return Server(process, host, port, None if keys is None else Path(keys))
    process.wait()
    raise DataError("the server did not start; it has printed the reason to standard error")


def to_dict(settings: TableSettings) -> dict[str, Any]:
    """Returns the settings as a dictionary that can be written as JSON."""
    limits = {name: getattr(settings, name) for name in settings.__slots__ if name != "table"}
    return {"table": settings.table.to_dict(), **limits}


def from_dict(saved: dict[str, Any]) -> TableSettings:
    """Returns the settings from a result of `to_dict`. Raises UsageError."""
    return TableSettings(**{**saved, "table": Table.from_dict(saved["table"])})


def _find_ports(bind: str, count: int) -> int:
    """Returns the first of `count` free ports in a row."""
    for _ in range(_ATTEMPTS):
        first = SystemRandom().randrange(23_100, 32_000 - count)
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind((bind, port))
        except OSError as error:
            remedy = "choose an IPv4 address of this host"
            require(error.errno == errno.EADDRINUSE, f"cannot bind {bind}: {error.strerror}", remedy=remedy)
            continue
        return first
    raise DataError(f"{bind} has no {count} free ports in a row from 23100 to 32000", "set port")
