"""What the trainer and the coordinator tell each other, and the pipe between their processes."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from apex.runtime.children import ChildDiedError
from apex.transport.messages.status import LearnerStatus
from apex.types import Progress


class TrainerStart(msgspec.Struct, frozen=True, tag=True):
    """The trainer has its network, and its checkpoint if there is one."""

    num_parameters: int
    updates: int
    progress: Progress


class TrainerReport(msgspec.Struct, frozen=True, tag=True):
    """Sent once a second."""

    status: LearnerStatus


class TrainerEnd(msgspec.Struct, frozen=True, tag=True):
    """The trainer has saved and ends."""

    reason: str


class News(msgspec.Struct, frozen=True):
    """What the coordinator knows and the trainer does not."""

    replay: list[dict[str, str]]  # endpoints by name of each shard; {}: its server has not said hello
    absent: str  # shards whose server is not there, in words
    end: str  # why the run should end; "" if it should not
    progress: Progress


FromTrainer = TrainerStart | TrainerReport | TrainerEnd
Sent = TypeVar("Sent")
Received = TypeVar("Received")


class TrainerLink(Protocol):
    """The trainer's end of its connection to the coordinator."""

    def send(self, message: FromTrainer) -> None:
        """Sends a message."""

    def receive(self) -> News | None:
        """The next message, without waiting; None if there is none."""


class PipeEnd(Generic[Sent, Received]):
    """One end of the pipe. Raises ChildDiedError where the process at the other end is gone."""

    def __init__(self, pipe: Connection, received: Any, other: str) -> None:
        """`received`: the type of what comes; `other`: the process at the other end, in words."""
        self._pipe = pipe
        self._decoder: msgspec.msgpack.Decoder[Received] = msgspec.msgpack.Decoder(received)
        self._other = other

    def send(self, message: Sent) -> None:
        """Sends a message."""
        try:
            self._pipe.send_bytes(msgspec.msgpack.encode(message))
        except BrokenPipeError as error:
            raise ChildDiedError(f"the {self._other} process is gone") from error

    def receive(self) -> Received | None:
        """The next message, without waiting; None if there is none."""
        try:
            return self._decoder.decode(self._pipe.recv_bytes()) if self._pipe.poll() else None
        except (EOFError, ConnectionResetError) as error:
            raise ChildDiedError(f"the {self._other} process is gone") from error


def trainer_end(pipe: Connection) -> PipeEnd[FromTrainer, News]:
    """The trainer's end of the pipe to the coordinator."""
    return PipeEnd(pipe, News, "coordinator")


def coordinator_end(pipe: Connection) -> PipeEnd[News, FromTrainer]:
    """The coordinator's end."""
    return PipeEnd(pipe, FromTrainer, "learner")
