"""Leases of streams and rows: one holder at a time, and incarnations that never repeat."""

import random

import pytest
from support.clocks import Clock

from apexreplay.server.leases import LEASE_SECONDS, RECLAIM_SECONDS, Full, Lease, Leases
from apexreplay.types import Stream


def make(clock, *, start=1, num_streams=2, rows=range(1, 3)):
    return Leases(num_streams, rows, start, clock=clock)


def test_streams_and_rows_run_out_and_come_back():
    clock = Clock()
    leases = make(clock)
    first, second = leases.writer(1), leases.writer(2)
    assert {first.stream.actor_id, second.stream.actor_id} == {0, 1}
    assert first.stream.incarnation < second.stream.incarnation
    assert leases.writer(1) == first
    assert leases.writer(3) == Full("no_stream", 2)
    assert [leases.sampler(session) for session in (4, 5, 4, 6)] == [
        Lease(None, 1),
        Lease(None, 2),
        Lease(None, 1),
        Full("no_row", 2),
    ]
    assert leases.remote(7) == Lease(None, -1)
    assert leases.count() == (2, 3)
    leases.end(2)
    leases.end(5)
    leases.end(5)
    assert leases.writer(3).stream.actor_id == second.stream.actor_id
    assert leases.sampler(6) == Lease(None, 2)


def test_a_silent_client_loses_its_lease_and_a_beat_keeps_it():
    clock = Clock()
    leases = make(clock)
    silent, alive = leases.writer(1), leases.writer(2)
    for _ in range(3):
        clock.now += LEASE_SECONDS * 0.6
        assert leases.beat(2)
    assert not leases.beat(1)
    assert leases.count() == (1, 0)
    assert leases.writer(2) == alive
    assert leases.writer(3).stream.actor_id == silent.stream.actor_id


@pytest.mark.parametrize("others", [0, 1])
def test_a_writer_gets_the_stream_of_its_expired_lease_back(others):
    """Also the newest writer: the server itself may have been stopped for long."""
    clock = Clock()
    leases = make(clock)
    lease = leases.writer(1)
    for session in range(2, 2 + others):
        leases.writer(session)
    clock.now += LEASE_SECONDS + 1
    assert not leases.beat(1)
    assert leases.writer(1, lease.stream) == lease


def test_only_earlier_clients_are_served_after_a_restart_at_first():
    clock = Clock()
    kept = make(clock).writer(1).stream
    leases = make(clock, start=2)
    clock.now += LEASE_SECONDS  # The memory is being restored.
    assert leases.writer(2) is leases.sampler(7) is leases.sampler(7, 9) is None
    assert leases.sampler(8, 2) == Lease(None, 2)
    assert leases.sampler(9, 2) is None
    assert leases.writer(1, kept) == Lease(kept, -1)
    assert leases.writer(3, kept) == Full("stream_taken", 2)
    assert leases.writer(4, Stream(1, (2 << 32) + 1)) == Full("stream_taken", 2)  # was never leased
    assert leases.writer(5, Stream(2, kept.incarnation)) == Full("stream_taken", 2)
    leases.open()
    clock.now += RECLAIM_SECONDS - 1
    leases.open()
    assert leases.writer(2) is leases.sampler(9, 2) is None
    clock.now += 1
    assert leases.sampler(9, 2) == Lease(None, 1)
    assert leases.writer(2).stream.actor_id == 1
    assert leases.writer(6) == Full("no_stream", 2)


@pytest.mark.parametrize("seed", range(5))
def test_no_stream_or_row_has_two_holders_and_no_incarnation_repeats(seed):
    rng, clock = random.Random(seed), Clock()
    start, given = 1, {}  # incarnation -> session
    leases, held = make(clock, num_streams=3), {}  # held: session -> (lease, when the server last heard of it)
    known = {}  # session -> stream
    for step in range(2_000):
        session = rng.randrange(12)
        clock.now += rng.choice([0.1, 1.0, 10.0])
        kind = rng.random()
        held = {other: entry for other, entry in held.items() if clock.now - entry[1] <= LEASE_SECONDS}
        if kind < 0.05:
            start, held = start + 1, {}
            leases = make(clock, start=start, num_streams=3)
            leases.open()
        elif kind < 0.15:
            leases.end(session)
            held.pop(session, None)
        elif kind < 0.5:
            assert leases.beat(session) == (session in held)
            if session in held:
                held[session] = held[session][0], clock.now
        else:
            lease = leases.writer(session, known.get(session)) if session < 6 else leases.sampler(session)
            if isinstance(lease, Lease):
                others = [other for key, (other, _) in held.items() if key != session]
                if session < 6:
                    assert lease.stream.actor_id not in [other.stream.actor_id for other in others if other.stream]
                    assert given.setdefault(lease.stream.incarnation, session) == session, step
                    known[session] = lease.stream
                else:
                    assert lease.row not in [other.row for other in others if other.stream is None]
                held[session] = lease, clock.now
            else:
                known.pop(session, None)
        assert leases.count() == (sum(key < 6 for key in held), sum(key >= 6 for key in held))
    assert len(given) > 30
