"""A server that attaches notices damage of the replay memory; what a killed writer leaves behind is no damage."""

import shutil

import numpy as np
import pytest
from support.builders import RUN, VECTORS, make_segment

from apex.transport.run_codec import RunCodec
from apexreplay.client.segment_buffer import SegmentBuffer
from apexreplay.errors import DamagedMemoryError
from apexreplay.item_kinds import Sequence, Window
from apexreplay.store.deduplication import InsertOutcome
from apexreplay.store.file import open_file
from apexreplay.store.layout import COMMIT, END_BYTE, FIRST_BYTE, FIRST_KEY, TORN, StoreSettings
from apexreplay.store.location import has_owner
from apexreplay.store.writer import StoreWriter
from apexreplay.tables import table
from apexreplay.types import PriorityUpdate, Segment, Stream
from apexreplay.wire.codec import Codec

VALUES = {"n_step_return": "float32", "action": "int64"}
TABLES = {
    "transitions": VECTORS.table,
    "steps": table("steps", {"x": ("float32", (4,))}, values=VALUES),
    "windows": table(
        "windows", {"x": ("float32", (2,)), "image": ("uint8", (4,), "lz4")}, item=Window(2, 3), values=VALUES
    ),
    "sequences": table("sequences", {"x": ("float32", (2,))}, item=Sequence(3, 1), values=VALUES),
}
COUNT, NUM_SEGMENTS = 20, 50  # transitions of a segment; segments of each of the streams 0 and 1
# Live are the newest 35 segments. The slots wrap within a segment, and the arena between two.
SETTINGS = StoreSettings(capacity=710, max_bytes=20_000, num_streams=4, priority_exponent=0.6, min_priority=1e-6)
LEAVES = 1_024  # number of the first leaf's node


def table_of(path):
    """Returns the table of a store, which is named after it."""
    return TABLES[path.name]


def segment_of(declared, number, actor_id=0):
    """Returns a segment; every second one comes from a message, with the checksum of the message."""
    if declared is VECTORS.table:
        codec = RunCodec(RUN, VECTORS)
        segment = make_segment(VECTORS, COUNT, actor_id=actor_id, incarnation=1, number=number, base=0, first=number)
    else:
        codec, buffer = Codec(RUN, declared), SegmentBuffer(declared)
        for step in range({"step": 0, "window": -1, "sequence": -2}[declared.item.kind], COUNT):
            fields = {"x": np.full(declared.steps[0][1].shape, step + number), "image": [step + 1, number, 0, 9]}
            values = {"n_step_return": step, "action": number % 2}
            buffer.append({name: fields[name] for name, _ in declared.steps}, values=values)
            if step >= 0 and isinstance(declared.item, Window):
                buffer.add_item(1.0, values, -2)
        segment = Segment(Stream(actor_id, 1), number, 11, *buffer.cut()[1:])
    return codec.decode_segment(codec.encode_segment(segment)) if number % 2 else segment


@pytest.fixture(scope="module", params=TABLES)
def sound(tmp_path_factory, request):
    """A store that has overwritten old segments and has new priorities."""
    path = tmp_path_factory.mktemp("sound") / request.param
    writer = StoreWriter.create(path, table_of(path), SETTINGS, store_incarnation=5)
    for number in range(NUM_SEGMENTS):
        for actor_id in (0, 1):
            assert writer.insert(segment_of(table_of(path), number, actor_id)) is InsertOutcome.STORED
    keys = np.arange(writer.first_key, writer.num_inserted, 3)
    writer.update_priorities(PriorityUpdate(0, 5, 0, 0, keys, np.linspace(0, 9, len(keys), dtype=np.float32)))
    writer.close()
    return path


@pytest.fixture
def path(sound, tmp_path):
    return shutil.copy(sound, tmp_path / sound.name)


def attach(path):
    return StoreWriter.attach(path, table_of(path), SETTINGS)


def cell(index, value=None, *, add=0):
    return lambda regions: regions.cells.__setitem__(index, regions.cells[index] + add if value is None else value)


def row(field, change):
    """Changes a field of the valid row of actor 0."""

    def apply(regions):
        place = 0, int(regions.streams["commit"][0].argmax())
        regions.streams[field][place] = change(regions.streams[field][place])

    return apply


def record(field, change, slots=slice(0, 700)):
    def apply(regions):
        regions.records[field][slots] = change(regions.records[field][slots])

    return apply


def node(nodes, value):
    return lambda regions: regions.tree._nodes.__setitem__(nodes, value)


def arena(change):
    return lambda regions: change(np.frombuffer(regions.arena, np.uint8))


def set_to(value):
    return lambda old: value


def flip(old):
    """Changes the lowest bit of an integer."""
    return old ^ old.dtype.type(1)


def flip_frame(regions):
    """Changes a bit of the last frame of the newest segment but one."""
    end = int(regions.records["segment"][regions.live_slots()[-1]]) % regions.sizes.arena_bytes
    np.frombuffer(regions.arena, np.uint8)[end - 9 : end - 8].__ixor__(1)  # Before it are at most 7 unused bytes.


