"""A connection is made anew after 10 s of silence, then after twice as long each time, until its peer answers."""

from __future__ import annotations

from apex.transport.reconnect_backoff import ReconnectBackoff


def test_each_new_connection_comes_after_twice_the_silence():
    backoff = ReconnectBackoff()
    assert [second for second in range(100) if backoff.is_due(float(second))] == [10, 20, 40, 80]


def test_an_answer_begins_again():
    backoff = ReconnectBackoff()
    assert [backoff.is_due(silence) for silence in (10.0, 11.0, 0.0, 9.9, 10.0)] == [True, False, False, False, True]
