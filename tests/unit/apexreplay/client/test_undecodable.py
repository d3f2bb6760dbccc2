"""Items that cannot be decoded are named, and given the lowest priority, so that they spoil few batches."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from support.builders import RUN
from support.waiting import until

from apexreplay.client.sampler import BaseSampler, _MemoryReader
from apexreplay.client.segment_buffer import SegmentBuffer
from apexreplay.errors import DataError
from apexreplay.store.layout import StoreSettings
from apexreplay.store.reader import MAX_ATTEMPTS, StoreReader
from apexreplay.store.writer import StoreWriter
from apexreplay.tables import table
from apexreplay.types import BatchMessage, Segment, Stream
from apexreplay.wire.codec import Codec

SETTINGS = StoreSettings(100, 400_000, num_streams=1, priority_exponent=1.0, min_priority=1e-3)


def make_store(path, *, damage=False):
    """Stores 20 items. `damage`: the last one cannot be decoded, and is drawn nearly always."""
    declared = table("t", {"x": ("uint8", (500,))})
    buffer, codec = SegmentBuffer(declared), Codec(RUN, declared)
    for step in range(20):
        buffer.append({"x": np.arange(500) % (step + 2)})
    piece = buffer.cut()
    blob = bytearray(piece.blob)
    if damage:
        piece.records["priority"][-1] = 1e6
        blob[-8:] = b"\xff" * 8  # the end of the last block
    writer = StoreWriter.create(path, declared, SETTINGS, store_incarnation=7)
    message = codec.encode_segment(Segment(Stream(0, 5), 0, 0, piece.records, bytes(blob)))
    writer.insert(codec.decode_segment(message))
    return declared, writer


@pytest.fixture
def part(tmp_path):
    """A batch of four items."""
    declared, _ = make_store(tmp_path / "t")
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


def test_an_undecodable_item_with_most_of_the_weight_is_set_aside(place, monkeypatch):
    """By a sampler that reads the memory: it draws again, and the draws find the same item."""
    monkeypatch.setattr("apexreplay.client.sampler.store_path", lambda run_id: place / "t")
    declared, writer = make_store(place / "t", damage=True)
    limits = 1, 0.0, 0.0, False
    welcome = SimpleNamespace(run_id="1", num_rows=3, row=2, limiter=limits)
    reader, sent = _MemoryReader(declared, welcome, batch_size=4), []
    sampler = SimpleNamespace(table=declared, _num_spoiled=0, _priorities=SimpleNamespace(send=sent.append))
    sampler._set_aside = partial(BaseSampler._set_aside, sampler)
    assert BaseSampler._draw(sampler, reader) is None
    (update,) = sent
    assert (update.store_incarnation, update.sampler, update.number) == (7, 2, 0)
    assert update.keys.tolist() == [19]
    assert not update.priorities.any()
    assert BaseSampler._draw(sampler, reader) is None  # at once: the server may not have got the priorities
    assert len(sent) == 1
    with pytest.raises(DataError) as raised:
        until(lambda: BaseSampler._draw(sampler, reader), "error")
    assert raised.value.remedy
    assert len(sent) == MAX_ATTEMPTS - 1
    writer.update_priorities(update)
    batch = until(lambda: BaseSampler._draw(sampler, reader), "batch")
    assert batch.part.number == MAX_ATTEMPTS
    assert 19 not in batch.keys
