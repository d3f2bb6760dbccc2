"""Tables of any fields, compared with a naive twin: what is drawn is what was appended, by memory and by message."""

import json
import re
import tracemalloc
from itertools import pairwise
from pathlib import Path

import lz4.block
import numpy as np
import pytest
from support.builders import PIXELS, RUN
from support.tables import TABLES, Twin

from apexreplay.client.segment_buffer import SegmentBuffer
from apexreplay.errors import UsageError
from apexreplay.frame_blob import make_blob, read_table
from apexreplay.frames.encoder import StepEncoder, make_targets, name_arrays
from apexreplay.frames.stack_decoder import StackDecoder
from apexreplay.item_kinds import MAX_STEPS, Sequence, Window
from apexreplay.store.layout import StoreSettings
from apexreplay.store.reader import StoreReader
from apexreplay.store.writer import StoreWriter
from apexreplay.tables import Field, Table, table
from apexreplay.types import BatchMessage, Segment, Stream
from apexreplay.wire.codec import Codec
from apexreplay.wire.header import WireError

SETTINGS = StoreSettings(100, 400_000, num_streams=2, priority_exponent=0.5, min_priority=1e-3)


def decode(declared: Table, batch: BatchMessage):
    targets = make_targets(declared, len(batch.records))
    for target in targets:
        target.view(np.uint8)[...] = 255  # whatever an earlier batch left
    decoder = StackDecoder(declared, targets)
    assert decoder.decode(batch.records, batch.blob, np.arange(len(batch.records))).all()
    return name_arrays(declared, targets)


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("seed", range(3))
def test_a_draw_returns_what_was_appended(tmp_path, name, seed):
    declared = TABLES[name]
    twin, codec = Twin(declared, seed), Codec(RUN, declared)
    path = tmp_path / "t.replay"
    writer = StoreWriter.create(path, declared, SETTINGS, store_incarnation=7)
    reader = StoreReader(path, declared)
    rng, number = np.random.default_rng(seed), 0
    for count in range(400 if declared.item.kind != "sequence" else 1_600):
        twin.step()
        if rng.random() < 0.8:
            twin.item()
        if rng.random() < 0.15:
            twin.end()
        if len(twin.buffer) >= (20 if declared.item.kind != "sequence" else 5):
            piece = twin.buffer.cut()
            segment = Segment(Stream(1, 5), number, 3, piece.records, piece.blob)
            writer.insert(codec.decode_segment(codec.encode_segment(segment)))
            number += 1
        if count % 60 != 59 or not number:
            continue
        sample = reader.sample(32, rng)
        assert sample is not None
        part = BatchMessage(0, 7, 0, 0, sample.num_transitions, sample.records, sample.blob)
        batch = codec.decode_batch(codec.encode_batch(part), 32)
        arrays = decode(declared, batch)
        draw = reader.draw(32, rng)
        located = make_targets(declared, len(draw.records))
        assert StackDecoder(declared, located).decode_located(draw.frames, np.arange(len(draw.records))).all()
        assert reader.still_live(draw).all()
        for records, named in ((batch.records, arrays), (draw.records, name_arrays(declared, located))):
            assert (records["version"] == 3).all()
            twin.check(records["key"], {**{name: records[name] for name in records.dtype.names}, **named})
    assert number >= 8
    assert writer.num_inserted > writer.size  # The oldest were evicted.


@pytest.mark.parametrize("name", ["image and numbers", "a dictionary", "windows of a dictionary"])
def test_a_wrong_length_of_any_entry_is_refused(name):
    declared = TABLES[name]
    twin, codec = Twin(declared, 1), Codec(RUN, declared)
    for _ in range(8):
        twin.step()
        twin.item()
    piece = twin.buffer.cut()
    offsets = read_table(piece.blob)
    entries = [piece.blob[start:stop] for start, stop in pairwise(offsets)]
    last = next(entry for entry in declared.entries if entry.codec == "raw")
    column = declared.entries.index(last)

    def send(changed):
        segment = Segment(Stream(1, 5), 0, 3, piece.records, make_blob(changed))
        return codec.decode_segment(codec.encode_segment(segment))

    assert len(send(entries).records) == len(piece.records)
    for index, wrong in (
        (column, entries[column][:-1]),
        (column, entries[column] + b"\0"),
        (0, entries[0] + bytes(declared.entries[0].max_bytes)),
    ):
        with pytest.raises(WireError, match=r"^blob"):
            send([*entries[:index], wrong, *entries[index + 1 :]])
    with pytest.raises(WireError, match=r"^blob"):
        send(entries[:-1])  # a step without its last entry
    rows = np.frombuffer(bytearray(entries[column]), last.dtype)
    floats = [field for field in last.names if rows[field].dtype.kind == "f"]
    for field in floats:
        spoiled = rows.copy()
        spoiled[field] = np.nan
        with pytest.raises(WireError, match="finite"):
            send([*entries[:column], spoiled.tobytes(), *entries[column + 1 :]])


