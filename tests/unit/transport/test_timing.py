"""The timings fit each other. docs/protocol.md includes the module itself."""

from __future__ import annotations

from apex.transport import timing


def test_what_is_waited_for_longer_comes_later():
    assert timing.RECEIPT_SECONDS < timing.RECEIPT_SILENCE_SECONDS < timing.RESEND_SECONDS < timing.MOST_RESEND_SECONDS
    assert timing.MOST_RESEND_SECONDS <= timing.RENEW_SECONDS < timing.STREAM_LIFE_SECONDS
    assert timing.TAKEOVER_HEARTBEATS < timing.ABSENT_HEARTBEATS
    assert timing.HELLO_SECONDS < timing.END_NOTICE_SECONDS < timing.FORGET_SECONDS
