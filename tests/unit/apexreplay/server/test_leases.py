"""Leases of streams and rows: one holder at a time, and incarnations that never repeat."""

import random

import pytest
from support.clocks import Clock

from apexreplay.server.leases import LEASE_SECONDS, RECLAIM_SECONDS, AwakeClock, Full, Leases
from apexreplay.types import Stream


def make(clock, *, start=1, num_streams=2):
    return Leases(num_streams, 2, start, clock=clock)


def test_streams_and_rows_run_out_and_come_back():
    clock = Clock()
    leases = make(clock)
    first, second = leases.writer(1), leases.writer(2)
    assert {first.actor_id, second.actor_id} == {0, 1}
    assert first.incarnation < second.incarnation
    assert leases.writer(1) == first
    assert leases.writer(3) == Full("no_stream", 2)
    rows = [leases.sampler(session) for session in (4, 5, 4)]
    assert rows[0] == rows[2]
    assert {row.actor_id for row in rows} == {0, 1}
    assert leases.sampler(6) == Full("no_row", 2)
    assert leases.remote(7) == leases.remote(7) != leases.remote(8)
    assert leases.count() == (2, 4)
    leases.end(2)
    leases.end(5)
    leases.end(5)
    assert leases.writer(3).actor_id == second.actor_id
    assert leases.sampler(6).actor_id == rows[1].actor_id
    assert leases.sampler(5, rows[1]) == Full("no_row", 2)


def test_a_silent_client_loses_its_lease_and_a_beat_keeps_it():
    clock = Clock()
    leases = make(clock)
    silent, alive = leases.writer(1), leases.writer(2)
    for _ in range(3):
        clock.now += LEASE_SECONDS * 0.6
        assert leases.beat(2)
    assert leases.writer(3).actor_id == silent.actor_id
    assert not leases.beat(1)
    assert leases.writer(2) == alive
    assert leases.count() == (2, 0)


def test_time_in_which_the_server_was_stopped_does_not_count():
    clock = Clock()
    awake = AwakeClock(clock)
    leases = make(awake)
    living, silent = leases.writer(1), leases.writer(2)
    clock.now += 3 * LEASE_SECONDS  # Heartbeats wait in the socket.
    assert leases.count() == (2, 0)
    assert leases.writer(3) == Full("no_stream", 2)
    for _ in range(round(LEASE_SECONDS) + 1):
        clock.now += 1.0
        assert leases.beat(1)
    assert leases.writer(3).actor_id == silent.actor_id
    assert leases.writer(1) == living


@pytest.mark.parametrize("others", [0, 1])
def test_a_writer_gets_the_stream_of_its_expired_lease_back(others):
    """Also the newest writer: the server itself may have been stopped for long."""
    clock = Clock()
    leases = make(clock)
    stream = leases.writer(1)
    for session in range(2, 2 + others):
        leases.writer(session)
    clock.now += LEASE_SECONDS + 1
    assert leases.count() == (0, 0)
    assert not leases.beat(1)
    assert leases.writer(1, stream) == stream


def test_only_earlier_clients_are_served_after_a_restart_at_first():
    clock = Clock()
    before, leases = make(clock), make(clock, start=2)
    kept, row, other_row = before.writer(1), before.sampler(8), before.sampler(9)
    clock.now += LEASE_SECONDS  # The memory is being restored.
    assert leases.writer(2) is leases.sampler(7) is leases.sampler(7, Stream(-3, 0)) is None
    assert leases.remote(11) is not None
    assert leases.sampler(8, row) == row
    assert leases.sampler(9, row) is None
    assert leases.writer(1, kept) == kept
    assert leases.writer(3, kept) == Full("stream_taken", 2)
    assert leases.writer(4, Stream(1 - kept.actor_id, 3 << 32)) == Full("stream_taken", 2)  # was never leased
    assert leases.writer(5, Stream(2, kept.incarnation)) == Full("stream_taken", 2)
    leases.open()
    clock.now += RECLAIM_SECONDS - 1
    leases.open()
    assert leases.writer(2) is leases.sampler(9, row) is None
    clock.now += 1
    assert leases.sampler(9, row).actor_id == other_row.actor_id
    assert leases.writer(2).actor_id == 1 - kept.actor_id
    assert leases.writer(6) == Full("no_stream", 2)


def test_a_new_writer_gets_a_stream_that_nobody_had():
    """A silent writer may come back for its own, and loses its items otherwise."""
    clock = Clock()
    leases = make(clock, num_streams=3)
    first, second = leases.writer(1), leases.writer(2)
    clock.now += LEASE_SECONDS + 1
    third = leases.writer(3)
    assert {third.actor_id, first.actor_id, second.actor_id} == {0, 1, 2}
    assert leases.writer(1, first) == first


@pytest.mark.parametrize("seed", range(5))
def test_no_stream_or_row_has_two_holders_and_no_incarnation_repeats(seed):
    rng, clock = random.Random(seed), Clock()
    start, given = 1, {}  # (is it a writer's?, incarnation) -> session
    leases, held = make(clock, num_streams=3), {}  # held: session -> (stream or row, when the server last heard of it)
    known = {}  # session -> stream or row
    for step in range(2_000):
        session = rng.randrange(12)
        is_writer = session < 6
        clock.now += rng.choice([0.1, 1.0, 10.0])
        kind = rng.random()
        held = {other: entry for other, entry in held.items() if clock.now - entry[1] < LEASE_SECONDS}
        if kind < 0.05:
            start, held = start + 1, {}
            leases = make(clock, start=start, num_streams=3)
            leases.open()
        assert leases.count() == (sum(key < 6 for key in held), sum(key >= 6 for key in held))
        if kind < 0.15:
            leases.end(session)
            held.pop(session, None)
        elif kind < 0.5:
            assert leases.beat(session) == (session in held)
            if session in held:
                held[session] = held[session][0], clock.now
        else:
            lease = (leases.writer if is_writer else leases.sampler)(session, known.get(session))
            if isinstance(lease, Stream):
                others = [
                    other.actor_id for key, (other, _) in held.items() if key != session and is_writer == (key < 6)
                ]
                assert lease.actor_id not in others
                assert given.setdefault((is_writer, lease.incarnation), session) == session, step
                known[session], held[session] = lease, (lease, clock.now)
            else:
                known.pop(session, None)
    assert len(given) > 30
