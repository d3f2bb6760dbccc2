"""The status of a replay server, which it sends with each heartbeat."""

from typing import Literal

from apexreplay.facts import Count, Counts, Number, Record, Text, Waiting
from apexreplay.wire.histogram import Histogram


class ReplayStatus(Record, frozen=True, kw_only=True):
    """Status of one replay server, or of all shards together. Rates are averages over some seconds."""

    waiting: Waiting | None  # what the server waits for; None while it works
    num_inserted: Count  # transitions inserted since the store was created
    num_steps: Count  # environment steps that these transitions stand for; those of a sequence are several
    num_drawn: Count  # transitions drawn by all samplers
    store_incarnation: Text
    size: Count  # transitions in the store
    bytes: Count  # bytes of compressed frames
    max_bytes: Count
    inserts_per_second: Number
    inserted_steps_per_second: Number  # the rate of `num_steps`
    samples_per_second: Number
    busy_share: Number  # share of time that the writer worked since the last heartbeat; the highest of all shards
    stale_priorities: Count  # number of priorities ignored because their transitions were already overwritten
    duplicate_segments: Count
    refused: Count  # number of invalid messages
    refusals: Counts  # number of invalid messages by reason
    refused_connections: Counts  # number of connections by socket and reason
    samplers_wait_for: Literal["", "inserts", "learner"]
    inserts_wait: bool  # whether inserts wait for the learner, to keep the replay ratio
    priority_histogram: Histogram | None  # histogram of |TD error|, without the priority exponent

    @property
    def samples_per_insert(self) -> float:
        """Transitions drawn per inserted transition."""
        return self.num_drawn / max(self.num_inserted, 1)
