"""Control messages: what programs ask the learner's coordinator, and what it answers. See docs/protocol.md."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from apex.transport.header import WIRE_VERSION
from apex.transport.messages.fields import I32, MAX_STREAMS, U31, U63, U64, Endpoints, Record, Text
from apex.transport.messages.run_status import RunStatus
from apex.transport.messages.status import ActorStatus, ReplayStatus, RoleStatus
from apex.types import Role, Schema, Stream

JOINING = (Role.REPLAY, Role.ACTOR, Role.EVALUATOR)  # The learner is there already, and observers only ask.


class Hello(Record, frozen=True, tag="hello", kw_only=True):
    """A program wants to join the run."""

    wire: Annotated[int, Meta(ge=WIRE_VERSION, le=WIRE_VERSION)]  # the sender's
    session: U63  # drawn at random: who asks
    role: Role
    host: Text
    pid: U31
    shard: I32  # a replay server's; else 0
    num_streams: Annotated[int, Meta(ge=0, le=MAX_STREAMS)]  # actor ids wanted

    def __post_init__(self) -> None:
        if self.role not in JOINING:
            raise ValueError(f"a program of the role {self.role} does not join a run")


class Heartbeat(Record, frozen=True, tag_field="role", kw_only=True):
    """A program lives. `role` tells the kinds of heartbeat apart."""

    type: Literal["heartbeat"] = "heartbeat"
    session: U63
    run_id: U64
    host: Text
    pid: U31
    shard: I32  # a replay server's; else 0
    streams: Annotated[list[Stream], Meta(max_length=MAX_STREAMS)]  # leased, as far as it knows
    endpoints: Endpoints  # a replay server's sockets

    @property
    def role(self) -> Role:
        """The role of the program."""
        return Role(str(self.__struct_config__.tag))


class ActorHeartbeat(Heartbeat, frozen=True, tag=Role.ACTOR.value, kw_only=True):
    """Heartbeat of an actor host."""

    status: ActorStatus


class EvaluatorHeartbeat(Heartbeat, frozen=True, tag=Role.EVALUATOR.value, kw_only=True):
    """Heartbeat of an evaluator."""

    status: RoleStatus


class ReplayHeartbeat(Heartbeat, frozen=True, tag=Role.REPLAY.value, kw_only=True):
    """Heartbeat of a replay server. What it counts may end the run, so no other role can say it."""

    status: ReplayStatus


class Goodbye(Record, frozen=True, tag="goodbye"):
    """A program leaves; what it has leased is free."""

    session: U63


class StatusRequest(Record, frozen=True, tag="status"):
    """Somebody asks what the run is doing; the answer is a RunStatus."""


AnyHeartbeat = ActorHeartbeat | EvaluatorHeartbeat | ReplayHeartbeat
Request = Hello | AnyHeartbeat | Goodbye | StatusRequest
REQUESTS: dict[str, Any] = {"hello": Hello, "heartbeat": AnyHeartbeat, "goodbye": Goodbye, "status": StatusRequest}


class WelcomeAnswer(Record, frozen=True, tag="welcome", kw_only=True):
    """All that a newcomer needs to know of the run."""

    run_id: U64
    config: dict[str, Any]  # as `apex.config.to_dict` has it
    schema: Schema
    num_parameters: int
    num_actors: int
    memory: str  # of the learner's host, see `location.memory_id`
    replay: list[dict[str, str]]  # endpoints by name of each shard; empty before all of them have said hello
    absent: str  # the shards that are not there, in words
    streams: list[Stream]  # leased to the newcomer


class RefusedAnswer(Record, frozen=True, tag="refused"):
    """The run does not want this program."""

    reason: str


class WaitAnswer(Record, frozen=True, tag="wait", kw_only=True):
    """Another replay server may hold the shard: ask again. One that is dead can be said goodbye for."""

    holder: U63  # its session
    host: str
    run_id: U64


class StateAnswer(Record, frozen=True, tag="state"):
    """What a heartbeat is answered with; also sent to everybody when the run is over."""

    stop: bool  # The run is over.
    inserts_wanted: bool = False  # to replay: samples of another shard wait for inserts, so do not hold them


Answer = WelcomeAnswer | RefusedAnswer | WaitAnswer | StateAnswer | RunStatus
