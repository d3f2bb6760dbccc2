"""The bound sockets of the replay server's writer and of the learner's coordinator, for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import zmq

from apex.transport.header import Frame, WireError
from apex.transport.sockets import Context, Reader, bind, prepare
from apex.transport.timing import GOODBYE_SECONDS

PULL, ROUTER = zmq.PULL, zmq.ROUTER


class Peer(bytes):
    """Where to send an answer to. A peer of ours never names itself, so the name is good for one connection."""

    role = ""  # whose key it has; "" without keys


class AsyncReceiver(Reader):
    """A bound socket that is read in bursts: one wait, then all that has arrived, without a wait for each.

    One task reads it; any may answer. zmq.asyncio is not used: its wait for one message costs half as much again.
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
        """`may_pause`: see `reader_may_pause` of `prepare`."""
        super().__init__()
        self._more = False  # whether messages may be left to receive
        self._wake: Callable[[], None] = lambda: None  # who waits for a message looks again
        self._socket = context.socket(kind)
        prepare(
            self._socket,
            high_water_mark=high_water_mark,
            max_bytes=max_bytes,
            linger=GOODBYE_SECONDS,
            reader_may_pause=may_pause,
        )
        self._kind = kind
        bind(self._socket, endpoint, socket_name)
        self._descriptor = int(self._socket.FD)

    async def burst(self, timeout: float, limit: int = 64) -> list[list[Frame]]:
        """Up to `limit` messages; waits up to `timeout` seconds for the first. Those of a ROUTER begin with a Peer."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        messages = self._arrived(limit)
        if messages:
            await asyncio.sleep(0)  # Without a wait between them, bursts would leave no turn to the other tasks.
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
        """Waits for a message, or less long: the descriptor also tells of peers.

        To be called where none was left to receive: only then does the next one make the descriptor readable. It is
        watched during the wait alone: it stays readable until somebody receives, and the loop would spin.
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
        """Answers a peer of a ROUTER; one that is gone is not missed."""
        try:
            self._socket.send_multipart([bytes(identity), *frames], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self.refuse(WireError("unanswered", str(error)))
        self._wake()  # To send takes from the descriptor that a message came before.


def _peer(frames: Sequence[Any]) -> Peer:
    peer = Peer(frames[0].buffer)
    with suppress(zmq.ZMQError):  # It came without authentication.
        peer.role = frames[-1].get("User-Id")
    return peer
