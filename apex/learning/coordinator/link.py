"""What the trainer and the coordinator tell each other, and the pipe between their processes."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection

import msgspec

from apex.config import ReplayConfig
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
encode = msgspec.msgpack.encode
decode_from_trainer = msgspec.msgpack.Decoder(FromTrainer).decode
_decode_news = msgspec.msgpack.Decoder(News).decode


class CoordinatorLink:
    """The trainer's end of the pipe to the coordinator. Raises ChildDiedError where that process is gone."""

    def __init__(
        self, pipe: Connection, replay: ReplayConfig, connect: Callable[[str, int], None], progress: Progress
    ) -> None:
        """`connect` is told where the priorities of a shard go; `progress`: how far the run is before it goes on."""
        self.progress = progress
        self.absent = ", ".join(map(replay.shard_name, range(replay.num_shards)))  # servers that are not there
        self._pipe = pipe
        self._connect = connect
        self._priorities = [""] * replay.num_shards  # endpoints by shard

    def send(self, message: FromTrainer) -> None:
        """Tells the coordinator."""
        try:
            self._pipe.send_bytes(encode(message))
        except BrokenPipeError as error:
            raise ChildDiedError("the coordinator process is gone") from error

    def hear(self) -> str:
        """Takes the news; returns why the run should end, if it should."""
        reason = ""
        while self._pipe.poll():
            try:
                news = _decode_news(self._pipe.recv_bytes())
            except (EOFError, ConnectionResetError) as error:
                raise ChildDiedError("the coordinator process is gone") from error
            for shard, endpoints in enumerate(news.replay):
                endpoint = endpoints.get("priorities", "")
                if endpoint and endpoint != self._priorities[shard]:
                    self._priorities[shard] = endpoint
                    self._connect(endpoint, shard)
            self.absent, self.progress, reason = news.absent, news.progress, news.end
        return reason
