"""A program's standing with the learner: hello, welcome, then heartbeats until one of them goes.

The learner's control address is the only one that anybody must know. Everything else comes with the welcome.
"""

from __future__ import annotations

import logging
import os
import queue
import time
from collections.abc import Callable

from msgspec.structs import replace

from apex.runtime.lifecycle import EXPLAIN_SECONDS, POLL_SECONDS, Helper, Stop, Wait
from apex.runtime.watchdog import Silence, is_traced
from apex.transport.control_client import ControlClient
from apex.transport.curve.key_store import read_keys
from apex.transport.hello import Welcome, host_name
from apex.transport.messages import control
from apex.transport.messages.fields import printable
from apex.transport.messages.status import RoleStatus
from apex.transport.sockets import open_context
from apex.transport.timing import ABSENT_HEARTBEATS
from apex.types import Role

PATIENCE = 1.25  # times as long as whoever watches from outside, who can say more than the program itself

HEARTBEATS = {
    Role.ACTOR: control.ActorHeartbeat,
    Role.EVALUATOR: control.EvaluatorHeartbeat,
    Role.REPLAY: control.ReplayHeartbeat,
}

log = logging.getLogger("apex")


class Session:
    """Heartbeats of a program, in a thread of their own that owns the control socket.

    They also tell when the main thread makes no turns. Past `run.stuck_seconds` the program is ended then: one that was
    started by hand has nobody else to see it, and its heartbeats would hold its place for ever.
    `status` is called at every heartbeat; what it returns is what `apex status` shows of this program.
    """

    def __init__(
        self,
        welcome: Welcome,
        role: Role,
        stop: Stop,
        status: Callable[[], RoleStatus],
        endpoints: dict[str, str] | None = None,
        shard: int = 0,
    ) -> None:
        """`endpoints` and `shard` are a replay server's."""
        self.inserts_wanted = False  # samplers of a replay shard wait for inserts
        self.finished = False  # the learner has ended the run
        self.lost = False  # the learner does not know this program (any more)
        self._welcome = welcome
        self._role = role
        self._stop = stop
        self._status = status
        self._endpoints = endpoints or {}
        self._shard = shard
        self._outbox: queue.SimpleQueue[list[bytes]] = queue.SimpleQueue()
        self._closing = False
        self._silence = Silence()  # of the main thread
        self._ticks = stop.ticks
        self._helper = Helper(f"{role} heartbeats", self._run, stop)
        self._helper.start()

    def post(self, frames: list[bytes]) -> None:
        """Sends an encoded message over the control socket."""
        self._outbox.put(frames)

    def check(self) -> None:
        """Raises what ended the heartbeats, if anything did."""
        self._helper.check()

    def close(self) -> None:
        """Says goodbye: leases are free at once."""
        self._closing = True
        self._helper.join(2.0)

    def _run(self) -> None:
        welcome = self._welcome
        period = welcome.config.transport.heartbeat_seconds
        wait = Wait(self._role)
        heard, beat_at = time.monotonic(), 0.0
        with open_context(read_keys(welcome.config.transport.keys, self._role)) as context:
            client = ControlClient(context, welcome.route.endpoint)
            while not self._closing:
                if time.monotonic() >= beat_at:
                    beat_at = time.monotonic() + period
                    client.send(self._heartbeat(), welcome.run_id)
                self._flush(client)
                answer = client.receive(min(POLL_SECONDS, period))
                if answer is not None:
                    heard = time.monotonic()
                    wait.over()
                    if not self.finished:
                        self._hear(answer)
                        beat_at = 0.0 if self.finished else beat_at  # Its last figures are wanted before it goes.
                elif time.monotonic() - heard > ABSENT_HEARTBEATS * period:
                    wait.on(f"the learner at {welcome.route.endpoint}")
            self._flush(client)
            client.send(control.Goodbye(welcome.session), welcome.run_id)
            client.close()

    def _watch_main_thread(self) -> str:
        """What it waits for, in words; "" while it makes turns."""
        ticks, limit = self._stop.ticks, PATIENCE * self._welcome.config.run.stuck_seconds
        too_long = self._silence.look(ticks != self._ticks, limit)
        self._ticks = ticks
        if too_long and not is_traced(os.getpid()):
            log.critical("%s made no turn for %.0f s: it is stuck, and ends", self._role, self._silence.seconds)
            os.abort()  # The log says where each thread was.
        seconds = self._silence.seconds
        return f"for its own main thread ({seconds:.0f} s without a turn)" if seconds > EXPLAIN_SECONDS else ""

    def _heartbeat(self) -> control.AnyHeartbeat:
        status, welcome = self._status(), self._welcome
        make: Callable[..., control.AnyHeartbeat] = HEARTBEATS[self._role]
        return make(
            session=welcome.session,
            run_id=welcome.run_id,
            host=host_name(),
            pid=os.getpid(),
            shard=self._shard,
            streams=welcome.streams,
            endpoints=self._endpoints,
            status=replace(status, waiting=printable(self._watch_main_thread() or status.waiting)),
        )

    def _flush(self, client: ControlClient) -> None:
        while True:
            try:
                client.send_frames(self._outbox.get_nowait())
            except queue.Empty:
                return

    def _hear(self, answer: control.Answer) -> None:
        if isinstance(answer, control.StateAnswer):
            self.inserts_wanted = answer.inserts_wanted
            if answer.stop:
                self.finished = True
                self._stop.request()
        elif isinstance(answer, control.RefusedAnswer):
            self.lost = True
            self._stop.request()
