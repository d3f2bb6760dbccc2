"""What was sent, stored, acknowledged, saved and granted in a simulated history, and what must hold of it.

The ledger is naive: it remembers every segment, the order in which each store was seen to store it, and every priority.
"""

from collections import Counter

import numpy as np

from apex.transport.messages.control import ActorHeartbeat, Goodbye, Hello, ReplayHeartbeat, StateAnswer, WelcomeAnswer
from apex.types import Role
from apexreplay.store.priority_weights import MAX_STORED_PRIORITY
from apexreplay.types import Stream
from apexreplay.wire.control import Bye, Welcome

from .content import MAX_RECORDS, label_of


class BrokenPromiseError(AssertionError):
    """A promise was broken."""


def require(condition, problem):
    if not condition:
        raise BrokenPromiseError(problem)


class Seen:
    """The segments that one store was seen to store."""

    def __init__(self, first_key, table, settings):
        self.table, self._settings = table, settings
        self.weights = {}  # key -> all weights that it had, the present one last
        self.keys = {}  # label -> first key, in the order of the keys
        self.given = Counter()  # by key: how often a queue has given the item
        self.earlier = set()  # labels that an earlier store had evicted before the snapshot that was restored
        self.end_key = first_key
        self.num_crashes = 0  # each may have evicted, or skipped in the arena, as much as one segment needs

    def __contains__(self, label):
        return label in self.keys or label in self.earlier

    def between(self, first_key, end_key):
        return {label: key for label, key in self.keys.items() if first_key <= key < end_key}

    def set_priority(self, key, priority):
        weight = min(max(float(priority), self._settings.min_priority), MAX_STORED_PRIORITY)
        self.weights.setdefault(key, []).append(weight**self._settings.priority_exponent)

    def now(self, keys):
        """Returns the present weights of keys."""
        return np.array([self.weights[key][-1] for key in keys])


