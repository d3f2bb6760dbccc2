"""A replay server for tables of any fields: prioritized, in shared memory and by messages, without loss after a crash.

from apexreplay import serve, table

steps = table("steps", {"image": ("uint8", (84, 84)), "action": "int64"})
with serve([steps]) as server, server.client() as client, client.writer("steps") as writer:
    writer.append({"image": image, "action": 3})
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from apexreplay.client.asynchronous import AsyncClient as AsyncClient
    from apexreplay.client.asynchronous import AsyncSampler as AsyncSampler
    from apexreplay.client.asynchronous import AsyncWriter as AsyncWriter
    from apexreplay.client.client import Client as Client
    from apexreplay.client.sampler import Batch as Batch
    from apexreplay.client.sampler import Sampler as Sampler
    from apexreplay.client.writer import Writer as Writer
    from apexreplay.item_kinds import Sequence as Sequence
    from apexreplay.item_kinds import Single as Single
    from apexreplay.item_kinds import Window as Window
    from apexreplay.server.table_settings import TableSettings as TableSettings
    from apexreplay.serving import Server as Server
    from apexreplay.serving import serve as serve
    from apexreplay.tables import Table as Table
    from apexreplay.tables import table as table

_MODULES = {
    "AsyncClient": "client.asynchronous",
    "AsyncSampler": "client.asynchronous",
    "AsyncWriter": "client.asynchronous",
    "Batch": "client.sampler",
    "Client": "client.client",
    "Sampler": "client.sampler",
    "Sequence": "item_kinds",
    "Server": "serving",
    "Single": "item_kinds",
    "Table": "tables",
    "TableSettings": "server.table_settings",
    "Window": "item_kinds",
    "Writer": "client.writer",
    "serve": "serving",
    "table": "tables",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used, so that a program loads only what it needs."""
    if name not in _MODULES:
        raise AttributeError(f"module 'apexreplay' has no attribute {name!r}")
    return getattr(import_module(f"apexreplay.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
