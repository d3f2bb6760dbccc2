"""A program's session with the learner: after the welcome, the program sends heartbeats until it or the run ends.

Users configure only the learner's control address. The welcome contains everything else that a program needs.
"""

import logging
import os
import queue
import time
from collections.abc import Callable

from msgspec.structs import replace

from apex.runtime.resources import ResourceMeter
from apex.transport.curve.key_store import read_keys
from apex.transport.hello import Welcome, host_name
from apex.transport.messages import control
from apex.transport.messages.results import Scores
from apex.transport.messages.status import Resources, RoleStatus
from apex.transport.timing import ABSENT_HEARTBEATS
from apex.types import Role
from apexreplay.facts import Waiting
from apexreplay.process.lifecycle import EXPLAIN_SECONDS, POLL_SECONDS, Helper, Stop, Wait
from apexreplay.process.watchdog import StuckDetector
from apexreplay.transport.control_socket import ControlSocket
from apexreplay.transport.sockets import open_context
from apexreplay.wire.status import ReplayStatus

STUCK_FACTOR = 1.25  # factor on `run.stuck_seconds`: above 1, so that a supervisor, which can report more, acts first

HEARTBEATS = {
    Role.ACTOR: control.ActorHeartbeat,
    Role.EVALUATOR: control.EvaluatorHeartbeat,
    Role.REPLAY: control.ReplayHeartbeat,
}

log = logging.getLogger("apex")


class Session:
    """Sends the heartbeats of a program, in a separate thread that owns the control socket.

    The thread also watches the main loop. If the loop makes no progress for 1.25 x `run.stuck_seconds`, the thread
    aborts the program. Otherwise, the heartbeats of a stuck program without a supervisor would hold its streams or its
    shard permanently. For each heartbeat, the thread calls `status` and sends the result, which `apex status` shows.

    An actor host also sends scores. While the learner does not answer, they stay with their source, `take_scores`.
    """

    def __init__(
        self,
        welcome: Welcome,
        role: Role,
        stop: Stop,
        status: Callable[[], RoleStatus | ReplayStatus],
        endpoints: dict[str, str] | None = None,
        shard: int = 0,
        *,
        take_scores: Callable[[], Scores | None] = lambda: None,
    ) -> None:
        """Starts the thread.

        `endpoints` and `shard`: only for a replay server. `take_scores`: only for an actor host; returns the scores to
        send, or None.
        """
        self.inserts_wanted = False  # whether samplers of another shard wait for inserts
        self.finished = False  # whether the learner has ended the run
        self.interrupted = False  # whether the learner has ended the run before a limit, so that it may be resumed
        self.final: int | None = None  # version of the last parameters; None before training ends
        self.lost = False  # whether the learner refused the heartbeats
        self.moved = False  # whether a replay server's address differs from the one in the welcome
        self._welcome = welcome
        self._role = role
        self._stop = stop
        self._status = status
        self._endpoints = endpoints or {}
        self._shard = shard
        self._take_scores = take_scores
        self._outbox: queue.SimpleQueue[list[bytes]] = queue.SimpleQueue()
        self._closing = False
        self._pace = 1.0  # factor on the time between two heartbeats
        self._answered_at = time.monotonic()
        self._meter = ResourceMeter()
        self._detector = StuckDetector(lambda: stop.ticks)  # watches the main thread's loop
        log.info("joined the run %s of %s, learner at %s", welcome.run, welcome.owner, welcome.route.endpoint)
        self._helper = Helper(f"{role} heartbeats", self._run, stop)
        self._helper.start()

    def post(self, frames: list[bytes]) -> None:
        """Queues an encoded message; the thread sends it over the control socket."""
        self._outbox.put(frames)

    @property
    def answers(self) -> bool:
        """Whether the learner has answered one of the last two heartbeats."""
        period = self._pace * self._welcome.config.transport.heartbeat_seconds
        return time.monotonic() - self._answered_at < 2.5 * period

    def check(self) -> None:
        """Raises the exception that ended the thread, if any."""
        self._helper.check()

    def close(self) -> None:
        """Sends Goodbye, which releases the leases at once, and ends the thread."""
        self._closing = True
        self._helper.join(2.0)

    def _run(self) -> None:
        welcome = self._welcome
        period = welcome.config.transport.heartbeat_seconds
        wait = Wait(self._role)
        beat_at, answered = 0.0, True
        with open_context(read_keys(welcome.config.transport.keys, self._role)) as context:
            client = ControlSocket(context, welcome.route.endpoint, control.decode_answer)
            while not self._closing:
                if time.monotonic() >= beat_at:
                    beat_at = time.monotonic() + period * self._pace
                    client.send(self._heartbeat(self._take_scores() if answered else None), welcome.run_id)
                    answered = False
                self._flush(client)
                answer = client.receive(min(POLL_SECONDS, period))
                if answer is not None:
                    self._answered_at, answered = time.monotonic(), True
                    wait.over()
                    if not self.finished:
                        self._take(answer)
                        # The run is over: send the last figures at once. A lower pace has shortened the lease.
                        beat_at = 0.0 if self.finished else min(beat_at, time.monotonic() + period * self._pace)
                elif time.monotonic() - self._answered_at > ABSENT_HEARTBEATS * period * self._pace:
                    wait.on(Waiting("learner", welcome.route.endpoint))
            self._flush(client)
            while (scores := self._take_scores()) is not None:
                client.send(self._heartbeat(scores), welcome.run_id)
            client.send(control.Goodbye(welcome.session), welcome.run_id)

    def _watch_main_thread(self) -> Waiting | None:
        """Returns a wait for the status if the main loop makes no progress, else None. Aborts a stuck program."""
        is_stuck = self._detector.check(STUCK_FACTOR * self._welcome.config.run.stuck_seconds)
        seconds = self._detector.silence
        if is_stuck:
            log.critical("%s: aborting, because the main thread made no progress for %.0f s", self._role, seconds)
            os.abort()  # faulthandler logs the stack of each thread.
        if seconds <= EXPLAIN_SECONDS:
            return None
        return Waiting("own_main_thread", who=self._role, seconds=seconds)

    def _heartbeat(self, scores: Scores | None) -> control.AnyHeartbeat:
        status, welcome = self._status(), self._welcome
        make: Callable[..., control.AnyHeartbeat] = HEARTBEATS[self._role]
        return make(
            session=welcome.session,
            run_id=welcome.run_id,
            host=host_name(),
            pid=os.getpid(),
            shard=self._shard,
            streams=welcome.streams,
            fence=welcome.fence,
            endpoints=self._endpoints,
            resources=Resources(**self._meter.measure()._asdict()),
            status=replace(status, waiting=self._watch_main_thread() or status.waiting),
            **({} if scores is None else {"scores": scores}),
        )

    def _flush(self, client: ControlSocket[control.Answer]) -> None:
        while True:
            try:
                client.send_frames(self._outbox.get_nowait())
            except queue.Empty:
                return

    def _take(self, answer: control.Answer) -> None:
        if isinstance(answer, control.StateAnswer):
            self.inserts_wanted, self.final, self._pace = answer.inserts_wanted, answer.final, answer.pace
            self.moved = answer.generation not in (0, self._welcome.generation)
            self.finished, self.interrupted = answer.stop, answer.interrupted
            if answer.stop or self.moved:
                self._stop.request()
        elif isinstance(answer, control.RefusedAnswer):
            self.lost = True
            self._stop.request()
