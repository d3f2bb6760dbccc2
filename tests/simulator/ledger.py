"""What was sent, stored, acknowledged, saved and granted in a simulated history, and what must hold of it.

The ledger is naive: it remembers every segment and the order in which each store was seen to store it.
"""

from typing import NamedTuple

import numpy as np
from support.builders import VECTORS, make_records

from apex.transport.messages.control import ActorHeartbeat, Goodbye, Hello, ReplayHeartbeat, StateAnswer, WelcomeAnswer
from apex.types import Role
from apexreplay.frame_blob import table_bytes

MAX_RECORDS = 8  # transitions in a segment
FRAME_BYTES = 16
LEASE_SECONDS = 3.5
BASE = [make_records(VECTORS, count) for count in range(MAX_RECORDS + 1)]
TABLES = [
    (table_bytes(count + 1) + FRAME_BYTES * np.arange(count + 2, dtype="<u4")).astype("<u4").tobytes()
    for count in range(MAX_RECORDS + 1)
]
MAX_BLOB_BYTES = table_bytes(MAX_RECORDS + 1) + FRAME_BYTES * (MAX_RECORDS + 1)


class BrokenPromiseError(AssertionError):
    """A promise was broken."""


def require(condition, problem):
    if not condition:
        raise BrokenPromiseError(problem)


class Content(NamedTuple):
    """The content of a segment, which contains its label in every record and in every frame."""

    records: np.ndarray
    blob: bytes