def peak_bytes(call):
    """Returns the result of `call`, and the maximum of the bytes that it allocated."""
    tracemalloc.start()
    try:
        return call(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_large_raw_field_beside_others_takes_little_memory():
    declared = table("t", {"image": ("uint8", (20, 16)), "depth": ("float32", (256, 256))})
    twin, codec = Twin(declared, 1), Codec(RUN, declared)
    for _ in range(8):
        twin.step()
    piece = twin.buffer.cut()
    message = codec.encode_segment(Segment(Stream(1, 5), 0, 3, piece.records, piece.blob))
    segment, peak = peak_bytes(lambda: codec.decode_segment(message))
    assert len(segment.records) == 8
    assert peak < 3 * len(piece.blob)
    targets, records = make_targets(declared, 8), np.zeros(8, declared.batch_record)
    records["num_frames"] = 1
    decoder = StackDecoder(declared, targets)
    decoded, peak = peak_bytes(lambda: decoder.decode(records, segment.blob, np.arange(8)))
    assert decoded.all()
    assert peak < 3 * len(piece.blob)
    for name, array in name_arrays(declared, targets).items():
        np.testing.assert_array_equal(array, [step[name] for step in twin.steps])


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("image and numbers", {"frame": 8}),
        ("windows of an image", {"next_frame": 8}),
        ("windows of an image", {"depth": 0}),
        ("windows of an image", {"next_depth": 0}),
        ("windows of an image", {"depth": 5}),
        ("windows of an image", {"depth": 2, "frame": 0}),
        ("windows of an image", {"frame": 7, "next_frame": 7}),
        ("windows of an image", {"frame": 0, "next_frame": 4}),
    ],
    ids=str,
)
def test_references_beyond_the_steps_are_refused(name, changed):
    twin, codec = Twin(TABLES[name], 1), Codec(RUN, TABLES[name])
    while len(twin.steps) < 8:
        twin.step()
        twin.item()
    _, records, blob = twin.buffer.cut()
    segment = Segment(Stream(1, 5), 0, 3, records, blob)
    assert len(codec.decode_segment(codec.encode_segment(segment)).records) == len(records)
    for field, value in changed.items():
        records[field][-1] = value
    with pytest.raises(WireError, match=r"^steps"):
        codec.decode_segment(codec.encode_segment(segment))


@pytest.mark.parametrize(
    ("declare", "named"),
    [
        (lambda: table("T", {"x": "int64"}), "'T'"),
        (lambda: table("t", {"x y": "int64"}), "'x y'"),
        (lambda: table("t", {}), "'t'"),
        (lambda: table("t", {3: "int64"}), "3"),
        (lambda: table("t", {"x": "bool"}), "'bool'"),
        (lambda: table("t", {"x": "object"}), "'object'"),
        (lambda: table("t", {"x": "complex64"}), "'complex64'"),
        (lambda: table("t", {"x": "float128"}), "'float128'"),
        (lambda: table("t", {"x": "nonsense"}), "'nonsense'"),
        (lambda: table("t", {"x": ("int64", (0,))}), r"\(0,\)"),
        (lambda: table("t", {"x": ("int64", (2.5,))}), r"2\.5"),
        (lambda: table("t", {"x": ("int64", (2,), "zip")}), "'zip'"),
        (lambda: table("t", {"x": ("uint8", (2**24, 2**24))}), str(2**48)),
        (lambda: table("t", {"x": {"shape": (2,)}}), "dtype"),
        (lambda: table("t", {"x": {"dtype": "int64", "size": 2}}), "size"),
        (lambda: table("t", {"x": "int64"}, values={"x": "int64"}), "x"),
        (lambda: table("t", {"x": "int64"}, values={"key": "int64"}), "key"),
        (lambda: table("t", {"x": "int64"}, values={"frame": "int64"}), "frame"),
        (lambda: table("t", {"x": "int64", "next_x": "int64"}, item=Window(1, 1)), "next_x"),
        (lambda: table("t", {"x": "int64"}, item=Window(1, 1), values={"next_x": "int64"}), "next_x"),
        (lambda: table("t", {"x": "int64"}, kept=("y",)), "y"),
        (lambda: Window(0, 1), "0"),
        (lambda: Window(4, 0), "0"),
        (lambda: Window(4, 2_000), "2000"),
        (lambda: Sequence(0), "0"),
        (lambda: Sequence(1_001), "1001"),
        (lambda: Sequence(4, 5), "5"),
        (lambda: Sequence(4, 2.0), "2.0"),
    ],
)
def test_a_wrong_declaration_is_refused(declare, named):
    with pytest.raises(UsageError, match=named):
        declare()


