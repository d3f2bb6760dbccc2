"""The coordinator's process: its control and metrics sockets, and its pipe to the trainer.

It is a child of the learner, so that a long gradient step keeps nobody waiting.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from multiprocessing.connection import Connection

from apex.learning.coordinator.coordinator import END, Coordinator
from apex.learning.coordinator.link import News, decode_from_trainer, encode
from apex.runs.folder import RunFolder
from apex.runtime.lifecycle import Stop, Wait
from apex.transport.async_receiver import PULL, ROUTER, AsyncReceiver, Peer
from apex.transport.codec import Codec
from apex.transport.control_codec import decode_request, encode_control
from apex.transport.curve.key_store import read_keys
from apex.transport.header import Frame, MessageKind, WireError, peek_kind
from apex.transport.json_codec import MAX_JSON_BYTES
from apex.transport.messages.control import Answer, Heartbeat, Hello, RefusedAnswer, StatusRequest
from apex.transport.sockets import Context, InsecureBindWarning, open_context
from apex.transport.timing import END_NOTICE_SECONDS, REPORT_SECONDS
from apex.types import Role

MAX_OBSERVERS = 64  # who are sent the last status without asking

log = logging.getLogger("apex")


def run_coordinator(stop: Stop, folder: RunFolder, epoch: int, pipe: Connection, trainer_end: Connection) -> None:
    """The child's main function: returns when the trainer has finished or has closed its end of the pipe."""
    trainer_end.close()  # The child's copy of it, which would keep the pipe open for ever.
    coordinator = Coordinator(folder, epoch=epoch)
    try:
        asyncio.run(CoordinatorServer(coordinator, folder, pipe, stop).run())
    finally:
        coordinator.close()


