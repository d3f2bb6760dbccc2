"""A TCP proxy between the programs of a run, which cuts, blocks, delays, limits and corrupts connections.

All of 127.0.0.0/8 is loopback on Linux. Each direction has its own address, with the ports of the program behind it.
Only `--learner` and `--advertise` differ from a normal run. The proxy does not need root (ADR 14).
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from threading import Thread
from typing import Any

from apex.config import TransportConfig
from apexreplay.errors import UsageError

# the addresses at which each role finds the learner, and all roles find the replay servers
ADDRESSES = {"actor": "127.0.0.2", "to replay": "127.0.0.3", "replay": "127.0.0.4", "evaluator": "127.0.0.5"}
TARGET = "127.0.0.1"
PAIRS = {  # the role and the sockets behind each address
    "actor-replay": ("to replay", ("experience", "receipts")),
    "actor-learner": ("actor", ("parameters", "control")),
    "learner-replay": ("to replay", ("priorities", "batches")),
    "replay-learner": ("replay", ("control",)),
    "evaluator-learner": ("evaluator", ("parameters", "control")),
}
CHUNK_BYTES = 65_536
CHUNKS_ON_THE_WAY = 4_096


class Link:
    """All connections of one pair of programs, and their present fault."""

    def __init__(self) -> None:
        self.delay = 0.0  # delay in seconds, in each direction
        self.bytes_per_second = 0.0  # bytes per second of each connection and direction; 0: unlimited
        self.is_cut = False  # whether connections are reset, new ones included
        self.is_silent = False  # whether nothing passes, without an error
        self.bits_to_turn = 0  # one bit is flipped in each of this number of pieces
        self.connections: set[asyncio.StreamWriter] = set()

    def break_connections(self) -> None:
        """Resets all open connections."""
        for writer in list(self.connections):
            writer.transport.abort()


class Proxy:
    """The links between the programs of one run, in a thread of their own."""

    def __init__(self, transport: TransportConfig, num_shards: int, seed: int) -> None:
        """Raises UsageError if an address cannot be bound."""
        self._random = random.Random(seed)
        self._links = {pair: Link() for pair in PAIRS}
        self._loop = asyncio.new_event_loop()
        self._servers: list[asyncio.Server] = []
        self.ports = sorted(
            {
                transport.port(name, shard)
                for _, names in PAIRS.values()
                for name in names
                for shard in _shards(name, num_shards)
            }
        )
        self._thread = Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        try:
            self._call(self._open(transport, num_shards))
        except OSError as error:
            self.close()
            raise UsageError(
                f"cannot bind a port of a proxy: {error}; choose other ports with --transport.port-offset"
            ) from error

    def set(self, pair: str, **values: Any) -> None:
        """Sets the faults of a pair's connections; see Link."""

        async def change() -> None:
            link = self._links[pair]
            for name, value in values.items():
                setattr(link, name, value)
            if link.is_cut:
                link.break_connections()

        self._call(change())

    def heal(self) -> None:
        """Ends all faults."""
        for pair in PAIRS:
            self.set(pair, delay=0.0, bytes_per_second=0.0, is_cut=False, is_silent=False, bits_to_turn=0)

    def throw_garbage(self, payloads: Sequence[bytes]) -> None:
        """Sends each payload to each port of the run, past the links, on a connection of its own."""

        async def throw(port: int, payload: bytes) -> None:
            with suppress(OSError, asyncio.TimeoutError):
                _, writer = await asyncio.wait_for(asyncio.open_connection(TARGET, port), 1.0)
                writer.write(payload)
                await asyncio.wait_for(writer.drain(), 1.0)
                await asyncio.sleep(0.2)
                writer.close()

        async def throw_all() -> None:
            await asyncio.gather(*(throw(port, payload) for port in self.ports for payload in payloads))

        self._call(throw_all())

    def close(self) -> None:
        """Closes all connections."""

        async def end() -> None:
            for server in self._servers:
                server.close()
            for link in self._links.values():
                link.break_connections()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            await asyncio.sleep(0.05)

        self._call(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, work: Any) -> None:
        future: Future[None] = asyncio.run_coroutine_threadsafe(work, self._loop)
        future.result(30.0)

    async def _open(self, transport: TransportConfig, num_shards: int) -> None:
        for pair, (through, names) in PAIRS.items():
            for name in names:
                for shard in _shards(name, num_shards):
                    port = transport.port(name, shard)
                    serve = self._serve(self._links[pair], port)
                    self._servers.append(await asyncio.start_server(serve, ADDRESSES[through], port))

    def _serve(self, link: Link, port: int) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if link.is_cut:
                writer.transport.abort()
                return
            try:
                there = await asyncio.open_connection(TARGET, port)
            except OSError:
                writer.transport.abort()  # The connection is refused, as it would be by the program itself.
                return
            ends = {writer, there[1]}
            link.connections |= ends
            try:
                async with asyncio.TaskGroup() as tasks:
                    for source, sink in ((reader, there[1]), (there[0], writer)):
                        tasks.create_task(self._carry(link, source, sink))
            except* (OSError, EOFError):
                pass  # One side has closed the connection.
            finally:
                link.connections -= ends
                for end in ends:
                    end.transport.abort()

        return serve

    async def _carry(self, link: Link, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        """Carries bytes in one direction, each piece after `delay` seconds; raises an exception if a side closes."""
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(CHUNKS_ON_THE_WAY)

        async def deliver() -> None:
            while True:
                due, data = await pieces.get()
                if (early := due - loop.time()) > 0:
                    await asyncio.sleep(early)
                while link.is_silent:
                    await asyncio.sleep(0.05)
                if not data:
                    raise EOFError
                sink.write(self._turn_a_bit(link, data))
                await sink.drain()
                if link.bytes_per_second:
                    await asyncio.sleep(len(data) / link.bytes_per_second)

        async def take() -> None:
            while True:
                data = await source.read(CHUNK_BYTES)
                await pieces.put((loop.time() + link.delay, data))
                if not data:
                    return

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(deliver())
            tasks.create_task(take())

    def _turn_a_bit(self, link: Link, data: bytes) -> bytes:
        if not link.bits_to_turn:
            return data
        link.bits_to_turn -= 1
        changed = bytearray(data)
        changed[self._random.randrange(len(changed))] ^= 1 << self._random.randrange(8)
        return bytes(changed)


def _shards(name: str, num_shards: int) -> range:
    return range(1 if name in ("parameters", "control") else num_shards)
