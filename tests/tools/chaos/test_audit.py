"""The audit reports lost, doubled, changed and invented transitions, and passes a correct run."""

import os
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
from support.builders import VECTORS, make_records
from support.builders import make_segment as build_segment

from apex.config import Config
from apexreplay.snapshots.folder import SnapshotFolder
from apexreplay.snapshots.restore import restore
from apexreplay.snapshots.writer import SnapshotWriter
from apexreplay.store.deduplication import InsertOutcome
from apexreplay.store.file import open_file
from apexreplay.store.layout import StoreSettings
from apexreplay.store.writer import StoreWriter
from apexreplay.types import Receipt, Stream
from chaos import audit
from chaos.audit import Follower, judge
from chaos.ledger import ENTRY, Ledger, LedgerReader
from chaos.run import ChaosRun

SETTINGS = StoreSettings(capacity=1_000, max_bytes=100_000, num_streams=4, priority_exponent=1.0, min_priority=0.5)
COUNT = 5  # transitions in a segment


def make_segment(number, *, incarnation=7, base=0):
    """Returns transitions that differ from those of every other number and incarnation."""
    marks = 1_000 * incarnation + 10 * number + np.arange(COUNT)
    records = make_records(VECTORS, COUNT, n_step_return=marks)
    return build_segment(VECTORS, COUNT, incarnation=incarnation, number=number, base=base, records=records)


class Bench:
    """An actor's ledger, a store, and the audit of both."""

    def __init__(self, folder, memory):
        self.folder, self.path = folder, memory / "store"
        self.ledger = Ledger(folder)
        self.reader = LedgerReader(folder)
        self.store = StoreWriter.create(self.path, VECTORS.table, SETTINGS, store_incarnation=77)
        self.follower = Follower(self.path, VECTORS)

    def send(self, *numbers, store=True, acknowledge=True, incarnation=7, **fields):
        for number in numbers:
            segment = make_segment(number, incarnation=incarnation, **fields)
            self.ledger.note_sent(segment)
            if store:
                assert self.store.insert(segment) is InsertOutcome.STORED
            if acknowledge:
                self.ledger.note_receipt(Receipt(segment.stream, 77, number + 1, 0))

    def restart(self, **sizes):
        """Replaces the store, whose memory is lost."""
        self.store.close()
        self.path.unlink()
        self.store = StoreWriter.create(self.path, VECTORS.table, SETTINGS._replace(**sizes), store_incarnation=78)

    def audit(self):
        self.reader.read()
        self.follower.read()
        self.follower.look_again()
        return judge(self.reader.entries, [self.follower.content])

    def change(self, region, offset):
        """Flips one bit of the file."""
        at = SETTINGS.sizes.offsets(VECTORS.table)[region] + offset
        with self.path.open("r+b") as file:
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 1]))


@pytest.fixture
def bench(tmp_path):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        yield Bench(tmp_path, Path(memory))


def test_a_run_passes_if_every_transition_is_stored_once(bench):
    bench.send(0, 1, 2)
    bench.send(3, acknowledge=False)  # Its receipt has not arrived yet, which is not a fault.
    bench.send(4, store=False, acknowledge=False)  # The actor died before an acknowledgement.
    verdict = bench.audit()
    assert verdict.passed
    assert (verdict.sent, verdict.acknowledged, verdict.stored) == (25, 15, 20)


def test_an_acknowledged_but_missing_segment_is_lost(bench):
    bench.send(0)
    bench.send(1, store=False)
    bench.send(2)
    verdict = bench.audit()
    assert not verdict.passed
    assert verdict.lost == COUNT


def test_segments_stored_during_a_look_are_correct(bench, tmp_path, monkeypatch):
    bench.send(0)
    read = bench.follower.read
    # Between the reading of ledgers and stores, two segments are stored; the receipt of one counts at the next look.
    monkeypatch.setattr(bench.follower, "read", lambda: (bench.send(1, acknowledge=False), bench.send(2), read())[-1])
    monkeypatch.setattr(bench.follower, "look_again", lambda: bench.send(3))
    run = ChaosRun(Config(), tmp_path / "run", [], ())
    run.ledger, run.stores = bench.reader, [bench.follower]
    verdict = run.look().judge()
    assert verdict.passed, verdict.sentence()
    assert (verdict.sent, verdict.acknowledged, verdict.stored) == (4 * COUNT, COUNT, 3 * COUNT)


def test_a_segment_stored_twice_is_counted(bench):
    bench.send(0, 1)
    again = make_segment(1)._replace(number=2)
    bench.store.insert(again)  # as if deduplication had failed
    verdict = bench.audit()
    assert not verdict.passed
    assert (verdict.twice, verdict.lost, verdict.never_sent) == (COUNT, 0, 0)


def test_a_segment_that_was_never_sent_is_counted(bench):
    bench.send(0)
    bench.store.insert(make_segment(1))
    verdict = bench.audit()
    assert not verdict.passed
    assert verdict.never_sent == COUNT


@pytest.mark.parametrize(
    ("region", "offset"),
    [
        (2, 16),  # the n_step_return of key 0
        (2, 28),  # its version
        (4, 4 * 7 + 3),  # the first frame, after a table of 7 numbers
    ],
)
def test_a_flipped_bit_counts_as_lost_and_as_never_sent(bench, region, offset):
    bench.send(0, 1)
    bench.change(region, offset)
    verdict = bench.audit()
    assert not verdict.passed
    assert verdict.lost == verdict.never_sent > 0


