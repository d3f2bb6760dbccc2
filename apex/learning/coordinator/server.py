"""The process of the coordinator: its control socket, and its pipe to the trainer.

It is a child process of the learner, so that programs get answers even during a long gradient step.
"""

import asyncio
import gc
import logging
import os
import time
from collections import deque
from multiprocessing.connection import Connection

from apex.learning.coordinator.coordinator import Coordinator
from apex.learning.coordinator.link import News, decode_from_trainer, encode
from apex.runs.folder import RunFolder
from apex.runtime.gpu import GpuMeter
from apex.runtime.resources import HostMeter, ResourceMeter, find_launcher
from apex.transport.curve.key_store import KEYS_REMEDY, read_keys
from apex.transport.messages.control import (
    Answer,
    Goodbye,
    Heartbeat,
    Hello,
    RefusedAnswer,
    StatusRequest,
    decode_request,
)
from apex.transport.messages.status import Resources
from apex.transport.run_codec import RunCodec
from apex.transport.timing import END_NOTICE_SECONDS, REPORT_SECONDS
from apex.types import Role
from apexreplay.facts import Waiting
from apexreplay.process.lifecycle import Stop, Wait
from apexreplay.transport.async_receiver import ROUTER, AsyncReceiver, Peer
from apexreplay.transport.sockets import Context, InsecureBindWarning, open_context
from apexreplay.wire.header import WIRE_VERSION, Frame, MessageKind, WireError, peek_kind
from apexreplay.wire.json_codec import MAX_JSON_BYTES, encode_control

MAX_OBSERVERS = 64  # maximum observers that receive the last status without a request

log = logging.getLogger("apex")


def run_coordinator(
    stop: Stop, folder: RunFolder, epoch: int, pipe: Connection, trainer_end: Connection, has_gpu: bool = False
) -> None:
    """Runs the coordinator in the child process, until training has ended or the trainer has closed its pipe."""
    trainer_end.close()  # The child's copy would keep the pipe open after the trainer's death.
    gc.freeze()  # Collections would examine all objects of the trainer's modules.
    coordinator = Coordinator(folder, epoch=epoch)
    try:
        asyncio.run(CoordinatorServer(coordinator, folder, pipe, stop, LearnerMeter(has_gpu)).run())
    finally:
        coordinator.close()


class LearnerMeter:
    """Measures the resources of the learner, the parent of this process, and the use of its host."""

    def __init__(self, has_gpu: bool) -> None:
        self._meter = ResourceMeter(os.getppid())
        self._gpu = GpuMeter() if has_gpu else None
        self.host = HostMeter(find_launcher(os.getppid()))  # It also runs TensorBoard, which sends no heartbeats.

    def measure(self) -> Resources:
        """Returns the joint usage of trainer, coordinator and loaders, and of the trainer's GPU."""
        gpu_share, gpu_memory_bytes = self._gpu.measure() if self._gpu is not None else (None, None)
        usage = self._meter.measure()._asdict()
        return Resources(**usage, gpu_share=gpu_share, gpu_memory_bytes=gpu_memory_bytes)


