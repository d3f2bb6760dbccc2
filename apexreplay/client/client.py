"""A client of a server of tables."""

import logging
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from apexreplay.client.connection import Connection, Lease, new_session
from apexreplay.client.sampler import Sampler
from apexreplay.client.waiting import Waiting, block
from apexreplay.client.writer import Writer
from apexreplay.errors import DataError, require, require_integer
from apexreplay.facts import MAX_TEXT
from apexreplay.store.location import memory_id
from apexreplay.transport.roles import CLIENTS, read_keys
from apexreplay.wire.codec import MAX_PRIORITIES
from apexreplay.wire.control import Hello, ServerStatus, StatusRequest, Welcome

PORT = 23_000
TIMEOUT = 10.0  # seconds in which the server must answer
MAX_PREFETCH = 1_000  # batches
_LABEL = "[A-Za-z0-9]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?"  # a part of a host name between dots
_MAX_HOST = 253  # characters

log = logging.getLogger("apexreplay")

Member = TypeVar("Member", bound=Lease)  # a writer or a sampler


class BaseClient:
    """What the clients for threads and for asyncio share. See `Client`."""

    def __init__(
        self, host: str = "127.0.0.1", port: int = PORT, *, keys: str | Path | None = None, role: str = "administrator"
    ) -> None:
        require(role in CLIENTS, f"a role is one of {', '.join(CLIENTS)}, got {role!r}")
        is_host = len(str(host)) <= _MAX_HOST and re.fullmatch(rf"{_LABEL}(\.{_LABEL})*\.?", str(host))
        is_address = is_host and isinstance(port, int) and 1 <= port <= 65_535
        require(bool(is_address), f"a server has a host name and a port from 1 to 65535, got {host!r} and {port!r}")
        self._connection = Connection(host, port, read_keys(None if keys is None else Path(keys), role))

    def _join(
        self, make: Callable[[Connection, Hello, Welcome], Member], table: str, timeout: float, **fields: Any
    ) -> Waiting[Member]:
        """Asks for a lease of the table, and makes its writer or sampler."""
        is_name = isinstance(table, str) and table.isascii() and table.isprintable() and len(table) <= MAX_TEXT
        require(is_name, f"a table has a name of up to {MAX_TEXT} printable ASCII characters, got {table!r}")
        hello = Hello(session=new_session(), table=table, **fields)
        try:
            welcome = yield from self._connection.ask(hello, timeout)
            assert isinstance(welcome, Welcome)
            return make(self._connection, hello, welcome)
        except BaseException:
            self._connection.leave(hello.session)  # The server may have granted it.
            raise

    def _join_sampler(
        self, kind: Callable[..., Member], table: str, batch_size: int, prefetch: int, shared: bool, timeout: float
    ) -> Waiting[Member]:
        batch_size = require_integer("batch_size", batch_size, 1, MAX_PRIORITIES)
        make = partial(kind, batch_size=batch_size, prefetch=require_integer("prefetch", prefetch, 1, MAX_PREFETCH))
        memory = _memory() if shared else ""
        return self._join(make, table, timeout, role="sampler", memory=memory)

    def _status(self, timeout: float) -> Waiting[ServerStatus]:
        answer = yield from self._connection.ask(StatusRequest(session=new_session()), timeout)
        assert isinstance(answer, ServerStatus)
        return answer


def _memory() -> str:
    """Returns `memory_id`; "" if this host has no usable folder for memories, which remote samplers do not need."""
    try:
        return memory_id()
    except (DataError, OSError) as error:
        log.warning("drawing by messages, which is slower if the server is on this host: %s", error)
        return ""


class Client(BaseClient):
    """Connects to the server at `host` and `port`. All of its sockets connect to the server, none is bound.

    `keys`: folder with the keys of `role` (writer, reader or administrator); None: no authentication. Raises UsageError
    for unusable keys. The server is first asked by `writer`, `sampler` and `status`. Threads may share a client.
    """

    def writer(self, table: str, *, timeout: float = TIMEOUT) -> Writer:
        """Returns a writer of the table. Raises UsageError if the server refuses it, DataError without an answer."""
        return block(self._join(Writer, table, timeout, role="writer"))

    def sampler(
        self, table: str, batch_size: int, *, prefetch: int = 2, shared_memory: bool = True, timeout: float = TIMEOUT
    ) -> Sampler:
        """Returns a sampler of batches. Raises errors as `writer` does.

        `prefetch`: batches that the server sends ahead to a sampler on another host. `shared_memory`: whether a sampler
        on the server's host reads its memory itself, which is several times as fast.
        """
        return block(self._join_sampler(Sampler, table, batch_size, prefetch, shared_memory, timeout))

    def status(self, *, timeout: float = TIMEOUT) -> ServerStatus:
        """Returns the status of the server and of its tables. Raises DataError if it does not answer."""
        return block(self._status(timeout))

    def close(self) -> None:
        """Closes the connection. Close writers and samplers before."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
