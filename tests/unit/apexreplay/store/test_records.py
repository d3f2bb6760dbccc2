"""The store and its snapshots keep every field of a transition unchanged, for all kinds of actions."""

import numpy as np
import pytest
from support.builders import CONTINUOUS, MASKED, PIXELS, RUN, VECTORS, make_records, make_segment

from apex.schema import Schema
from apexreplay.snapshots.folder import SnapshotFolder
from apexreplay.snapshots.restore import restore
from apexreplay.snapshots.writer import SnapshotWriter
from apexreplay.store.file import open_file
from apexreplay.store.layout import StoreSettings, stored_record_dtype
from apexreplay.store.reader import StoreReader
from apexreplay.store.writer import StoreWriter

SETTINGS = StoreSettings(capacity=100, max_bytes=100_000, num_streams=4, priority_exponent=1.0, min_priority=1e-6)
COUNT = 13


def assert_holds(path, schema, sent):
    """Returns the segment stored at keys 0 ... 12, and the records of a batch."""
    stored = open_file(path, schema.table, writable=False).records[:COUNT]
    for name in sent.dtype.names:
        np.testing.assert_array_equal(stored[name], sent[name], err_msg=name)
    drawn = StoreReader(path, schema.table).sample(200, np.random.default_rng(0)).records
    for name in ("n_step_return", "discount", "action", "depth", "next_depth", *["next_mask"] * schema.masked):
        np.testing.assert_array_equal(drawn[name], sent[name][drawn["key"]], err_msg=name)
    assert set(drawn["key"].tolist()) == set(range(COUNT))


@pytest.mark.parametrize("schema", [PIXELS, VECTORS, CONTINUOUS, MASKED])
def test_every_field_survives_store_and_snapshot(tmp_path, schema):
    sent = make_records(schema, COUNT)
    path, again = tmp_path / "store", tmp_path / "restored"
    writer = StoreWriter.create(path, schema.table, SETTINGS, store_incarnation=1)
    writer.insert(make_segment(schema, COUNT, base=0, number=0, records=sent))
    assert_holds(path, schema, sent)
    folder = SnapshotFolder(tmp_path / "snapshots")
    SnapshotWriter(path, schema.table, folder, run_id=RUN, num_drawn=lambda: 0).take()
    restored = restore(folder, again, schema.table, SETTINGS, run_id=RUN, store_incarnation=2)
    assert_holds(again, schema, sent)
    restored.close()
    writer.close()


@pytest.mark.parametrize(
    ("schema", "wire", "stored"), [(PIXELS, 34, 56), (VECTORS, 34, 56), (CONTINUOUS, 38, 64), (MASKED, 36, 56)]
)
def test_the_bytes_of_a_transition(schema, wire, stored):
    assert (schema.table.record.itemsize, stored_record_dtype(schema.table).itemsize) == (wire, stored)


def test_schema_of_an_older_version_is_refused_with_missing_fields():
    saved = PIXELS.to_dict()
    assert Schema.from_dict(saved) == PIXELS
    del saved["action_size"], saved["masked"]
    with pytest.raises(ValueError, match="action_size, masked"):
        Schema.from_dict(saved)