KINDS = {
    "commit +5": cell(COMMIT, add=5),
    "commit -5": cell(COMMIT, add=-5),
    "first key +5": cell(FIRST_KEY, add=5),
    "first byte": cell(FIRST_BYTE, 1 << 40),
    "end byte far": cell(END_BYTE, 1 << 40),
    "end byte low": cell(END_BYTE, 8),
    "end byte negative": cell(END_BYTE, -8),
    "row contiguous": row("contiguous", set_to(1 << 40)),
    "row incarnation": row("incarnation", set_to((1 << 63) - 1)),
    "row bitmap": row("bitmap", set_to((1 << 64) - 1)),
    "row commit": lambda regions: regions.streams["commit"].__setitem__(0, -1),
    "record segment far": record("segment", set_to(1 << 40)),
    "record segment negative": record("segment", set_to(-(1 << 40))),
    "record key": record("key", set_to(4), slots=3),
    "record frame": record("frame", set_to(60_000)),
    "record return": record("n_step_return", set_to(np.nan)),
    "record action": record("action", set_to(99)),
    "leaves": node(slice(-SETTINGS.capacity, None), np.nan),
    "root": node(slice(0, 4), 1e300),
    "arena zeros": arena(lambda frames: frames.fill(0)),
    "arena ones": arena(lambda frames: frames.fill(255)),
    # Damage that looks plausible:
    "commit -20": cell(COMMIT, add=-COUNT),
    "first key +20": cell(FIRST_KEY, add=COUNT),
    "newest row": row("commit", set_to(-1)),
    "all rows": lambda regions: regions.streams.fill(0),
    "bit of a row": row("contiguous", flip),
    "bit of the incarnation": lambda regions: regions.header["store_incarnation"].__ixor__(1),
    "bit of an action": record("action", flip, slots=300),
    "bit of a version": record("version", flip, slots=300),
    "bit of the version of a later transition": record("version", flip, slots=301),
    "bit of a frame": flip_frame,
    "bits of checksums": lambda regions: regions.segment_checksums["final"].__ixor__(1),
    "weight": node(LEAVES + 5, 0.5),
    "weight above the bound": node(LEAVES + 5, 1e6),
    "weight of an evicted transition": node(LEAVES + 585, 0.5),
    "weight of no transition": node(-1, 0.5),
}
# A killed writer may leave these behind, and recovery repairs them.
REPAIRED = {"first byte", "root", "commit -20", "first key +20", "weight", "weight of an evicted transition"}


def damage(path, name, *, torn):
    regions = open_file(path, table_of(path), writable=True)
    regions.cells[TORN] = torn
    KINDS[name](regions)


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_damage_is_noticed(path, name):
    damage(path, name, torn=False)
    with pytest.raises(DamagedMemoryError, match=str(path)):
        attach(path)
    assert not has_owner(path)


@pytest.mark.parametrize("name", sorted(set(KINDS) - REPAIRED))
def test_damage_is_noticed_after_a_kill_too(path, name):
    damage(path, name, torn=True)
    with pytest.raises(DamagedMemoryError, match=str(path)):
        attach(path)


@pytest.mark.parametrize("name", sorted(REPAIRED))
def test_what_a_kill_leaves_half_written_is_repaired(path, name):
    damage(path, name, torn=True)
    writer = attach(path)
    for actor_id in (0, 1):
        for number in (NUM_SEGMENTS - 1, NUM_SEGMENTS):
            key, outcome = writer.num_inserted, writer.insert(segment_of(table_of(path), number, actor_id))
            assert outcome is InsertOutcome.DUPLICATE or writer.num_inserted == key + COUNT
    assert writer.num_inserted == 2 * (NUM_SEGMENTS + 1) * COUNT
    writer.close()
    attach(path).close()  # Everything is exact again.


def test_a_half_written_row_is_no_damage(path):
    regions = open_file(path, table_of(path), writable=True)
    place = 0, int(regions.streams["commit"][0].argmin())
    regions.streams["commit"][place], regions.cells[TORN] = regions.cells[COMMIT] + COUNT, True
    regions.streams["contiguous"][place] = 1 << 40
    for _ in range(2):
        writer = attach(path)
        assert writer.receipt(0).contiguous == NUM_SEGMENTS
        writer.close()


def test_the_checksum_of_the_message_protects_the_segment(path):
    writer = attach(path)
    assert writer.insert(segment_of(table_of(path), NUM_SEGMENTS)._replace(checksum=(1, 2))) is InsertOutcome.STORED
    writer.close()
    with pytest.raises(DamagedMemoryError, match=r"\b1 of 35\b"):
        attach(path)


def test_an_empty_store_is_sound(tmp_path):
    path = tmp_path / "steps"
    StoreWriter.create(path, table_of(path), SETTINGS, store_incarnation=5).close()
    attach(path).close()