class Ledger:
    """Raises BrokenPromiseError as soon as a promise is broken."""

    def __init__(self, clock, counts, lease_seconds):
        self._clock = clock
        self._counts = counts
        self._lease_seconds = lease_seconds
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
            label = int(store._regions.records[label_of(seen.table)][key % store.capacity])
            require(label in self.sent, f"segment {label} is stored, but was never sent")
            require(label not in seen, f"segment {label} is stored twice")
            seen.keys[label] = key
            records = self.sent[label].records
            seen.end_key += len(records)
            for index, priority in enumerate(records["priority"].tolist()):
                seen.set_priority(key + index, priority)
            self._counts["stored"] += 1
        require(seen.end_key == store.num_inserted, "the commit number is inside a segment")

    def note_open(self, program, store, newest, *, existed, flipped):
        """Checks a store that a replay server has opened: the memory that it left, or its newest snapshot, or empty."""
        incarnation, taken = store.store_incarnation, self.taken.get(program.snapshots and program.snapshots.path, 0)
        require(taken <= (newest.number if newest else 0), f"snapshot {taken} of {program.name} is gone")
        if existed and (incarnation == program.incarnation or not flipped):
            require(incarnation == program.incarnation, f"{program.name} did not attach to its sound memory")
            self._counts["attached"] += 1
        else:
            require(incarnation not in self.stores, f"store incarnation {incarnation} repeats")
            seen = self.stores[incarnation] = Seen(store.first_key, program.table, program.settings)
            self._counts["restored" if newest else "created"] += 1
            saved = {}
            if newest is not None:
                source = self.stores[newest.store_incarnation]
                saved = source.between(newest.first_key, newest.end_key)
                seen.earlier = source.earlier.union(source.between(0, newest.first_key))
            self.note(store)
            require(seen.keys == saved, f"{program.name} has {len(seen.keys)} segments, its snapshot has {len(saved)}")
            self._adopt_weights(store, seen, newest)
        self.check(store)

    def _adopt_weights(self, store, seen, newest):
        """Checks that the weights of a restored store are some that its items had."""
        keys = np.arange(store.first_key, store.num_inserted)
        for key, weight in zip(keys.tolist(), store.weights(keys).tolist(), strict=True):
            known = np.array(self.stores[newest.store_incarnation].weights[key])
            require(np.isclose(known, weight, rtol=1e-6).any(), f"key {key} is restored with the weight {weight}")
            seen.weights[key] = [weight]

    def note_priorities(self, store, update):
        """Remembers priorities that have arrived."""
        seen = self.stores[store.store_incarnation]
        if update.store_incarnation != store.store_incarnation:
            return
        for key, priority in zip(update.keys.tolist(), update.priorities.tolist(), strict=True):
            if store.first_key <= key < store.num_inserted and priority >= 0:
                seen.set_priority(key, priority)

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
            for name in seen.table.record.names:
                require((stored[name] == expected[name]).all(), f"a stored {name} differs from the sent one")
        for label, key in live.items():
            blob, start = self.sent[label].blob, int(stored["segment"][key - first_key]) % regions.sizes.arena_bytes
            require(bytes(regions.arena[start : start + len(blob)]) == blob, f"frames of segment {label} differ")
        self._check_eviction(seen, first_key, store)
        weights = store.weights(keys)
        require((weights > 0).all(), "a live item has no weight")
        require(np.allclose(weights, seen.now(keys.tolist()), rtol=1e-6), "a weight is not that of the last priority")
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
        lengths = [-(-len(self.sent[label].blob) // 8) * 8 for label in kept]
        longest = max(len(content.blob) for content in self.sent.values())
        full = num_records + spare * MAX_RECORDS > store.capacity
        full |= sum(lengths) + (1 + spare) * (longest + 8) > store.max_bytes
        require(full, f"segment {label} was evicted too early")

    def check_leaves(self, store):
        """Checks that only live transitions have a weight. Does not hold between the steps "watermark" and "bytes"."""
        slots = np.arange(store.capacity)
        dead = np.ones(store.capacity, np.bool_)
        dead[np.arange(store.first_key, store.num_inserted) % store.capacity] = False
        require(not store._regions.tree.weights(slots)[dead].any(), "an item that is not live has a weight")

    def check_drawn(self, store_incarnation, keys, versions, arrays):
        """Checks drawn items: what a draw returns is what was sent."""
        seen = self.stores[store_incarnation]
        for row, (key, label) in enumerate(zip(keys.tolist(), arrays[label_of(seen.table)].tolist(), strict=True)):
            index = key - seen.keys.get(int(label), key + 1)
            require(0 <= index < MAX_RECORDS, f"key {key} was drawn with the content of segment {label}")
            require(versions[row] == label, f"key {key} was drawn with version {versions[row]}, not {label}")
            for name, expected in self.sent[int(label)].items[index].items():
                same = np.array_equal(arrays[name][row], expected)
                require(same, f"key {key} of segment {label} was drawn with another {name}")
        self._counts["drawn"] += 1

    def check_probabilities(self, store, keys, probabilities):
        """Checks the probabilities of a draw during which nothing was stored."""
        seen = self.stores[store.store_incarnation]
        total = seen.now(range(store.first_key, store.num_inserted)).sum()
        right = np.allclose(probabilities * total, seen.now(keys.tolist()), rtol=1e-6)
        require(right, "the probability of a drawn item is not its share of all weights")

    def check_given(self, store_incarnation, keys, limit):
        """Checks items that a queue gives: the oldest first, each at most `limit` times."""
        given = self.stores[store_incarnation].given
        for key in keys.tolist():
            given[key] += 1
            require(given[key] <= limit, f"a queue gave key {key} more than {limit} times")
            require(key >= max(given), f"a queue gave key {key} after a newer one")
        self._counts["given by a queue"] += 1

    def continue_queue(self, store, newest, num_drawn, selection):
        """Adopts what a queue had given before the snapshot `newest`, which must not count what it has not given."""
        limit, earlier, given = selection.draws_per_item, self.stores[newest.store_incarnation].given, Counter()
        position = selection.position(store.first_key, num_drawn)
        for key in range(store.num_inserted):
            given[key] = min(max(position - key * limit, 0), limit)
            known = key < store.first_key or given[key] <= earlier[key]
            require(
                known, f"a restored queue counts {given[key]} draws of key {key}, which it gave {earlier[key]} times"
            )
        self.stores[store.store_incarnation].given = +given

    def check_removed(self, store, limit):
        """Checks that a queue whose inserts wait has given what it has removed."""
        given = self.stores[store.store_incarnation].given
        lost = [key for key in range(store.first_key) if given[key] < limit]
        require(not lost, f"a queue has removed {lost}, which it had not given {limit} times")

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
                ids = {stream.actor_id for stream in request.streams}  # It gives up all others.
                self.holders = {i: each for i, each in self.holders.items() if each[0] != request.session or i in ids}
                self._lease(request.session, request.streams)

    def joined(self, request, answer):
        """Checks that an answer of a server of tables gives no stream and no row to two clients."""
        match request, answer:
            case Bye(), _:
                self.holders = {i: holder for i, holder in self.holders.items() if holder[0] != request.session}
            case _, Welcome() if answer.stream >= 0:
                self._lease(request.session, [Stream((answer.run_id, answer.stream), int(answer.incarnation, 16))])
            case _, Welcome() if answer.row >= 0:
                self._hold((answer.run_id, "row", answer.row), request.session)

    def beat(self, session):
        """Notes that all leases of a session are renewed."""
        for place, (holder, _) in list(self.holders.items()):
            if holder == session:
                self._hold(place, session)

    def _lease(self, session, streams):
        """Notes new or renewed leases."""
        for stream in streams:
            if stream not in self.granted:
                newer = stream.incarnation > self.highest.get(stream.actor_id, 0)
                require(newer, f"actor {stream.actor_id} got incarnation {stream.incarnation} after a higher one")
                self.granted[stream], self.highest[stream.actor_id] = session, stream.incarnation
            require(self.granted[stream] == session, f"{stream} was leased to two sessions")
            self._hold(stream.actor_id, session)

    def _hold(self, place, session):
        """Checks that a place, such as an actor id, has one holder at a time."""
        now = self._clock.now
        holder, until = self.holders.get(place, (session, 0.0))
        require(holder == session or until <= now, f"{place} was leased to two sessions at a time")
        self.holders[place] = session, now + self._lease_seconds
