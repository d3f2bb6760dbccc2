"""The messages between trainer and coordinator, and the pipe between their processes."""

from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection

import msgspec

from apex.config import ReplayConfig
from apex.facts import EndReason
from apex.transport.messages.status import LearnerStatus
from apex.types import Progress, Tensor
from apexreplay.errors import ChildDiedError
from apexreplay.facts import Waiting


class TrainerStart(msgspec.Struct, frozen=True, tag=True):
    """The trainer has created its network, and has restored its checkpoint if there is one."""

    num_parameters: int
    updates: int
    progress: Progress
    parameters: list[Tensor] = []


class TrainerReport(msgspec.Struct, frozen=True, tag=True):
    """The trainer's status, sent once a second."""

    status: LearnerStatus


class TrainerEnd(msgspec.Struct, frozen=True, tag=True):
    """Training has ended, and the last checkpoint is written."""

    end: EndReason
    final: int | None = None  # version of the last parameters, if they are still to be evaluated


class News(msgspec.Struct, frozen=True):
    """News of the coordinator for the trainer."""

    replay: list[dict[str, str]]  # for each shard: endpoint name -> endpoint; {}: the shard's server has not joined
    waiting: Waiting  # what the trainer waits for when no batch comes
    end: EndReason | None  # why the run should end; None if it should continue
    progress: Progress


FromTrainer = TrainerStart | TrainerReport | TrainerEnd
encode = msgspec.msgpack.encode
decode_from_trainer = msgspec.msgpack.Decoder(FromTrainer).decode
_decode_news = msgspec.msgpack.Decoder(News).decode


class CoordinatorLink:
    """The trainer's end of the pipe to the coordinator. Raises ChildDiedError if the coordinator has died."""

    def __init__(
        self, pipe: Connection, replay: ReplayConfig, connect: Callable[[str, int], None], progress: Progress
    ) -> None:
        """`connect` takes the endpoint for a shard's priorities, and the shard; `progress`: progress at the start."""
        self.progress = progress
        self.waiting = Waiting("replay", replay.server_names(range(replay.num_shards)))
        self._pipe = pipe
        self._connect = connect
        self._priorities = [""] * replay.num_shards  # endpoints by shard

    def send(self, message: FromTrainer) -> None:
        """Sends a message to the coordinator."""
        try:
            self._pipe.send_bytes(encode(message))
        except BrokenPipeError as error:
            raise ChildDiedError("the coordinator process has ended") from error

    def receive(self) -> EndReason | None:
        """Receives the coordinator's news; returns why the run should end, or None if it should continue."""
        end = None
        while self._pipe.poll():
            try:
                news = _decode_news(self._pipe.recv_bytes())
            except (EOFError, ConnectionResetError) as error:
                raise ChildDiedError("the coordinator process has ended") from error
            for shard, endpoints in enumerate(news.replay):
                endpoint = endpoints.get("priorities", "")
                if endpoint and endpoint != self._priorities[shard]:
                    self._priorities[shard] = endpoint
                    self._connect(endpoint, shard)
            self.waiting, self.progress, end = news.waiting, news.progress, news.end
        return end

    def drain(self) -> None:
        """Receives news after the end of training, because a full pipe would block the coordinator until it is killed.

        Ignores the coordinator's death, because the last checkpoint is written all the same.
        """
        with suppress(ChildDiedError):
            self.receive()
