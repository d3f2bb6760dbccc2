"""Messages between a server of tables and its clients, as JSON: joining, leases, status. docs/protocol.md has them.

Numbers of 64 bits are texts of hexadecimal digits, because not every language has such integers.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta

from apexreplay.facts import Count, Counts, Record, Text
from apexreplay.wire.header import WIRE_VERSION, Frame, require_field
from apexreplay.wire.json_codec import decode_json, open_control
from apexreplay.wire.status import ReplayStatus

Session = Annotated[int, Meta(ge=0, lt=2**53)]  # drawn at random by the client; each answer repeats it
Hex = Annotated[str, Meta(pattern=r"^[0-9a-f]{1,16}\Z")]
Port = Annotated[int, Meta(ge=1, le=65_535)]


class Hello(Record, frozen=True, kw_only=True, tag="hello"):
    """Asks for a lease: of a stream of the table (writer), or of a row of its counters (sampler)."""

    session: Session
    role: Literal["writer", "sampler"]
    table: Text
    memory: Text = ""  # `memory_id` of the client; "": the client does not want to read the memory itself
    run_id: Hex = "0"  # of the table, if the client had a lease before the server started again; else 0
    stream: Annotated[int, Meta(ge=-1, lt=2**32)] = -1  # that the writer had; -1: none
    row: Annotated[int, Meta(ge=-1, lt=1_024)] = -1  # of the counters, that the sampler had; -1: none
    incarnation: Hex = "0"  # of this stream or row


class Beat(Record, frozen=True, kw_only=True, tag="beat"):
    """Keeps the lease of a session."""

    session: Session


class Bye(Record, frozen=True, kw_only=True, tag="bye"):
    """Ends the lease of a session. Has no answer."""

    session: Session


class StatusRequest(Record, frozen=True, kw_only=True, tag="status"):
    """Asks for the status of the server."""

    session: Session


class Welcome(Record, frozen=True, kw_only=True, tag="welcome"):
    """The answer to Hello: what the client needs to know."""

    session: Session
    run_id: Hex  # of the table
    table: dict[str, Any]  # `Table.to_dict`
    experience: Port
    priorities: Port
    receipts: Port
    batches: Annotated[list[Port], Meta(max_length=16)]
    stream: Annotated[int, Meta(ge=-1, lt=2**32)]  # of a writer; else -1
    incarnation: Hex  # of the stream or row
    window: Annotated[int, Meta(ge=1, le=63)]  # unacknowledged segments that a writer may have
    segment_length: Annotated[int, Meta(ge=1, le=4_096)]  # items of a segment
    row: Annotated[int, Meta(ge=-1, lt=1_024)]  # of the counters, of a sampler that reads the memory itself; else -1
    num_rows: Annotated[int, Meta(ge=1, le=1_024)]
    max_batch: Annotated[int, Meta(ge=1, le=65_536)]  # items of a batch
    limiter: tuple[int, float, float, bool]  # the first four fields of `RateLimiter`

    @property
    def inserts_wait(self) -> bool:
        """Whether inserts wait for draws."""
        return self.limiter[3]


class Alive(Record, frozen=True, kw_only=True, tag="alive"):
    """The answer to Beat."""

    session: Session


class Later(Record, frozen=True, kw_only=True, tag="later"):
    """The answer to Hello while clients of an earlier start may still come back."""

    session: Session


class Refusal(Record, frozen=True, kw_only=True, tag="refused"):
    """Nothing was done, and why."""

    session: Session
    reason: Literal["no_table", "no_stream", "stream_taken", "no_row", "role", "unknown_lease", "new_memory"]
    subject: Text = ""  # the tables that there are, the number of streams or rows, or the role of the key


class TableStatus(Record, frozen=True, kw_only=True):
    """The status of a table."""

    capacity: Count
    writers: Count
    samplers: Count  # that read the memory, or ask for batches
    replay: ReplayStatus | None  # None: the table has not reported yet


class ServerStatus(Record, frozen=True, kw_only=True, tag="server"):
    """The answer to StatusRequest."""

    session: Session
    version: int = 1  # rises if a field is removed, renamed or changes its meaning
    tables: dict[Text, TableStatus]
    refused_connections: Counts  # number of connections by socket and reason
    refusals: Counts  # number of control messages by reason


Request = Hello | Beat | Bye | StatusRequest
Answer = Welcome | Alive | Later | Refusal | ServerStatus


def decode_message(frames: Sequence[Frame], kind: Any) -> Any:
    """Decodes what `encode_control` wrote. `kind`: `Request` or `Answer`. Raises WireError."""
    header, body = open_control(frames)
    require_field(header.version == WIRE_VERSION, "version", f"wire version {header.version}, not {WIRE_VERSION}")
    header.require_zero("run_id")
    return decode_json(body, kind)