def test_a_bit_flipped_after_it_was_read_is_detected(bench):
    bench.send(0, 1)
    assert bench.audit().passed
    bench.change(2, 16)
    assert bench.audit().changed == 1


def test_overwritten_transitions_were_read_before_and_are_not_lost(bench):
    bench.restart(capacity=12)
    for number in range(8):
        bench.send(number)
        bench.follower.read()
    verdict = bench.audit()
    assert bench.follower.first_key == 0
    assert bench.store.first_key > 0
    assert (verdict.lost, verdict.unseen, verdict.stored) == (0, 0, 40)


def test_transitions_overwritten_before_the_audit_are_counted(bench):
    bench.restart(capacity=12)
    bench.send(0)
    bench.follower.read()
    bench.send(*range(1, 8))
    verdict = bench.audit()
    assert not verdict.passed
    assert verdict.unseen > 0


def test_transitions_lost_with_their_memory_are_counted_separately(bench):
    bench.send(0, 1)
    bench.audit()
    bench.restart()
    segment = make_segment(2, base=2)
    bench.ledger.note_sent(segment)
    bench.store.insert(segment)
    bench.ledger.note_receipt(Receipt(segment.stream, 78, 3, 0))
    verdict = bench.audit()
    assert (verdict.lost, verdict.gone_with_memory) == (0, 2 * COUNT)
    assert not verdict.passed


def test_two_processes_with_one_lease_are_seen(bench):
    bench.send(0)
    Ledger(bench.folder).note_sent(make_segment(0))
    verdict = bench.audit()
    assert verdict.wrong == 1


def test_a_base_without_a_receipt_is_detected(bench):
    bench.send(0, store=False, acknowledge=False)
    bench.send(1, store=False, acknowledge=False, base=1)
    assert bench.audit().wrong == 1


def test_a_segment_that_is_sent_again_has_one_entry(bench):
    bench.send(0)
    bench.ledger.note_sent(make_segment(0))
    bench.ledger.note_receipt(Receipt(Stream(2, 7), 77, 1, 0))
    assert bench.audit().sent == bench.audit().acknowledged == COUNT


def test_an_incomplete_last_entry_does_not_count(bench):
    bench.send(0, 1)
    (path,) = bench.folder.glob("*.ledger")
    path.write_bytes(path.read_bytes()[: -ENTRY.itemsize - 1])  # without the receipt of 1
    bench.reader.read()
    assert len(bench.reader.entries.sent) == 1
    assert len(bench.reader.entries.acknowledged) == 1
    assert bench.reader.actors == {os.getpid(): {2}}


def test_a_bitmap_acknowledges_segments_out_of_order(bench):
    bench.send(0, 1, 2, acknowledge=False)
    bench.ledger.note_receipt(Receipt(Stream(2, 7), 77, 0, 0b10))  # only number 2
    assert bench.audit().acknowledged == COUNT
    assert list(bench.reader.entries.acknowledged) == [(2, 7, 2)]


def test_removed_committed_keys_are_detected(bench):
    bench.send(0, 1)
    assert bench.audit().passed
    with bench.path.open("r+b") as file:
        file.seek(512)  # The commit number.
        file.write(struct.pack("<q", COUNT))
    assert bench.audit().changed == COUNT


def test_transitions_missing_in_the_last_snapshot_are_lost(bench):
    bench.restart(capacity=12)
    for number in range(4):
        bench.send(number)
        bench.follower.read()
    bench.reader.read()
    live = bench.follower.content._replace(store_incarnation=77)  # the incarnation in the receipts of this test
    first = bench.store.first_key
    whole = live._replace(store_incarnation=99, first_key=first, digests=live.digests[first:])
    assert judge(bench.reader.entries, [whole.on_top_of(live)]).passed
    short = whole._replace(digests=whole.digests[:-COUNT])  # taken before the last segment
    verdict = judge(bench.reader.entries, [short.on_top_of(live._replace(unseen=1, changed=2))])
    assert (verdict.lost, verdict.gone_with_memory, verdict.unseen, verdict.changed) == (COUNT, 0, 1, 2)


def test_transitions_overwritten_before_a_restore_are_not_lost(bench, tmp_path):
    bench.restart(capacity=12)
    for number in range(4):
        bench.send(number)
        bench.follower.read()
    folder = SnapshotFolder(tmp_path / "snapshots")
    SnapshotWriter(bench.path, VECTORS.table, folder, run_id=1, num_drawn=lambda: 0).take()
    bench.store.close()
    bench.path.unlink()
    settings = SETTINGS._replace(capacity=12)
    bench.store = restore(folder, bench.path, VECTORS.table, settings, run_id=1, store_incarnation=79)
    assert bench.store.first_key == 2 * COUNT
    bench.send(4)
    verdict = bench.audit()
    assert verdict.passed, verdict.sentence()
    assert verdict.stored == 5 * COUNT


def test_transitions_without_a_weight_are_counted(bench, monkeypatch):
    monkeypatch.setattr(audit, "WRITE_SECONDS", 0.0)
    bench.send(0, 1)
    regions = open_file(bench.path, VECTORS.table, writable=True)
    weight = regions.tree.weights(np.array([3]))
    regions.tree.set(np.array([3]), np.zeros(1))  # as after a recovery that forgets keys without a weight
    verdict = bench.audit()
    assert not verdict.passed
    assert (verdict.weightless, verdict.lost) == (1, 0)
    regions.tree.set(np.array([3]), weight)
    assert bench.audit().passed
