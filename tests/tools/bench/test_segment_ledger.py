"""The books of the connections' benchmark see every transition that is lost or stored twice, even if as many are."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from support.store_builders import SCHEMA, create, make_segment

from apex.replay_memory.store.file import open_file
from bench.harness.command import VerificationError
from bench.harness.segment_ledger import Balance, SegmentLedger, tag


@pytest.fixture
def path():
    """A name in tmpfs; its folder goes with the test."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder) / "store"


class Bench:
    """A store of 40 transitions, and books that are kept of it."""

    def __init__(self, path):
        self.writer = create(path)
        self.ledger = SegmentLedger(open_file(path, SCHEMA, writable=False))

    def store(self, actor_id, number, count, tagged=None):
        """Stores a segment, tagged as another one where a test says so; the books are kept."""
        segment = make_segment(number, actor_id, count=count)
        self.writer.insert(segment._replace(version=tag(*(tagged or (actor_id, number)))))
        self.ledger.look()


SENT = [(tag(actor_id, number), 5) for number in range(12) for actor_id in range(3)]  # 180 transitions


@pytest.mark.parametrize(
    ("number", "tagged", "balance"),
    [
        (None, None, Balance(0, 0)),
        (7, (1, 6), Balance(5, 5)),  # One segment is missing and another there twice: the totals agree.
        (7, (2, 7), Balance(5, 5)),
        (7, (1, 99), Balance(5, 5)),
    ],
)
def test_each_segment_is_judged_for_itself_while_the_store_wraps(path, number, tagged, balance):
    bench = Bench(path)
    for each in range(12):
        for actor_id in range(3):
            bench.store(actor_id, each, 5, tagged if (actor_id, each) == (1, number) else None)
    assert bench.ledger.num_transitions == 180
    assert bench.ledger.balance(SENT) == balance


def test_what_is_missing_is_lost_and_what_is_too_much_is_stored_twice(path):
    bench = Bench(path)
    bench.store(0, 0, 4)
    bench.store(1, 0, 5)
    assert bench.ledger.balance([(tag(0, 0), 5), (tag(1, 0), 3), (tag(2, 0), 6)]) == Balance(lost=7, twice=2)


def test_nothing_sent_and_nothing_stored_balance(path):
    bench = Bench(path)
    bench.ledger.look()
    assert bench.ledger.balance([]) == Balance(0, 0)


def test_what_was_overwritten_before_it_was_counted_is_said(path):
    bench = Bench(path)
    for number in range(3):
        bench.writer.insert(make_segment(number, count=20))
    with pytest.raises(VerificationError, match="20 transitions were overwritten before they could be counted"):
        bench.ledger.look()


def test_tags_tell_the_last_actor_and_fit_the_field():
    tags = {tag(actor_id, number) for actor_id in (0, 1, 4095) for number in (0, 1, 2**20 - 1)}
    assert len(tags) == 9
    assert max(tags) == 2**32 - 1
    assert tag(3, 2**20) == tag(3, 0)
