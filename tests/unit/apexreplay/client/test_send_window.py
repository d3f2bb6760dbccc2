"""A send window keeps unacknowledged segments, counts from its base, and decides when to send again."""

import pytest

from apexreplay.client.send_window import MOST_RESEND_SECONDS, RESEND_SECONDS, SendWindow
from apexreplay.transport.timing import RECEIPT_REPEAT_SECONDS
from apexreplay.types import Receipt, Stream

STREAM = Stream(3, 9)


def window_with(count, size=8):
    window = SendWindow(STREAM, size)
    for number in range(count):
        window.add([f"segment {number}".encode()], now=0.0)
    return window


def receipt(contiguous, bitmap=0, store=1, stream=STREAM):
    return Receipt(stream, store, contiguous, bitmap)


def numbers(messages):
    return [int(message[0].split()[1]) for message in messages]


def test_a_window_is_full_until_its_oldest_segment_is_acknowledged():
    window = window_with(3, size=3)
    assert window.full
    window.acknowledge(receipt(0, bitmap=0b11), now=1.0)
    assert window.full  # Segment 0 is missing.
    window.acknowledge(receipt(3), now=1.0)
    assert not window.full


@pytest.mark.parametrize(
    ("contiguous", "bitmap", "left"),
    [(0, 0, [0, 1, 2, 3, 4]), (2, 0, [2, 3, 4]), (5, 0, []), (1, 0b1, [1, 3, 4]), (1, 0b101, [1, 3]), (0, 0b1111, [0])],
)
def test_acknowledged_segments_are_dropped(contiguous, bitmap, left):
    window = window_with(5)
    window.acknowledge(receipt(contiguous, bitmap), now=1.0)
    assert numbers(window.resend(now=2.0)) == left
    assert window.in_flight == len(left)
    assert window.base == (left[0] if left else 5)


def test_receipts_of_another_stream_or_incarnation_are_ignored():
    window = window_with(2)
    window.acknowledge(receipt(2, stream=Stream(3, 8)), now=1.0)
    window.acknowledge(receipt(2, stream=Stream(4, 9)), now=1.0)
    assert window.in_flight == 2


def test_a_window_is_overdue_only_without_progress():
    window = window_with(3)
    assert not window.overdue(now=RESEND_SECONDS - 0.1)
    window.acknowledge(receipt(1), now=RESEND_SECONDS - 0.1)
    assert not window.overdue(now=RESEND_SECONDS + 0.1)
    window.acknowledge(receipt(1), now=RESEND_SECONDS + 1.0)  # no progress
    assert window.overdue(now=2 * RESEND_SECONDS)


def repeat_receipts(window, contiguous, *, since, until):
    """Passes the same receipt as often as a server repeats it."""
    for tick in range(1, round((until - since) / RECEIPT_REPEAT_SECONDS)):
        window.acknowledge(receipt(contiguous), since + RECEIPT_REPEAT_SECONDS * tick)


def test_slow_progress_causes_only_one_resend():
    """While inserts wait for the learner, a segment may be stored only every 2.5 s."""
    window = window_with(6)
    resent = []
    for tick in range(1, 126):
        now = tick / 10
        window.acknowledge(receipt(tick // 25), now)
        if window.overdue(now):
            resent.append(now)
            window.resend(now)
    assert resent == [RESEND_SECONDS]


def test_the_resend_time_is_bounded_and_shrinks_with_quick_progress():
    window = window_with(4)
    repeat_receipts(window, 0, since=0.0, until=100.0)
    window.acknowledge(receipt(1), now=100.0)
    assert not window.overdue(now=99.9 + MOST_RESEND_SECONDS)
    assert window.overdue(now=100.0 + MOST_RESEND_SECONDS)
    window.acknowledge(receipt(2), now=100.5)
    assert not window.overdue(now=100.4 + RESEND_SECONDS)
    assert window.overdue(now=100.5 + RESEND_SECONDS)


def test_an_outage_does_not_lengthen_the_resend_time():
    """No receipts arrived, so the store was not slow, and segments may be lost."""
    window = window_with(4)
    repeat_receipts(window, 0, since=0.0, until=2.0)
    window.acknowledge(receipt(1), now=8.0)
    assert window.overdue(now=8.0 + RESEND_SECONDS)


def test_an_empty_window_is_not_overdue():
    window = window_with(0)
    assert not window.overdue(now=1000.0)
    window.add([b"segment 0"], now=1000.0)
    assert not window.overdue(now=1001.0)
    assert window.overdue(now=1000.0 + RESEND_SECONDS)


def test_a_resend_is_counted_and_restarts_the_clock():
    window = window_with(2)
    assert numbers(window.resend(now=5.0)) == [0, 1]
    assert window.num_resent == 2
    assert not window.overdue(now=6.0)


def test_a_new_store_gets_all_unacknowledged_segments():
    window = window_with(2)
    assert not window.acknowledge(receipt(0, store=1), now=1.0)
    assert not window.acknowledge(receipt(0, store=1), now=1.0)
    assert window.acknowledge(receipt(0, store=2), now=1.0)
    assert not window.acknowledge(receipt(2, store=3), now=1.0)  # All segments are acknowledged.