class CoordinatorServer:
    """Moves messages between programs, the trainer and the coordinator."""

    def __init__(
        self, coordinator: Coordinator, folder: RunFolder, trainer: Connection, stop: Stop, meter: LearnerMeter
    ) -> None:
        self._coordinator = coordinator
        self._state = coordinator.state
        self._run_id = folder.run_id
        self._transport = folder.config_with_keys.transport
        self._codec = RunCodec(folder.run_id, folder.schema)
        self._trainer = trainer
        self._stop = stop
        self._meter = meter
        self._sent: News | None = None  # the news that the trainer has
        self._ways: dict[int, bytes] = {}  # session -> routing id for messages without a request
        # Routing ids of programs that requested the status, the newest last.
        self._observers: deque[bytes] = deque(maxlen=MAX_OBSERVERS)

    async def run(self) -> None:
        """Serves until the run has ended; then, for a short time, informs all programs that the run is over."""
        with open_context(read_keys(self._transport.keys, Role.LEARNER)) as context:
            wait = Wait("coordinator")
            while not self._coordinator.num_parameters:  # The maximum message size depends on it.
                wait.on(Waiting("trainer_start"))
                await asyncio.sleep(0.01)
                if self._stop.poll() or not self._receive_from_trainer():
                    return
            max_bytes, endpoint = 2 * MAX_JSON_BYTES + 4 * self._coordinator.num_parameters, self._transport.endpoint
            self._control = AsyncReceiver(
                context, ROUTER, endpoint("control"), "control", high_water_mark=1_000, max_bytes=max_bytes
            )
            task = asyncio.create_task(self._serve_control())
            try:
                await self._watch(task, context)
            finally:
                task.cancel()
                await asyncio.wait([task])  # The task waits on the socket, which is closed next.

    async def _watch(self, task: asyncio.Task[None], context: Context) -> None:
        warning = InsecureBindWarning(self._transport.insecure_address, KEYS_REMEDY)
        row_at, end_notice_until = time.monotonic(), 0.0
        while not self._stop.poll():
            await asyncio.sleep(0.05)
            if task.done():
                task.result()  # Raises the error of the task.
            context.check()
            warning.check()
            self._state.refused_connections = context.refused_connections
            if not self._receive_from_trainer():
                return
            if time.monotonic() >= row_at:
                row_at += REPORT_SECONDS
                self._tick()
            if not self._state.over:  # After the end the trainer does not read the pipe.
                self._inform_trainer()
            if self._state.finished:
                if not end_notice_until:
                    self._coordinator.write_rows()  # The curves end with the last update.
                    self._inform_members()
                end_notice_until = end_notice_until or time.monotonic() + END_NOTICE_SECONDS
                if not self._state.members.present or time.monotonic() >= end_notice_until:
                    self._inform_observers()
                    return

    def _tick(self) -> None:
        self._state.refusals["control"] = dict(self._control.refused + self._coordinator.refused)
        self._state.learner_resources, self._state.host_use = self._meter.measure(), self._meter.host.measure()
        self._coordinator.write_rows()
        self._coordinator.tick()
        self._ways = {session: way for session, way in self._ways.items() if session in self._state.members}

    def _inform_members(self) -> None:
        """Informs all programs that the run is over, without waiting for their next heartbeat."""
        end = encode_control(self._coordinator.end_answer, self._run_id)
        for session in self._state.members:
            if session in self._ways:
                self._control.reply(self._ways[session], end)

    def _inform_observers(self) -> None:
        """Sends the last status to all observers, because no later request is answered."""
        status = encode_control(self._coordinator.status(), self._run_id)
        for observer in self._observers:
            self._control.reply(observer, status)

    # --- the trainer ------------------------------------------------------------------------------------------------

    def _receive_from_trainer(self) -> bool:
        """Receives the trainer's reports; returns False if the trainer has closed the pipe."""
        try:
            while self._trainer.poll():
                self._coordinator.receive(decode_from_trainer(self._trainer.recv_bytes()))
        except (EOFError, ConnectionResetError):
            return False
        return True

    def _inform_trainer(self) -> None:
        news = self._coordinator.decide()
        if news != self._sent:
            self._sent = news
            try:
                self._trainer.send_bytes(encode(news))
            except BrokenPipeError:
                log.warning("the trainer has ended")

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
        """Returns the answer to a message; raises WireError for an invalid message."""
        role = identity.role if isinstance(identity, Peer) else ""
        if peek_kind(frames) == MessageKind.EVALUATION:
            _require_role(role, Role.EVALUATOR)
            self._coordinator.keep_evaluation(*self._codec.decode_evaluation(frames, self._coordinator.num_parameters))
            return None
        request = decode_request(frames, self._run_id)
        if isinstance(request, RefusedAnswer):
            self._control.refused["run" if frames[0][4] == WIRE_VERSION else "version"] += 1
            return request
        if isinstance(request, Hello | Heartbeat):
            _require_role(role, request.role)
        elif isinstance(request, Goodbye) and (member := self._state.members.find(request.session)) is not None:
            _require_role(role, member.role)
        answer = self._coordinator.answer(request)
        if isinstance(request, Heartbeat):
            self._ways[request.session] = bytes(identity)
        elif isinstance(request, StatusRequest) and bytes(identity) not in self._observers:
            self._observers.append(bytes(identity))
        return answer


def _require_role(role: str, claimed: Role) -> None:
    """Raises WireError if a program claims another role than its key allows; `role` is "" without keys."""
    if role and role != claimed:
        raise WireError("role", f"a program with a key of role {role} claims the role {claimed}")
