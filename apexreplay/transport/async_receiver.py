"""Reads bound sockets with asyncio: those of the replay server's writer and of the learner's coordinator."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import zmq

from apexreplay.transport.sockets import Context, Reader, bind, prepare, refusable
from apexreplay.transport.timing import GOODBYE_SECONDS
from apexreplay.wire.header import Frame

PULL, ROUTER = zmq.PULL, zmq.ROUTER


class Peer(bytes):
    """The routing id of a connected peer, needed to reply to it. ZeroMQ assigns a new id to each connection."""

    role = ""  # role of the peer's key; "" without keys


class AsyncReceiver(Reader):
    """A bound socket that is read in bursts: one wait returns all messages that have arrived, up to a limit.

    Only one task may read; any task may reply. zmq.asyncio is not used, because it waits once per message, which takes
    50 % more time.
    """

    def __init__(
        self,
        context: Context,
        kind: int,
        endpoint: str,
        socket_name: str,
        *,
        high_water_mark: int,
        max_bytes: int,
        may_pause: bool = False,
    ) -> None:
        """Binds the socket. `max_bytes`: see `refusable`. `may_pause`: see `reader_may_pause` of `prepare`."""
        super().__init__()
        self._more = False  # whether unread messages may remain
        self._wake: Callable[[], None] = lambda: None  # makes a running `_wait` return
        self._socket = context.socket(kind)
        prepare(
            self._socket,
            high_water_mark=high_water_mark,
            max_bytes=refusable(max_bytes),
            linger=GOODBYE_SECONDS,
            reader_may_pause=may_pause,
        )
        self._kind = kind
        bind(self._socket, endpoint, socket_name)
        self._descriptor = int(self._socket.FD)

    async def burst(self, timeout: float, limit: int = 64) -> list[list[Frame]]:
        """Returns up to `limit` messages; [] after `timeout` seconds. Each message of a ROUTER begins with a Peer."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        messages = self._arrived(limit)
        if messages:
            await asyncio.sleep(0)  # Lets other tasks run between two bursts.
        while not messages and (remaining := deadline - loop.time()) > 0:
            await (asyncio.sleep(0) if self._more else self._wait(loop, remaining))
            messages = self._arrived(limit)
        return messages

    def _arrived(self, limit: int) -> list[list[Frame]]:
        messages: list[list[Frame]] = []
        self._more = True
        for _ in range(limit):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                self._more = False
                break
            message: list[Frame] = [frame.buffer for frame in frames]
            if self._kind == ROUTER:
                message[0] = _peer(frames)
            messages.append(message)
        return messages

    async def _wait(self, loop: asyncio.AbstractEventLoop, timeout: float) -> None:
        """Waits up to `timeout` seconds for a message. May return early: the descriptor also reports other events.

        Call this only when no message is left to receive: otherwise the next message does not make the descriptor
        readable. The descriptor stays readable until a message is received. The loop therefore watches it only during
        this wait; if the loop watched it permanently, the loop would spin.
        """
        woken = loop.create_future()

        def wake() -> None:
            if not woken.done():
                woken.set_result(None)

        self._wake = wake
        timer = loop.call_later(timeout, wake)
        loop.add_reader(self._descriptor, wake)
        try:
            await woken
        finally:
            loop.remove_reader(self._descriptor)
            timer.cancel()

    def reply(self, identity: Frame, frames: list[bytes]) -> None:
        """Sends a reply to a peer of a ROUTER. If the peer is gone, the reply is dropped and counted."""
        try:
            self._socket.send_multipart([bytes(identity), *frames], zmq.NOBLOCK)
        except zmq.ZMQError:
            self.refused["unanswered"] += 1
        self._wake()  # After a send, the descriptor may not report a message that has arrived. So `_wait` must return.


def _peer(frames: Sequence[Any]) -> Peer:
    peer = Peer(frames[0].buffer)
    with suppress(zmq.ZMQError):  # The connection has no authentication.
        peer.role = frames[-1].get("User-Id")
    return peer
