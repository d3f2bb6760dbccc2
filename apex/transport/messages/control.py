"""Control messages: requests to the learner's coordinator and its answers. See docs/protocol.md."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Self
from zlib import crc32

from msgspec import Meta

from apex.schema import Schema
from apex.transport.messages.fields import I32, MAX_STREAMS, U31, U32, U63, Endpoints
from apex.transport.messages.results import Scores
from apex.transport.messages.run_status import RunStatus
from apex.transport.messages.status import ActorStatus, EvaluatorStatus, Resources
from apex.types import Role, Tensor
from apexreplay.facts import HexInt, Record, Text
from apexreplay.types import Stream
from apexreplay.wire.header import WIRE_VERSION, Frame
from apexreplay.wire.json_codec import decode_json, open_control
from apexreplay.wire.status import ReplayStatus

JOINING = (Role.REPLAY, Role.ACTOR, Role.EVALUATOR)  # The learner never joins, and observers only request the status.


def _require_actor(role: Role, num_streams: int) -> None:
    """Raises ValueError if another role than an actor wants streams: their leases would keep actors away."""
    if num_streams and role != Role.ACTOR:
        raise ValueError(f"only an actor has streams, but the role {role} has {num_streams}")


class Lease(Stream):
    """A stream in a message."""

    incarnation: HexInt

    @classmethod
    def of(cls, stream: Stream) -> Self:
        """Returns the lease of `stream`."""
        return cls(stream.actor_id, HexInt(stream.incarnation))


class Hello(Record, frozen=True, tag="hello", kw_only=True):
    """Request of a program to join the run."""

    wire: Annotated[int, Meta(ge=WIRE_VERSION, le=WIRE_VERSION)]  # wire version of the sender
    session: U63  # random number that identifies the program
    role: Role
    host: Text
    pid: U31
    shard: I32  # shard of a replay server; 0 for other roles
    num_streams: Annotated[int, Meta(ge=0, le=MAX_STREAMS)]  # number of requested actor ids

    def __post_init__(self) -> None:
        if self.role not in JOINING:
            raise ValueError(f"role must be one of {', '.join(JOINING)}, got {self.role}")
        _require_actor(self.role, self.num_streams)


class Heartbeat(Record, frozen=True, kw_only=True):
    """Periodic message of a running program. Each role has its own kind."""

    role: ClassVar[Role]
    session: U63
    run_id: HexInt
    host: Text
    pid: U31
    shard: I32  # shard of a replay server; 0 for other roles
    streams: Annotated[list[Lease], Meta(max_length=MAX_STREAMS)]  # streams that the program claims to hold
    endpoints: Endpoints  # sockets of a replay server, by name
    resources: Resources | None = None  # None: not measured
    fence: U63 = 0  # of a replay server: number from its welcome; 0 for other roles

    def __post_init__(self) -> None:
        _require_actor(self.role, len(self.streams))


class ActorHeartbeat(Heartbeat, frozen=True, tag="actor_heartbeat", kw_only=True):
    """Heartbeat of an actor host."""

    role: ClassVar[Role] = Role.ACTOR
    status: ActorStatus
    scores: Scores = Scores([])


class EvaluatorHeartbeat(Heartbeat, frozen=True, tag="evaluator_heartbeat", kw_only=True):
    """Heartbeat of an evaluator."""

    role: ClassVar[Role] = Role.EVALUATOR
    status: EvaluatorStatus


class ReplayHeartbeat(Heartbeat, frozen=True, tag="replay_heartbeat", kw_only=True):
    """Heartbeat of a replay server. No other role can send it, because its counters can end the run."""

    role: ClassVar[Role] = Role.REPLAY
    status: ReplayStatus


class Goodbye(Record, frozen=True, tag="goodbye"):
    """A program leaves the run and releases its streams or shard."""

    session: U63


class StatusRequest(Record, frozen=True, tag="status"):
    """Request for the status of the run; the answer is a RunStatus."""


AnyHeartbeat = ActorHeartbeat | EvaluatorHeartbeat | ReplayHeartbeat
Request = Hello | AnyHeartbeat | Goodbye | StatusRequest


class RunFacts(Record, frozen=True, kw_only=True):
    """What the learner's welcome tells a new program about the run, except the configuration."""

    run_id: HexInt
    schema: Schema
    num_parameters: int
    run: Text = ""  # name of the run folder
    owner: Text = ""  # user and host of the learner, which the new program logs
    memory: str  # identifies the learner's host, see `location.memory_id`
    replay: list[dict[str, str]]  # endpoints by name for each shard; empty until all shards have joined
    generation: U32 = 0  # number of `replay`, see `StateAnswer`
    streams: list[Lease]  # streams leased to the new program
    shards: U32 = 0  # replay servers that the joined actors need for the cores that they use
    fence: U63 = 0  # to a replay server: its fencing number; its heartbeats are refused after a higher one was given


class WelcomeAnswer(RunFacts, frozen=True, tag="welcome", kw_only=True):
    """Answer to a Hello: everything that a new program needs to know about the run."""

    config: dict[str, Any]  # in the form of `apex.config.to_dict`
    table: dict[str, Any]  # `Table.to_dict` of the run's table
    parameters: list[Tensor]  # in the order of their values
    num_actors: int
    absent: str  # names of the replay servers that have not joined


class RefusedAnswer(Record, frozen=True, tag="refused"):
    """The run refuses this program or its request."""

    reason: str


class WaitAnswer(Record, frozen=True, tag="wait", kw_only=True):
    """Another replay server may hold the shard: send Hello again. If that server is dead, send Goodbye for it."""

    holder: U63  # session of that server
    host: str
    run_id: HexInt


class StateAnswer(Record, frozen=True, tag="state"):
    """Answer to a heartbeat; also sent to all programs when the run is over."""

    stop: bool  # True: the run is over
    interrupted: bool = False  # with `stop`: the run has not reached a limit, and may be resumed
    # For replay servers: True if samplers of another shard wait for inserts. Then inserts must not wait.
    inserts_wanted: bool = False
    final: U32 | None = None  # for the evaluator after training: version of the final parameters, to evaluate at once
    generation: U32 = 0  # for actors: result of `generation_of`; 0: some replay endpoints are unknown
    pace: Annotated[float, Meta(ge=1, le=64)] = 1.0  # for actors: factor on `transport.heartbeat_seconds`


def generation_of(replay: list[dict[str, str]]) -> int:
    """Returns a number that changes when the endpoints of any replay server change; 0 without servers."""
    return max(1, crc32(repr([sorted(shard.items()) for shard in replay]).encode())) if replay else 0


Answer = WelcomeAnswer | RefusedAnswer | WaitAnswer | StateAnswer | RunStatus


def decode_answer(frames: Sequence[Frame]) -> Answer:
    """Decodes an answer of the coordinator; raises WireError."""
    answer: Answer = decode_json(open_control(frames)[1], Answer)
    return answer


def decode_request(frames: Sequence[Frame], run_id: int) -> Request | RefusedAnswer:
    """Decodes a request to the coordinator of the run `run_id`; raises WireError.

    If the sender has another wire version or run id, returns the RefusedAnswer to send, without reading the body.
    """
    header, body = open_control(frames)
    if header.version != WIRE_VERSION:
        return RefusedAnswer(f"wire version {header.version}, expected {WIRE_VERSION}; install the learner's release")
    if header.run_id not in (0, run_id):
        return RefusedAnswer("the request is for another run")
    request: Request = decode_json(body, Request)
    return request
