"""Client, writer and sampler for asyncio: the calls of the others, but a wait suspends only the coroutine."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, Self

from apexreplay.client.client import TIMEOUT, BaseClient
from apexreplay.client.sampler import BaseSampler, Batch
from apexreplay.client.waiting import T, Waiting
from apexreplay.client.writer import EXIT_SECONDS, BaseWriter
from apexreplay.errors import DataError
from apexreplay.wire.control import ServerStatus

LONGEST_PAUSE = 0.02  # seconds; reached after 0.2 s, so that a long wait costs little


async def suspend(call: Waiting[T]) -> T:
    """Runs a call; its pauses, which become longer, suspend the coroutine. A cancellation ends the call in a pause."""
    pause = 0.0
    try:
        while True:
            pause = max(next(call), min(1.1 * pause, LONGEST_PAUSE))
            await asyncio.sleep(pause)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        call.close()


class AsyncWriter(BaseWriter[Coroutine[Any, Any, None]]):
    """`Writer` for asyncio: its methods are coroutines. Use a writer in one task at a time.

    A cancelled `append`, `add_item` or `end_episode` has changed nothing. Items are also sent if a `flush` is cancelled
    or its timeout ends. A cancelled `close` closes at once.
    """

    def _call(self, call: Waiting[None]) -> Coroutine[Any, Any, None]:
        return suspend(call)


class AsyncSampler(BaseSampler):
    """`Sampler` for asyncio: `async for batch in sampler`. A cancelled wait loses no batch.

    A batch is decoded in the thread of the event loop. `update_priorities` is no coroutine, because it does not wait.
    `close` is no coroutine either. If the server is away, it stops the event loop for up to a second; at the end of
    `async with`, only the coroutine waits.
    """

    async def sample(self, timeout: float | None = None) -> Batch:
        """Returns a batch, as `Sampler.sample` does. Raises DataError after `timeout` seconds; None: no limit."""
        await asyncio.sleep(0)  # Other tasks run between two batches.
        return await suspend(self._sample(timeout, 0.0))

    async def __aiter__(self) -> AsyncIterator[Batch]:
        while True:
            yield await self.sample()

    async def _close_aside(self) -> None:
        if self._leave():  # in this thread: from now on, no other task uses the sockets
            await asyncio.to_thread(self._open.close)


class AsyncClient(BaseClient):
    """`Client` for asyncio: its arguments, its errors, and its waits, which suspend only the coroutine.

    Use a client in one event loop.
    """

    @asynccontextmanager
    async def writer(self, table: str, *, timeout: float = TIMEOUT) -> AsyncIterator[AsyncWriter]:
        """Opens a writer of the table: `async with client.writer("steps") as writer`.

        Waits at the end until everything is stored, for at most EXIT_SECONDS. Raises UsageError if the server refuses
        the writer, DataError without an answer within `timeout` seconds.
        """
        writer = await suspend(self._join(AsyncWriter, table, timeout, role="writer"))
        try:
            yield writer
        except BaseException:
            with suppress(DataError):
                await writer.close(EXIT_SECONDS)
            raise
        await writer.close(EXIT_SECONDS)

    @asynccontextmanager
    async def sampler(
        self, table: str, batch_size: int, *, prefetch: int = 2, shared_memory: bool = True, timeout: float = TIMEOUT
    ) -> AsyncIterator[AsyncSampler]:
        """Opens a sampler of batches, with the arguments of `Client.sampler`. Raises errors as `writer` does."""
        call = self._join_sampler(AsyncSampler, table, batch_size, prefetch, shared_memory, timeout)
        sampler = await suspend(call)
        try:
            yield sampler
        finally:
            await sampler._close_aside()

    async def status(self, *, timeout: float = TIMEOUT) -> ServerStatus:
        """Returns the status of the server and of its tables. Raises DataError if it does not answer."""
        return await suspend(self._status(timeout))

    async def close(self) -> None:
        """Closes the connection. Close writers and samplers before."""
        await asyncio.to_thread(self._connection.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()
