"""A client of a server of tables."""

import re
from pathlib import Path
from typing import Self

from apexreplay.client.connection import Connection, new_session
from apexreplay.client.sampler import Sampler
from apexreplay.client.writer import Writer
from apexreplay.errors import require
from apexreplay.transport.roles import CLIENTS, read_keys
from apexreplay.wire.control import ServerStatus, StatusRequest

PORT = 23_000
TIMEOUT = 10.0  # seconds in which the server must answer


class Client:
    """Connects to the server at `host` and `port`. All of its sockets connect to the server, none is bound.

    `keys`: folder with the keys of `role` (writer, reader or administrator); None: no authentication. Raises UsageError
    for unusable keys. The server is first asked by `writer`, `sampler` and `status`. Threads may share a client.
    """

    def __init__(
        self, host: str = "127.0.0.1", port: int = PORT, *, keys: str | Path | None = None, role: str = "administrator"
    ) -> None:
        require(role in CLIENTS, f"a role is one of {', '.join(CLIENTS)}, got {role!r}")
        is_address = re.fullmatch(r"[\w.-]+", str(host)) and isinstance(port, int) and 1 <= port <= 65_535
        require(bool(is_address), f"a server has a host name and a port from 1 to 65535, got {host!r} and {port!r}")
        self._keys = read_keys(None if keys is None else Path(keys), role)
        self._connection = Connection(host, port, self._keys)

    def writer(self, table: str, *, timeout: float = TIMEOUT) -> Writer:
        """Returns a writer of the table. Raises UsageError if the server refuses it, DataError without an answer."""
        return Writer(self._connection, table, self._keys, timeout)

    def sampler(
        self, table: str, batch_size: int, *, prefetch: int = 2, shared_memory: bool = True, timeout: float = TIMEOUT
    ) -> Sampler:
        """Returns a sampler of batches. Raises errors as `writer` does.

        `prefetch`: batches that the server sends ahead to a sampler on another host. `shared_memory`: whether a sampler
        on the server's host reads its memory itself, which is several times as fast.
        """
        options = {"prefetch": prefetch, "shared_memory": shared_memory}
        return Sampler(self._connection, table, self._keys, batch_size, timeout, **options)

    def status(self, *, timeout: float = TIMEOUT) -> ServerStatus:
        """Returns the status of the server and of its tables. Raises DataError if it does not answer."""
        answer = self._connection.ask(StatusRequest(session=new_session()), timeout)
        assert isinstance(answer, ServerStatus)
        return answer

    def close(self) -> None:
        """Closes the connection. Close writers and samplers before."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
