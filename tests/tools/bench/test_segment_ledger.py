"""The ledger of `bench connections` finds lost and doubled transitions, even if their numbers are equal."""

import pytest
from support.store_builders import SCHEMA, create, make_segment

from apexreplay.store.file import open_file
from bench.harness.command import VerificationError
from bench.harness.segment_ledger import Balance, SegmentLedger, tag


class Bench:
    """A store of 40 transitions and its ledger."""

    def __init__(self, path):
        self.writer = create(path)
        self.ledger = SegmentLedger(open_file(path, SCHEMA.table, writable=False))

    def store(self, actor_id, number, count, tagged=None):
        """Stores a segment, possibly with the tag of another, and updates the ledger."""
        segment = make_segment(number, actor_id, count=count)
        self.writer.insert(segment._replace(version=tag(*(tagged or (actor_id, number)))))
        self.ledger.look()


SENT = [(tag(actor_id, number), 5) for number in range(12) for actor_id in range(3)]  # 180 transitions


@pytest.mark.parametrize(
    ("number", "tagged", "balance"),
    [
        (None, None, Balance(0, 0)),
        (7, (1, 6), Balance(5, 5)),  # One segment is missing and another is stored twice: the totals agree.
        (7, (2, 7), Balance(5, 5)),
        (7, (1, 99), Balance(5, 5)),
    ],
)
def test_each_segment_is_counted_separately_while_the_store_wraps(path, number, tagged, balance):
    bench = Bench(path)
    for each in range(12):
        for actor_id in range(3):
            bench.store(actor_id, each, 5, tagged if (actor_id, each) == (1, number) else None)
    assert bench.ledger.num_transitions == 180
    assert bench.ledger.balance(SENT) == balance


def test_missing_and_surplus_transitions_are_counted(path):
    bench = Bench(path)
    bench.store(0, 0, 4)
    bench.store(1, 0, 5)
    assert bench.ledger.balance([(tag(0, 0), 5), (tag(1, 0), 3), (tag(2, 0), 6)]) == Balance(lost=7, twice=2)


def test_transitions_overwritten_uncounted_are_refused(path):
    bench = Bench(path)
    for number in range(3):
        bench.writer.insert(make_segment(number, count=20))
    with pytest.raises(VerificationError, match="20 transitions"):
        bench.ledger.look()


def test_tags_distinguish_all_actors_and_fit_the_field():
    tags = {tag(actor_id, number) for actor_id in (0, 1, 4095) for number in (0, 1, 2**20 - 1)}
    assert len(tags) == 9
    assert max(tags) == 2**32 - 1
    assert tag(3, 2**20) == tag(3, 0)
