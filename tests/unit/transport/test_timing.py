"""Timeouts are consistent, and the time between reconnects doubles until the peer answers."""

from apex.transport import timing as own
from apexreplay.transport import timing
from apexreplay.transport.sockets import ReconnectBackoff


def test_longer_waits_have_longer_timeouts():
    assert timing.RECEIPT_SECONDS + timing.RECEIPT_REPEAT_SECONDS < timing.RECEIPT_SILENCE_SECONDS
    assert timing.RECEIPT_SILENCE_SECONDS < timing.RESEND_SECONDS < timing.MOST_RESEND_SECONDS
    assert timing.MOST_RESEND_SECONDS <= timing.RENEW_SECONDS < timing.STREAM_LIFE_SECONDS
    assert own.TAKEOVER_HEARTBEATS < own.ABSENT_HEARTBEATS
    assert own.HELLO_SECONDS < own.END_NOTICE_SECONDS < own.FORGET_SECONDS


def test_the_time_between_reconnects_doubles_until_an_answer():
    backoff = ReconnectBackoff()
    assert [second for second in range(100) if backoff.is_due(float(second))] == [10, 20, 40, 80]
    assert [backoff.is_due(silence) for silence in (0.0, 9.9, 10.0, 11.0)] == [False, False, True, False]
    patient = ReconnectBackoff(transfer_seconds=5.0)
    assert [second for second in range(100) if patient.is_due(float(second))] == [15, 30, 60]
