"""Handles the messages to a replay server: stores segments, applies priorities, creates receipts. Has no sockets."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from apexreplay.facts import MAX_COUNTS, Waiting
from apexreplay.frame_blob import count_frames
from apexreplay.process.rates import Rates
from apexreplay.rate_limiter import RateLimiter
from apexreplay.sampling.sampler_counters import SamplerCounters
from apexreplay.sampling.selection import Selection
from apexreplay.server.priority_histogram import PriorityHistogram
from apexreplay.store.deduplication import InsertOutcome
from apexreplay.store.writer import StoreWriter
from apexreplay.transport.sockets import Reader
from apexreplay.transport.timing import RECEIPT_REPEAT_SECONDS, RECEIPT_SECONDS, STREAM_LIFE_SECONDS
from apexreplay.types import Receipts, Segment
from apexreplay.wire.codec import MAX_INCARNATION, MAX_RECORDS, Codec
from apexreplay.wire.header import Frame, WireError, require_field
from apexreplay.wire.status import ReplayStatus

MAX_ROWS = 1_024  # repeated receipts that are read from the store at once
NO_COUNTS: Mapping[str, int] = Counter()


class ReplayServer(Reader):
    """The writer of one shard: stores segments, applies priorities and creates receipts."""

    def __init__(
        self,
        store: StoreWriter,
        codec: Codec,
        samplers: SamplerCounters,
        limiter: RateLimiter,
        *,
        shard: int = 0,
        queue: Selection | None = None,
        segment: tuple[int, int] = (MAX_RECORDS, 1 << 32),
        newest_incarnation: int = MAX_INCARNATION,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`queue`: inserts wait for its draws; `segment`: maximum items and bytes of a segment. `newest_incarnation`:
        the highest that a stream can have at this start.
        """
        super().__init__()
        self.shard = shard
        self._queue = queue
        self._segment = segment
        self._newest_incarnation = newest_incarnation
        self._store = store
        self._codec = codec
        self._samplers = samplers
        self._limiter = limiter
        self._clock = clock
        # of each stream: where its receipts go, the time of its last segment, and when it gets its next receipt
        self._group = np.zeros(store.num_streams, np.int64)
        self._seen_at = np.full(store.num_streams, -np.inf)
        self._due_at = np.zeros(store.num_streams)
        self._histogram = PriorityHistogram(store, clock=clock)
        self._rates = Rates(clock(), store.num_inserted, samplers.num_drawn, store.num_steps)
        self._worked = (clock(), time.process_time())  # wall and CPU time at the last heartbeat, in seconds
        self._may_insert = True
        self._checked_at = clock()

    def insert(self, messages: Sequence[Sequence[Frame]]) -> list[Receipts]:
        """Stores segments; returns the receipts for the streams that sent at least one, by group.

        Raises LostMemoryError if the file of the memory was removed, because later servers could not find the segments.
        """
        owed: dict[int, set[int]] = {}  # group -> actor ids
        now = self._clock()
        for frames in messages:
            try:
                segment = self._decode_segment(frames)
                outcome = self._store.insert(segment)
            except WireError as error:
                self.refuse(error)
            except ValueError as error:
                self.refuse(WireError("store", str(error)))
            else:
                if outcome is InsertOutcome.STORED:
                    self._store.count_steps(self._codec.num_steps(segment.records))
                actor_id = segment.stream.actor_id
                if outcome is not InsertOutcome.UNKNOWN_ACTOR:  # Gets no receipt; counted by the store.
                    owed.setdefault(segment.group, set()).add(actor_id)
                    if outcome is not InsertOutcome.OLDER_INCARNATION:
                        self._group[actor_id], self._seen_at[actor_id] = segment.group, now
        self._store.require_in_place()
        return [self._receipts(group, np.array(sorted(owed[group])), RECEIPT_SECONDS) for group in sorted(owed)]

    def _decode_segment(self, frames: Sequence[Frame]) -> Segment:
        most, max_bytes = self._segment
        num_bytes = sum(map(len, frames))
        require_field(num_bytes <= max_bytes, "length", f"a segment of {num_bytes} bytes, maximum is {max_bytes}")
        segment = self._codec.decode_segment(frames, self.shard)
        count = len(segment.records)
        require_field(count <= most, "count", f"a segment of {count} items, maximum is {most}")
        incarnation = segment.stream.incarnation
        is_possible = incarnation <= self._newest_incarnation
        # Otherwise the stream's row would refuse every later writer, also after a restart.
        require_field(is_possible, "incarnation", f"incarnation {incarnation} is above those of this start")
        if self._queue is not None:  # Otherwise there may be no room for a batch, and writers and samplers wait.
            table = self._codec.table
            steps, limit = count_frames(segment.blob) // len(table.entries), table.item.segment_steps(count)
            require_field(steps <= limit, "steps", f"{steps} steps for {count} items, maximum is {limit}")
        return segment

    def update_priorities(self, messages: Sequence[Sequence[Frame]]) -> None:
        """Applies new priorities and acknowledges the batches to the samplers."""
        for frames in messages:
            try:
                update = self._codec.decode_priorities(frames, self.shard)
                is_own = update.store_incarnation == self._store.store_incarnation
                was_sent = self._samplers.has_sent(update.sampler, update.number) or not is_own
                require_field(was_sent, "number", f"sampler {update.sampler} has sent no batch {update.number}")
            except WireError as error:
                self.refuse(error)
                continue
            self._store.update_priorities(update)
            if is_own:
                self._samplers.acknowledge(update.sampler, update.number)

    def receipts(self) -> Iterator[Receipts]:
        """Yields, by group, the receipts of active streams that are due again, because senders may have missed some.

        Raises LostMemoryError if the file of the memory was removed.
        """
        self._store.require_in_place()
        now = self._clock()
        due = np.flatnonzero((self._due_at <= now) & (now - self._seen_at < STREAM_LIFE_SECONDS))
        due = due[np.argsort(self._group[due], kind="stable")]
        for first in range(0, len(due), MAX_ROWS):
            actor_ids = due[first : first + MAX_ROWS]
            groups, rows = self._group[actor_ids], self._receipts(0, actor_ids, RECEIPT_REPEAT_SECONDS).rows
            for start, end in pairwise([0, *(np.flatnonzero(np.diff(groups)) + 1).tolist(), len(rows)]):
                yield Receipts(int(groups[start]), self._store.store_incarnation, rows[start:end])

    def _receipts(self, group: int, actor_ids: NDArray[np.int64], seconds: float) -> Receipts:
        """Returns the receipts of streams, which are due again after `seconds`."""
        self._due_at[actor_ids] = self._clock() + seconds
        return self._store.receipts(actor_ids, group)

    def check_limiter(self, *, inserts_wanted: bool = False) -> bool:
        """Returns whether inserts may continue; False is possible only with replay.inserts_wait.

        `inserts_wanted`: samplers of another shard wait for inserts. If so, inserts into this shard must not wait.
        """
        keeps_ratio = self._samplers.limit(self._limiter).may_insert(self._store.num_inserted, self._samplers.num_drawn)
        # Without any weight, nothing can be drawn: samplers wait for inserts.
        is_wanted = keeps_ratio or inserts_wanted or not self._store.total_weight
        now = self._clock()
        if not self._may_insert:  # Meanwhile, no segment was taken: silent streams may have sent some.
            self._seen_at += now - self._checked_at
        self._checked_at = now
        self._may_insert = is_wanted and not self._would_remove_undrawn()
        return self._may_insert

    def _would_remove_undrawn(self) -> bool:
        """Returns whether a segment could remove items that the queue has not given often enough."""
        if self._queue is None:
            return False
        position = self._queue.position(self._store.first_key, self._samplers.num_given)
        return self._store.first_key_after(*self._segment) > position // self._queue.draws_per_item

    def status(
        self, refused: Mapping[str, int] = NO_COUNTS, refused_connections: Mapping[str, int] = NO_COUNTS
    ) -> ReplayStatus:
        """Returns the status for a heartbeat. `busy_share` covers the time since the last heartbeat.

        `refused`: requests that the samplers have refused, by reason. `refused_connections`: by socket and reason.
        """
        store, samplers, now = self._store, self._samplers, self._clock()
        inserted, drawn = store.num_inserted, samplers.num_drawn
        (then, worked_then), worked = self._worked, time.process_time()
        self._worked = (now, worked)
        seconds = max(now - then, 1e-3)
        inserts, samples, steps = self._rates.measure(now, inserted, drawn, store.num_steps)
        refusals = self.refused + store.refused + Counter(refused)
        waits = {"inserts": Waiting("more_inserts"), "learner": Waiting("credit")}
        return ReplayStatus(
            waiting=waits.get(samplers.waits_for),
            num_inserted=inserted,
            num_steps=store.num_steps,
            num_drawn=drawn,
            store_incarnation=str(store.store_incarnation),
            size=store.size,
            bytes=store.bytes_used,
            max_bytes=store.max_bytes,
            inserts_per_second=inserts,
            inserted_steps_per_second=steps,
            samples_per_second=samples,
            busy_share=min(1.0, (worked - worked_then) / seconds),  # CPU time of the writer / wall time
            stale_priorities=store.num_stale,
            duplicate_segments=store.num_duplicates,
            refused=refusals.total(),
            refusals=dict(refusals.most_common(MAX_COUNTS)),
            refused_connections=dict(refused_connections),
            samplers_wait_for=samplers.waits_for,
            inserts_wait=not self._may_insert,
            priority_histogram=self._histogram.newest(),
        )
