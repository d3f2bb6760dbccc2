"""Leases of actor ids: the highest first, to one session, until a goodbye or silence."""

import secrets

import numpy as np
import pytest

from apexreplay.server.leases import LeaseTable
from apexreplay.types import Stream


def ids(streams):
    return [stream.actor_id for stream in streams]


def test_the_highest_free_ids_are_leased_first():
    table = LeaseTable(10, 10.0)
    assert ids(table.claim(session=1, count=4, now=0.0)) == [9, 8, 7, 6]
    assert ids(table.claim(session=2, count=4, now=0.0)) == [5, 4, 3, 2]
    assert ids(table.claim(session=3, count=4, now=0.0)) == [1, 0]
    assert ids(table.claim(session=4, count=4, now=0.0)) == []
    assert table.num_leased == 10


def test_a_repeated_claim_keeps_ids_and_adds_missing_ones():
    table = LeaseTable(4, 10.0)
    first = table.claim(1, 2, 0.0)
    assert table.claim(1, 2, 1.0) == first
    assert ids(table.claim(1, 3, 1.0)) == [3, 2, 1]
    table.claim(2, 1, 1.0)
    table.release(1)
    assert ids(table.claim(2, 2, 1.0)) == [3, 0]


def test_goodbye_frees_ids_at_once_and_silence_after_the_lease():
    table = LeaseTable(2, 10.0)
    old = table.claim(1, 1, 0.0)
    table.claim(2, 1, 0.0)
    table.release(1)
    (new,) = table.claim(3, 1, 1.0)
    assert new.actor_id == old[0].actor_id
    assert new.incarnation > old[0].incarnation
    assert ids(table.claim(4, 1, 9.9)) == []
    assert ids(table.claim(4, 1, 10.1)) == [0]


def test_a_renewed_lease_does_not_expire():
    table = LeaseTable(1, 10.0)
    streams = table.claim(1, 1, 0.0)
    assert table.renew(1, streams, 9.0)
    assert table.claim(2, 1, 18.0) == []


def test_a_lease_lasts_as_many_times_longer_as_its_renewal_says():
    table = LeaseTable(2, 10.0)
    streams = table.claim(1, 1, 0.0)
    assert table.renew(1, streams, 0.0, 3.0)
    assert ids(table.claim(2, 2, 29.9)) == [0]
    assert table.renew(1, [], 29.9)
    assert ids(table.claim(2, 2, 30.1)) == [1, 0]
    assert table.renew(2, table.held(2)[:1], 30.1, 2.0)  # other ids than before
    table.expire(50.0)
    assert ids(table.held(2)) == [1]
    table.expire(50.2)
    assert table.num_leased == 0


def test_a_renewal_of_fewer_ids_frees_the_others():
    table = LeaseTable(3, 10.0)
    first, second = table.claim(1, 2, 0.0)
    assert table.renew(1, [second], 1.0)
    assert (table.held(1), table.num_leased) == ([second], 1)
    assert ids(table.claim(2, 3, 1.0)) == [2, 0]
    assert not table.renew(1, [first, second], 1.0)
    assert (table.held(1), table.num_leased) == ([second], 3)
    assert table.renew(1, [], 1.0), "a host that has no ids yet"
    assert table.held(1) == [second]
    assert not table.renew(1, [Stream(second.actor_id, second.incarnation + 1)], 1.0)


def test_an_id_that_is_listed_twice_is_leased_once():
    table = LeaseTable(3, 10.0, epoch=2)
    assert table.renew(1, [Stream(0, 5), Stream(0, 6)], 0.0)
    assert (table.held(1), table.num_leased) == ([Stream(0, 6)], 1)
    table.release(1)
    assert table.num_leased == 0


def test_an_expired_id_is_renewed_before_the_table_frees_it():
    before, table = LeaseTable(1, 10.0, epoch=1), LeaseTable(1, 10.0, epoch=2)
    (stream,) = before.claim(1, 1, 0.0)
    assert table.renew(2, [stream], 0.0)  # by a session that sends no goodbye
    assert not table.renew(1, [stream], 9.9)
    assert table.renew(1, [stream], 10.0)


def test_an_id_that_was_leased_again_is_not_renewed():
    table = LeaseTable(1, 10.0)
    streams = table.claim(1, 1, 0.0)
    table.claim(2, 1, 20.0)
    assert not table.renew(1, streams, 20.0)
    assert not table.renew(1, [Stream(5, 1)], 20.0)
    assert not table.renew(1, [Stream(-1, 1)], 20.0)


def test_a_restarted_learner_keeps_leases_and_repeats_no_incarnation(monkeypatch):
    monkeypatch.setattr(secrets, "randbelow", lambda bound: bound - 1)
    before = LeaseTable(3, 10.0, epoch=1)
    held = before.claim(1, 1, 0.0)
    monkeypatch.setattr(secrets, "randbelow", lambda bound: 0)  # Only the epoch makes the next incarnation higher.
    after = LeaseTable(3, 10.0, epoch=2)
    assert after.renew(1, held, 0.0)
    (other,) = after.claim(2, 1, 0.0)
    assert other.actor_id == 1
    assert other.incarnation > held[0].incarnation


@pytest.mark.parametrize("seed", range(5))
def test_no_id_is_leased_to_two_sessions(seed):
    rng = np.random.default_rng(seed)
    table, now, seen = LeaseTable(8, 10.0), 0.0, {}
    for _ in range(500):
        now += rng.random() * 3
        session = int(rng.integers(5))
        if rng.random() < 0.2:
            table.release(session)
        elif rng.random() < 0.5:
            table.renew(session, table.held(session), now)
        else:
            table.claim(session, int(rng.integers(1, 6)), now)
        held = [stream for s in range(5) for stream in table.held(s)]
        assert len(set(ids(held))) == len(held)
        for s in range(5):
            for stream in table.held(s):
                assert seen.setdefault(stream, s) == s  # An incarnation belongs to only one session.


def test_an_incarnation_of_no_lease_is_not_renewed():
    table = LeaseTable(3, 10.0, epoch=1)
    (newest,) = table.claim(2, 1, 0.0)
    assert table.renew(1, [Stream(1, 1 << 32)], 0.0)
    assert not table.renew(1, [Stream(0, newest.incarnation + 1)], 0.0)


def test_each_start_of_the_learner_has_new_incarnations():
    (first,), (second,) = (LeaseTable(1, 10.0, epoch=epoch).claim(1, 1, 0.0) for epoch in (1, 2))
    assert (first.incarnation >> 32, second.incarnation >> 32) == (1, 2)


def test_an_older_incarnation_is_not_renewed_after_a_release():
    table = LeaseTable(1, 10.0)
    (old,) = table.claim(1, 1, 0.0)
    table.release(1)
    table.claim(2, 1, 1.0)
    table.release(2)
    assert not table.renew(1, [old], 2.0)  # Replay knows the newer incarnation and refuses the older.
    assert table.num_leased == 0