class CoordinatorServer:
    """Moves messages between programs, the trainer and the coordinator."""

    def __init__(self, coordinator: Coordinator, folder: RunFolder, trainer: Connection, stop: Stop) -> None:
        self._coordinator = coordinator
        self._state = coordinator.state
        self._run_id = folder.run_id
        self._transport = folder.config.transport
        self._codec = Codec(folder.run_id, folder.schema)
        self._trainer = trainer
        self._stop = stop
        self._told: News | None = None
        self._ways: dict[int, bytes] = {}  # by session: to whom a state that nobody asked for is sent
        self._observers: deque[bytes] = deque(maxlen=MAX_OBSERVERS)  # who has asked for the status, the latest last

    async def run(self) -> None:
        """Serves until the trainer is done, then tells everybody for a moment."""
        with open_context(read_keys(self._transport.keys, Role.LEARNER)) as context:
            wait = Wait("coordinator")
            while not self._coordinator.num_parameters:  # The most that a message may take depends on it.
                wait.on("the trainer to make its network and to read its checkpoint")
                await asyncio.sleep(0.01)
                if self._stop.requested or not self._hear_trainer():
                    return
            max_bytes = 2 * MAX_JSON_BYTES + 4 * self._coordinator.num_parameters
            self._control = self._bind(context, ROUTER, "control", high_water_mark=1_000, max_bytes=max_bytes)
            self._figures = self._bind(context, PULL, "metrics", high_water_mark=10_000, max_bytes=MAX_JSON_BYTES)
            tasks = [asyncio.create_task(work) for work in (self._serve_control(), self._serve_metrics())]
            try:
                await self._watch(tasks, context)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)  # They wait on sockets that close now.

    def _bind(
        self, context: Context, kind: int, socket_name: str, *, high_water_mark: int, max_bytes: int
    ) -> AsyncReceiver:
        endpoint = self._transport.endpoint(socket_name)
        return AsyncReceiver(context, kind, endpoint, socket_name, high_water_mark=high_water_mark, max_bytes=max_bytes)

    async def _watch(self, tasks: list[asyncio.Task[None]], context: Context) -> None:
        warning = InsecureBindWarning(self._transport)
        row_at, end_notice_until = time.monotonic(), 0.0
        while not self._stop.requested:
            await asyncio.sleep(0.05)
            for task in tasks:
                if task.done():
                    task.result()  # Raises what ended it.
            context.check()
            warning.check()
            self._state.refused_connections = context.refused_connections
            if not self._hear_trainer():
                return
            if time.monotonic() >= row_at:
                row_at += REPORT_SECONDS
                self._tick()
            self._tell_trainer()
            if self._state.finished:
                if not end_notice_until:
                    self._coordinator.write_rows()  # The curves end with the last update.
                    self._tell_members()
                end_notice_until = end_notice_until or time.monotonic() + END_NOTICE_SECONDS
                if not self._state.members or time.monotonic() >= end_notice_until:
                    self._tell_observers()
                    return

    def _tick(self) -> None:
        for name, receiver in (("control", self._control), ("metrics", self._figures)):
            self._state.refusals[name] = dict(receiver.refused)
        self._coordinator.write_rows()
        self._coordinator.tick()
        self._ways = {session: way for session, way in self._ways.items() if session in self._state.members}

    def _tell_members(self) -> None:
        """Says that the run is over: to wait until each asks would take up to a heartbeat."""
        for session in self._state.members:
            if session in self._ways:
                self._control.reply(self._ways[session], encode_control(END, self._run_id))

    def _tell_observers(self) -> None:
        """Says how it ended: the next time that one asks, nobody is here any more."""
        status = encode_control(self._coordinator.status(), self._run_id)
        for observer in self._observers:
            self._control.reply(observer, status)

    # --- the trainer ------------------------------------------------------------------------------------------------

    def _hear_trainer(self) -> bool:
        """Takes the trainer's reports; False when it is gone."""
        try:
            while self._trainer.poll():
                self._coordinator.hear_trainer(decode_from_trainer(self._trainer.recv_bytes()))
        except (EOFError, ConnectionResetError):
            return False
        return True

    def _tell_trainer(self) -> None:
        news = self._coordinator.decide()
        if news != self._told:
            self._told = news
            try:
                self._trainer.send_bytes(encode(news))
            except BrokenPipeError:
                log.warning("the trainer is gone")

    # --- programs ---------------------------------------------------------------------------------------------------

    async def _serve_control(self) -> None:
        while True:
            for identity, *frames in await self._control.burst(1.0):
                try:
                    answer = self._take(identity, frames)
                except WireError as error:
                    self._control.refuse(error)
                    continue
                if answer is not None:
                    self._control.reply(identity, encode_control(answer, self._run_id))

    def _take(self, identity: Frame, frames: list[Frame]) -> Answer | None:
        """Has a message answered; raises WireError for one that cannot be."""
        role = identity.role if isinstance(identity, Peer) else ""
        if peek_kind(frames) == MessageKind.EVALUATION:
            _require_role(role, Role.EVALUATOR)
            self._coordinator.keep_evaluation(*self._codec.decode_evaluation(frames, self._coordinator.num_parameters))
            return None
        request = decode_request(frames, self._run_id)
        if isinstance(request, RefusedAnswer):
            return request
        if isinstance(request, Hello | Heartbeat):
            _require_role(role, request.role)
        answer = self._coordinator.answer(request)
        if isinstance(request, Heartbeat):
            self._ways[request.session] = bytes(identity)
        elif isinstance(request, StatusRequest) and bytes(identity) not in self._observers:
            self._observers.append(bytes(identity))
        return answer

    async def _serve_metrics(self) -> None:
        while True:
            for frames in await self._figures.burst(1.0):
                try:
                    self._coordinator.keep_figures(self._codec.decode_metrics(frames))
                except WireError as error:
                    self._figures.refuse(error)


def _require_role(role: str, claimed: Role) -> None:
    """Raises WireError if a program claims another role than its key has; `role` is "" without keys."""
    if role and role != claimed:
        raise WireError("role", f"a key of the role {role} speaks as {claimed}")