def make_content(label, count):
    records = BASE[count].copy()
    records["n_step_return"] = label
    frames = np.repeat(_frame_values(label, np.arange(count + 1)), FRAME_BYTES // 4)
    return Content(records, TABLES[count] + frames.tobytes())


def _frame_values(label, index):
    return (16 * label + index).astype("<f4")  # exact below 2**24


class Seen:
    """The segments that one store was seen to store."""

    def __init__(self, first_key):
        self.keys = {}  # label -> first key, in the order of the keys
        self.earlier = set()  # labels that an earlier store had evicted before the snapshot that was restored
        self.end_key = first_key
        self.num_crashes = 0  # each may have evicted, or skipped in the arena, as much as one segment needs

    def __contains__(self, label):
        return label in self.keys or label in self.earlier

    def between(self, first_key, end_key):
        return {label: key for label, key in self.keys.items() if first_key <= key < end_key}


class Ledger:
    """Raises BrokenPromiseError as soon as a promise is broken."""

    def __init__(self, clock, counts):
        self._clock = clock
        self._counts = counts
        self.sent = {}  # label -> Content
        self.stores = {}  # store incarnation -> Seen
        self.taken = {}  # folder of snapshots -> number of the newest finished one
        self.servers = {}  # shard -> session of the replay server that was welcomed last
        self.granted = {}  # stream -> session
        self.highest = {}  # actor id -> highest granted incarnation
        self.holders = {}  # actor id -> (session, end of the lease)

    # --- stores -----------------------------------------------------------------------------------------------------

    def note(self, store):
        """Looks at what the store has stored since the last look: each segment once, and as it was sent."""
        seen = self.stores[store.store_incarnation]
        while seen.end_key < store.num_inserted:
            key = seen.end_key
            label = int(store._regions.records["n_step_return"][key % store.capacity])
            require(label in self.sent, f"segment {label} is stored, but was never sent")
            require(label not in seen, f"segment {label} is stored twice")
            seen.keys[label] = key
            seen.end_key += len(self.sent[label].records)
            self._counts["stored"] += 1
        require(seen.end_key == store.num_inserted, "the commit number is inside a segment")

    def note_open(self, program, store, newest, *, existed, flipped):
        """Checks a store that a replay server has opened: the memory that it left, or its newest snapshot, or empty."""
        incarnation, taken = store.store_incarnation, self.taken.get(program.snapshots.path, 0)
        require(taken <= (newest.number if newest else 0), f"snapshot {taken} of {program.name} is gone")
        if existed and (incarnation == program.incarnation or not flipped):
            require(incarnation == program.incarnation, f"{program.name} did not attach to its sound memory")
            self._counts["attached"] += 1
        else:
            require(incarnation not in self.stores, f"store incarnation {incarnation} repeats")
            seen = self.stores[incarnation] = Seen(store.first_key)
            self._counts["restored" if newest else "created"] += 1
            saved = {}
            if newest is not None:
                source = self.stores[newest.store_incarnation]
                saved = source.between(newest.first_key, newest.end_key)
                seen.earlier = source.earlier.union(source.between(0, newest.first_key))
            self.note(store)
            require(seen.keys == saved, f"{program.name} has {len(seen.keys)} segments, its snapshot has {len(saved)}")
        self.check(store)

    def note_snapshot(self, program, newest):
        """Remembers a finished snapshot."""
        self.taken[program.snapshots.path] = newest.number
        self._counts["snapshots"] += 1

    def check(self, store):
        """Checks that the store has everything it was seen to store, except what it had to evict."""
        self.note(store)
        seen, first_key, regions = self.stores[store.store_incarnation], store.first_key, store._regions
        keys = np.arange(first_key, store.num_inserted)
        live = seen.between(first_key, store.num_inserted)
        require(sum(len(self.sent[label].records) for label in live) == len(keys), "the watermark is inside a segment")
        stored = regions.records[keys % store.capacity]
        require((stored["key"] == keys).all(), "a live key is not in its slot")
        if live:
            expected = np.concatenate([self.sent[label].records for label in live])
            for name in VECTORS.table.record.names:
                require((stored[name] == expected[name]).all(), f"a stored {name} differs from the sent one")
        for label, key in live.items():
            blob, start = self.sent[label].blob, int(stored["segment"][key - first_key]) % regions.sizes.arena_bytes
            require(bytes(regions.arena[start : start + len(blob)]) == blob, f"frames of segment {label} differ")
        self._check_eviction(seen, first_key, store)
        weights = store.weights(keys)
        require(((weights > 0) & (weights < np.inf)).all(), "a live transition has no valid weight")
        self.check_leaves(store)
        regions.tree.check()

    def _check_eviction(self, seen, first_key, store):
        """Checks that the newest evicted segment did not fit any more."""
        label = max(seen.between(0, first_key).items(), key=lambda item: item[1], default=(None,))[0]
        if label is None:
            return
        self._counts["evicted"] += 1
        kept = [label, *seen.between(first_key, seen.end_key)]
        spare = 1 + seen.num_crashes
        num_records = sum(len(self.sent[label].records) for label in kept)
        num_bytes = sum(-(-len(self.sent[label].blob) // 8) * 8 for label in kept)
        full = num_records + spare * MAX_RECORDS > store.capacity
        full |= num_bytes + (1 + spare) * (MAX_BLOB_BYTES + 8) > store.max_bytes
        require(full, f"segment {label} was evicted too early")

    def check_leaves(self, store):
        """Checks that only live transitions have a weight. Does not hold between the steps "watermark" and "bytes"."""
        slots = np.arange(store.capacity)
        dead = np.ones(store.capacity, np.bool_)
        dead[np.arange(store.first_key, store.num_inserted) % store.capacity] = False
        require(not store._regions.tree.weights(slots)[dead].any(), "a transition that is not live has a weight")

    def check_sample(self, store, sample):
        """Checks drawn transitions and their frames."""
        seen, records = self.stores[store.store_incarnation], sample.records
        values = np.frombuffer(sample.blob, "<f4", offset=table_bytes(2 * len(records)))
        frames = values.reshape(-1, 2, FRAME_BYTES // 4)  # s_t and s_{t+1} of each transition
        for record, own in zip(records, frames, strict=True):
            label, key = int(record["n_step_return"]), int(record["key"])
            index = key - seen.keys.get(label, key + 1)
            require(0 <= index < MAX_RECORDS, f"key {key} was drawn with the content of segment {label}")
            expected = _frame_values(label, index + np.arange(2))
            require((own == expected[:, None]).all(), f"key {key} of segment {label} was drawn with other frames")
        self._counts["drawn"] += 1

    # --- receipts ---------------------------------------------------------------------------------------------------

    def acknowledged(self, label, store_incarnation):
        """Checks that the store of a receipt has stored the segment. `check` tells whether it keeps it."""
        seen = self.stores.get(store_incarnation)
        require(seen is not None and label in seen, f"segment {label} is acknowledged and not stored")
        self._counts["acknowledged"] += 1

    # --- the learner ------------------------------------------------------------------------------------------------

    def restart_learner(self):
        """The learner is started again and has forgotten which leases have not ended."""
        self.holders.clear()

    def answered(self, request, answer):
        """Checks that an answer gives no shard and no actor id to two programs."""
        match request, answer:
            case Goodbye(), _:
                self.holders = {i: holder for i, holder in self.holders.items() if holder[0] != request.session}
            case Hello(role=Role.REPLAY), WelcomeAnswer():
                self.servers[request.shard] = request.session
            case ReplayHeartbeat(), StateAnswer():
                newest = self.servers.setdefault(request.shard, request.session)
                require(newest == request.session, f"a replaced server of shard {request.shard} is accepted again")
            case Hello(), WelcomeAnswer():
                session = request.session  # A repeated Hello does not renew a lease.
                self._lease(session, [stream for stream in answer.streams if self.granted.get(stream) != session])
            case ActorHeartbeat(), StateAnswer():
                self._lease(request.session, request.streams)

    def _lease(self, session, streams):
        """Notes new or renewed leases."""
        now = self._clock.now
        for stream in streams:
            if stream not in self.granted:
                newer = stream.incarnation > self.highest.get(stream.actor_id, 0)
                require(newer, f"actor {stream.actor_id} got incarnation {stream.incarnation} after a higher one")
                self.granted[stream], self.highest[stream.actor_id] = session, stream.incarnation
            require(self.granted[stream] == session, f"{stream} was leased to two sessions")
            holder, until = self.holders.get(stream.actor_id, (session, 0.0))
            require(holder == session or until <= now, f"actor {stream.actor_id} was leased to two sessions at a time")
            self.holders[stream.actor_id] = session, now + LEASE_SECONDS
