"""Received items that cannot be decoded are named, and given the lowest priority, so that they spoil few batches."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from support.builders import RUN

from apexreplay.client.sampler import BaseSampler
from apexreplay.client.segment_buffer import SegmentBuffer
from apexreplay.errors import DataError
from apexreplay.store.layout import StoreSettings
from apexreplay.store.reader import MAX_ATTEMPTS, StoreReader
from apexreplay.store.writer import StoreWriter
from apexreplay.tables import table
from apexreplay.types import BatchMessage, Segment, Stream
from apexreplay.wire.codec import Codec

SETTINGS = StoreSettings(100, 400_000, num_streams=1, priority_exponent=1.0, min_priority=1e-3)


@pytest.fixture
def part(tmp_path):
    """A batch of four items."""
    declared = table("t", {"x": ("uint8", (500,))})
    buffer, codec = SegmentBuffer(declared), Codec(RUN, declared)
    for step in range(20):
        buffer.append({"x": np.arange(500) % (step + 2)})
    piece = buffer.cut()
    writer = StoreWriter.create(tmp_path / "t", declared, SETTINGS, store_incarnation=7)
    message = codec.encode_segment(Segment(Stream(0, 5), 0, 0, piece.records, piece.blob))
    writer.insert(codec.decode_segment(message))
    sample = StoreReader(tmp_path / "t", declared).sample(4, np.random.default_rng(1))
    return declared, BatchMessage(0, 7, 2, 9, sample.num_transitions, sample.records, sample.blob)


def test_an_item_that_cannot_be_decoded_is_set_aside(part, caplog):
    declared, good = part
    damaged = bytearray(good.blob)
    damaged[-8:] = b"\xff" * 8  # the end of the last block
    parts, sent = [], []
    sampler = SimpleNamespace(
        table=declared,
        batch_size=4,
        _num_spoiled=0,
        _remote=SimpleNamespace(receive=lambda poll, waited: parts.pop(0)),
        _priorities=SimpleNamespace(send=sent.append),
    )
    sampler._set_aside = partial(BaseSampler._set_aside, sampler)
    bad = good._replace(blob=bytes(damaged))
    parts += [bad, good, *[bad] * MAX_ATTEMPTS]
    assert BaseSampler._receive(sampler, 0.0, 0.0) is None
    (update,) = sent
    assert (update.store_incarnation, update.sampler, update.number) == (7, 2, 9)
    assert 0 < len(update.keys) < 4
    assert set(update.keys) < set(good.records["key"])
    assert not update.priorities.any()
    assert str(update.keys[0]) in caplog.text
    assert BaseSampler._receive(sampler, 0.0, 0.0).keys.tolist() == good.records["key"].tolist()
    for _ in range(MAX_ATTEMPTS - 1):
        assert BaseSampler._receive(sampler, 0.0, 0.0) is None
    with pytest.raises(DataError) as raised:
        BaseSampler._receive(sampler, 0.0, 0.0)
    assert raised.value.remedy