def test_short_forms_of_a_field_are_equal():
    long = Field("<f4", (3,), "raw")
    assert Field.of(("float32", (3,))) == Field.of(("float32", [3], "raw")) == long
    assert Field.of({"dtype": "float32", "shape": [3]}) == long
    assert Field.of(np.int16) == Field("<i2")
    assert Field.of(("uint8", (84, 84))).codec == "lz4"
    assert Field.of(("uint8", (15,))).codec == Field.of(("float32", (84, 84))).codec == "raw"


@pytest.mark.parametrize(
    ("step", "named"),
    [
        ({"x": 1.0}, "y"),
        ({"x": 1.0, "y": [1, 2], "z": 0}, "z"),
        ({"x": [1.0], "y": [1, 2]}, "x"),
        ({"x": np.nan, "y": [1, 2]}, "x"),
        ({"x": 1e300, "y": [1, 2]}, "x"),
        ({"x": 1.0, "y": [1.5, 2]}, "y"),
        ({"x": 1.0, "y": [1, 300]}, "y"),
        ({"x": 1.0, "y": [-1, 0]}, "y"),
        ({"x": "one", "y": [1, 2]}, "x"),
        ({"x": 1.0, "y": [[1], [1, 2]]}, "y"),
        ({1: 1.0, "y": [1, 2]}, "x"),
        (["x", "y"], "list"),
        (None, "NoneType"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_a_step_that_does_not_fit_is_refused(step, named):
    encoder = StepEncoder(table("t", {"x": "float32", "y": ("uint8", (2,))}))
    assert encoder.encode({"x": 1, "y": [1, 2]}) == [b"\0\0\x80?\x01\x02"]
    with pytest.raises(UsageError, match=f"'{named}'|`{named}`|a {named}$"):
        encoder.encode(step)


def test_items_of_two_episodes_or_of_old_steps_are_refused():
    buffer = SegmentBuffer(table("t", {"x": "int64"}, item=Window(2, 3)))
    for step in range(3):
        buffer.append({"x": step})
    for frame, following in ((-1, -1), (-1, -2), (-4, -1), (0, -1)):
        with pytest.raises(UsageError):
            buffer.add_item(1.0, {}, frame, following)
    for priority in (-1.0, np.nan, np.inf):
        with pytest.raises(UsageError, match="priority"):
            buffer.add_item(priority, {}, -2, -1)
    with pytest.raises(UsageError, match="'z'"):
        buffer.add_item(1.0, {"z": 1}, -2, -1)
    buffer.end_episode()
    buffer.append({"x": 3})
    with pytest.raises(UsageError, match="episodes"):
        buffer.add_item(1.0, {}, -2, -1)
    for step in range(4, 20):
        buffer.append({"x": step})
    with pytest.raises(UsageError):
        buffer.add_item(1.0, {}, -10, -8)
    with pytest.raises(UsageError, match="too old"):
        buffer.add_item(1.0, {}, -5, -4)
    buffer.add_item(1.0, {}, -4, -1)
    assert len(buffer) == 1


def test_sequences_of_two_episodes_or_of_old_steps_are_refused():
    buffer = SegmentBuffer(table("t", {"x": "int64"}, item=Sequence(4)))
    for step in range(3):
        buffer.append({"x": step})
    buffer.add_item(1.0, {})  # As many steps as there are.
    for frame, num_steps in ((-1, 0), (-1, 4), (-2, 3), (-4, 1)):
        with pytest.raises(UsageError):
            buffer.add_item(1.0, {}, frame, num_steps=num_steps)
    buffer.end_episode()
    for step in range(3, 9):
        buffer.append({"x": step})
        with pytest.raises(UsageError, match="num_steps"):
            buffer.add_item(1.0, {}, num_steps=min(step - 2, 4) + 1)
    records = buffer.cut().records
    assert (records["frame"].tolist(), records["depth"].tolist()) == ([2], [3])
    with pytest.raises(UsageError, match="too old"):
        buffer.add_item(1.0, {}, -2, num_steps=4)


def test_a_sequence_has_the_values_of_its_first_step():
    declared = table("t", {"x": "int64"}, item=Sequence(4, 2), values={"state": "int64"})
    buffer, state = SegmentBuffer(declared), np.zeros((), np.int64)
    for step in range(9):
        state[...] = step  # The same array, as an environment may pass it.
        buffer.append({"x": step}, priority=step, values={"state": state} if step % 2 == 0 else None)
    buffer.end_episode()
    buffer.append({"x": 9}, values={"state": state})
    buffer.end_episode()
    records = buffer.cut().records
    assert records["state"].tolist() == [0, 2, 4, 6, 8]
    assert records["priority"].tolist() == [0, 2, 4, 6, 1]
    assert records["frame"].tolist() == [3, 5, 7, 8, 9]
    assert records["depth"].tolist() == [4, 4, 4, 3, 1]
    with pytest.raises(UsageError, match="state"):
        buffer.append({"x": 10})
    assert len(buffer._steps) == 4


def test_a_single_number_can_be_compressed():
    (entry,) = StepEncoder(table("t", {"x": ("int64", (), "lz4")})).encode({"x": 7})
    assert lz4.block.decompress(entry, uncompressed_size=8) == (7).to_bytes(8, "little")


def test_items_far_apart_do_not_share_a_segment():
    """A queue whose inserts wait would not have room for all the steps between them."""
    item = Sequence(20)
    buffer, most = SegmentBuffer(table("t", {"x": "int64"}, item=item)), 0
    for step in range(1, 3_001):
        buffer.append({"x": step})
        if step % 500 == 0:
            buffer.add_item(1.0, {})
        if buffer.is_full(50, is_dense=True):
            piece = buffer.cut()
            most = max(most, len(piece.blob) / len(piece.records))
    assert 0 < most <= len(make_blob([bytes(8)] * item.segment_steps(1)))


def test_overlapping_sequences_store_their_steps_about_once():
    declared = table("t", {"x": ("uint8", (300,))}, item=Sequence(80, 40))
    rng, buffer, num_bytes, num_steps = np.random.default_rng(1), SegmentBuffer(declared), 0, 10_000
    steps = rng.integers(0, 256, (num_steps, 300), np.uint8)
    for step in steps:
        buffer.append({"x": step})
        if buffer.is_full(50):
            piece = buffer.cut()
            assert len(piece.records) == 50
            num_bytes += len(piece.blob)
    num_bytes += len(buffer.cut().blob)
    assert num_bytes <= 1.1 * sum(len(entry) for step in steps for entry in StepEncoder(declared).encode({"x": step}))


@pytest.mark.parametrize("length", [300, 1_000])
def test_a_segment_of_long_sequences_is_cut_by_its_steps(tmp_path, length):
    declared = table("t", {"x": "int64"}, item=Sequence(length, length // 10))
    twin, codec = Twin(declared, 1), Codec(RUN, declared)
    settings = SETTINGS._replace(capacity=1_000, max_bytes=4_000_000)
    writer = StoreWriter.create(tmp_path / "t", declared, settings, store_incarnation=7)
    for _ in range(20_000):
        twin.step()
        if twin.buffer.is_full(1_000):
            piece = twin.buffer.cut()
            assert MAX_STEPS - length < len(read_table(piece.blob)) - 1 <= MAX_STEPS
            message = codec.encode_segment(Segment(Stream(1, 5), writer.num_inserted, 0, piece.records, piece.blob))
            writer.insert(codec.decode_segment(message))
    draw = StoreReader(tmp_path / "t", declared).draw(32, np.random.default_rng(1))
    targets = make_targets(declared, 32)
    assert StackDecoder(declared, targets).decode_located(draw.frames, np.arange(32)).all()
    twin.check(draw.records["key"], name_arrays(declared, targets))


def test_fields_that_are_stored_together_have_strides_that_torch_takes():
    declared = table("t", {"state": ("float32", (4,)), "action": "int64", "reward": "float32"})
    arrays = name_arrays(declared, make_targets(declared, 3))
    assert all(stride % array.itemsize == 0 for array in arrays.values() for stride in array.strides)


def test_no_segment_has_more_steps_than_a_server_takes():
    assert Window(4, 100).segment_steps(4_096) == Sequence(80).segment_steps(4_096) == MAX_STEPS
    assert Window(4, 100).segment_steps(50) == 304


def test_the_protocol_shows_the_declaration_of_transitions():
    text = (Path(__file__).parents[3] / "docs/protocol.md").read_text()
    (shown,) = re.findall(r"```json\n(\{\"name\":\"transitions\".*?)```", text, re.S)
    schema = PIXELS.__class__(**{**PIXELS.to_dict(), "frame_shape": (84, 84), "num_actions": 6})
    declared = json.dumps(schema.table.to_dict(), separators=(",", ":"))
    assert shown.replace("\n", "") == declared
    assert schema.table.fingerprint != PIXELS.table.fingerprint
