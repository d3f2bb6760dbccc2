"""The table of timings in docs/protocol.md has every constant of the module, with its value."""

from __future__ import annotations

import re
from pathlib import Path

from apex.transport import timing

PROTOCOL = Path(__file__).parents[3] / "docs" / "protocol.md"


def test_the_protocol_has_each_timing_with_its_value():
    constants = {name: value for name, value in vars(timing).items() if name.isupper()}
    rows = re.findall(r"^\| `([A-Z_]+)` \| ([0-9.]+)( heartbeats| probes)? \|", PROTOCOL.read_text(), re.MULTILINE)
    assert {name: float(value) for name, value, _ in rows} == constants


def test_what_is_waited_for_longer_comes_later():
    assert timing.RECEIPT_SECONDS < timing.RECEIPT_SILENCE_SECONDS < timing.RESEND_SECONDS < timing.MOST_RESEND_SECONDS
    assert timing.MOST_RESEND_SECONDS <= timing.RENEW_SECONDS < timing.STREAM_LIFE_SECONDS
    assert timing.TAKEOVER_HEARTBEATS < timing.ABSENT_HEARTBEATS
    assert timing.HELLO_SECONDS < timing.END_NOTICE_SECONDS < timing.FORGET_SECONDS
