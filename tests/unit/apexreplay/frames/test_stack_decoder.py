"""Stacks are decoded exactly, with shared frames and zero frames; invalid frames are refused."""

import mmap
import os
from itertools import chain

import numpy as np
import pytest
from support.builders import PIXELS, VECTORS, make_batch, make_frames

from apexreplay.frame_blob import MAX_BYTES, make_blob
from apexreplay.frames import lz4_blocks
from apexreplay.frames.encoder import COMPRESS
from apexreplay.frames.located import LOCATED, PART_BYTES, Arena, Located
from apexreplay.frames.lz4_blocks import load_native
from apexreplay.frames.stack_decoder import StackDecoder


def naive_stacks(schema, records, frames):
    """Returns the stacks by the definition, frame by frame."""
    stacks = np.zeros((2, len(records), *schema.observation_shape), schema.frame_dtype)
    first = 0
    for b, record in enumerate(records):
        for side, (newest, depth) in enumerate([("frame", "depth"), ("next_frame", "next_depth")]):
            for back in range(int(record[depth])):
                stacks[side, b, schema.stack - 1 - back] = frames[first + int(record[newest]) - back]
        first += int(record["num_frames"])
    return stacks


def random_records(schema, rng, count):
    records = np.zeros(count, schema.table.batch_record)
    for record in records:
        depth = int(rng.integers(1, schema.stack + 1))
        steps = int(rng.integers(1, schema.n_step + 1))
        record["depth"], record["next_depth"] = depth, min(depth + steps, schema.stack)
        record["frame"] = depth - 1
        record["next_frame"] = depth - 1 + steps
        record["num_frames"] = depth + steps
    return records


def empty_stacks(schema, count):
    stacks = np.empty((2, count, *schema.observation_shape), schema.frame_dtype)
    stacks.view(np.uint8)[...] = 0xEE  # Unwritten bytes keep this value.
    return stacks


@pytest.fixture(params=["native", "python"])
def make_decoder(request, monkeypatch):
    """Creates a decoder with the native code, or one in Python, which copies the frames out of an arena first."""
    if request.param == "python":
        monkeypatch.setattr(lz4_blocks, "load_native", lambda: None)
    elif load_native() is None:
        pytest.skip("installed without a C compiler, or there is no liblz4")
    return lambda schema, stacks: StackDecoder(schema.table, [stacks])


@pytest.mark.parametrize("schema", [PIXELS, VECTORS])
@pytest.mark.parametrize("seed", range(5))
def test_matches_the_definition(make_decoder, schema, seed):
    rng = np.random.default_rng(seed)
    records = random_records(schema, rng, 17)
    frames = [
        rng.integers(0, 256, schema.frame_shape).astype(schema.frame_dtype) for _ in range(records["num_frames"].sum())
    ]
    blob = make_blob([COMPRESS[schema.codec](frame) for frame in frames])
    stacks = empty_stacks(schema, 17)
    decoder = make_decoder(schema, stacks)
    for _ in range(2):  # A slot is used several times.
        assert decoder.decode(records, blob, np.arange(17)).all()
        np.testing.assert_array_equal(stacks, naive_stacks(schema, records, frames))


def test_refuses_frames_that_do_not_decompress_to_a_frame(make_decoder):
    batch = make_batch(PIXELS, 1)
    short = COMPRESS["lz4"](np.zeros((3, 5), np.uint8))
    for frame in (short, b"\xff" * 20, b"\x00"):
        compressed = [COMPRESS["lz4"](frame) for frame in make_frames(PIXELS, 5)]
        decoder = make_decoder(PIXELS, empty_stacks(PIXELS, 1))
        assert decoder.decode(batch.records, make_blob([frame, *compressed]), np.arange(1)).tolist() == [False]


def test_frame_that_begins_like_a_length_is_decoded():
    """27, 0, 0 and six more distinct bytes compress to a block whose first four bytes read as the number 7056."""
    schema = PIXELS.__class__(frame_shape=(84, 84), frame_dtype="uint8", stack=1, num_actions=2, n_step=1, codec="lz4")
    frame = np.random.default_rng(0).integers(0, 2, 7056, dtype=np.uint8)
    frame[:13] = [27, 0, 0, 1, 2, 3, 4, 5, 6, 1, 2, 3, 4]
    frame = frame.reshape(84, 84)
    compressed = COMPRESS["lz4"](frame)
    assert int.from_bytes(compressed[:4], "little") == frame.size
    records = np.zeros(1, schema.table.batch_record)
    records["num_frames"], records["next_frame"], records["depth"], records["next_depth"] = 2, 1, 1, 1
    stacks = empty_stacks(schema, 1)
    StackDecoder(schema.table, [stacks]).decode(records, make_blob([compressed, compressed]), np.arange(1))
    np.testing.assert_array_equal(stacks[0, 0, 0], frame)


@pytest.mark.parametrize("schema", [PIXELS, VECTORS])
def test_parts_of_a_batch_are_decoded_into_their_own_rows(make_decoder, schema):
    rng = np.random.default_rng(3)
    stacks, expected = empty_stacks(schema, 11), empty_stacks(schema, 11)
    decoder = make_decoder(schema, stacks)
    for first, count in ((7, 4), (2, 5)):
        records = random_records(schema, rng, count)
        frames = [
            rng.integers(0, 256, schema.frame_shape).astype(schema.frame_dtype)
            for _ in range(records["num_frames"].sum())
        ]
        blob = make_blob([COMPRESS[schema.codec](frame) for frame in frames])
        decoder.decode(records, blob, np.arange(first, first + count))
        expected[:, first : first + count] = naive_stacks(schema, records, frames)
        np.testing.assert_array_equal(stacks.view(np.uint8), expected.view(np.uint8))


def arena_of(seed, count=9, blob_at=64, schema=PIXELS):
    """Returns records, their frames, the frames' places in an arena that otherwise contains noise, and the arena."""
    rng = np.random.default_rng(seed)
    records = random_records(schema, rng, count)
    frames = [
        rng.integers(0, 3, schema.frame_shape).astype(schema.frame_dtype) for _ in range(records["num_frames"].sum())
    ]
    blob = make_blob([COMPRESS[schema.codec](frame) for frame in frames])
    arena = rng.integers(0, 256, (blob_at + len(blob) + 40) // 4 * 4).astype(np.uint8)
    arena[blob_at : blob_at + len(blob)] = np.frombuffer(blob, np.uint8)
    entries = np.empty(count, LOCATED)
    entries["blob"] = blob_at
    entries["first_frame"] = np.cumsum(records["num_frames"], dtype=np.int64) - records["num_frames"]
    for name in ("num_frames", "frame", "depth", "next_frame", "next_depth"):
        entries[name] = records[name]
    return records, frames, Located(Arena(arena.data, schema.table.max_entry_bytes), entries), arena


@pytest.mark.parametrize("seed", range(5))
def test_located_frames_are_decoded_by_the_definition(make_decoder, seed):
    records, frames, located, _ = arena_of(seed)
    stacks = empty_stacks(PIXELS, 17)
    rows = np.random.default_rng(seed).permutation(17)[: len(records)]
    decoder = make_decoder(PIXELS, stacks)
    assert decoder.decode_located(located, rows).all()
    if decoder._is_native:  # Its copy has room for the longest transition, and not for any.
        room = located.entries["num_frames"].max() * located.arena.max_frame_bytes
        assert len(decoder._blocks[0]._scratch) == room
    np.testing.assert_array_equal(stacks[:, rows], naive_stacks(PIXELS, records, frames))
    assert (np.delete(stacks.view(np.uint8), rows, axis=1) == 0xEE).all()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("row", -1),
        ("row", 9),
        ("row", 2**62),
        ("blob", -8),
        ("blob", 2**40),
        ("blob", 2**63 - 1),
        ("first_frame", -1),
        ("first_frame", 2**62),
        ("num_frames", 0),
        ("num_frames", 256),
        ("num_frames", 2**62),
        ("depth", 5),
        ("depth", -1),
        ("next_depth", 200),
        ("next_depth", -(2**62)),
    ],
)
def test_native_code_refuses_only_the_impossible_entry(name, value):
    if load_native() is None:
        pytest.skip("installed without a C compiler, or there is no liblz4")
    records, frames, located, _ = arena_of(0)
    stacks, rows, others = empty_stacks(PIXELS, 9), np.arange(9), np.arange(9) != 3
    located.entries[name][3] = rows[3] = value
    if name != "row":
        rows[3] = 3
    assert StackDecoder(PIXELS.table, [stacks]).decode_located(located, rows).tolist() == others.tolist()
    np.testing.assert_array_equal(stacks[:, others], naive_stacks(PIXELS, records, frames)[:, others])
    assert (stacks[:, 3].view(np.uint8) == 0xEE).all()


@pytest.mark.parametrize("last", [0, 2**16, 2**32 - 1])
def test_only_the_transition_with_an_impossible_table_is_refused(make_decoder, last):
    """Its last frame ends before its first frame, is larger than a frame can be, or ends outside of the arena."""
    records, frames, located, arena = arena_of(0)
    stacks = empty_stacks(PIXELS, 9)
    end = located.entries["blob"][8] + 4 * (located.entries["first_frame"][8] + records["num_frames"][8])
    arena[end : end + 4].view("<u4")[:] = last
    assert make_decoder(PIXELS, stacks).decode_located(located, np.arange(9)).tolist() == [True] * 8 + [False]
    np.testing.assert_array_equal(stacks[:, :8], naive_stacks(PIXELS, records, frames)[:, :8])


def test_an_overwritten_arena_never_leads_to_writes_outside_the_rows(make_decoder):
    rng = np.random.default_rng(2)
    records, _, located, intact = arena_of(2)
    stacks = empty_stacks(PIXELS, 11)
    decoder = make_decoder(PIXELS, stacks)
    num_refused = 0
    for _ in range(2_000):
        torn = intact.copy()
        start = int(rng.integers(0, len(torn)))
        torn[start : start + int(rng.integers(1, 200))] = rng.integers(0, 256)
        tables = torn[64 : 64 + 4 * int(records["num_frames"].sum() + 1)].view("<u4")
        tables[rng.integers(0, len(tables), 3)] = rng.integers(0, 2**32, 3)
        torn_arena = Arena(torn.data, PIXELS.table.max_entry_bytes)
        num_refused += (~decoder.decode_located(located._replace(arena=torn_arena), 1 + np.arange(9))).sum()
    assert num_refused > 1_000
    assert (stacks[:, 0].view(np.uint8) == 0xEE).all()
    assert (stacks[:, 10].view(np.uint8) == 0xEE).all()


class ChangingWords:
    """The words of an arena that a writer changes between two reads of the offset table."""

    def __init__(self, before, after):
        self.versions = iter((before, after))

    def take(self, entries, mode):
        return next(self.versions).take(entries, mode=mode)


def test_table_that_changes_between_two_reads_spoils_no_other_transition():
    records, frames, located, _ = arena_of(3)
    before = located.arena.words.copy()
    entry = (located.entries["blob"][4] + 4 * located.entries["first_frame"][4]) // 4 + 1
    located.arena.words[entry] += 1  # The end of the first frame of transition 4, and the start of its second.
    located.arena.words = ChangingWords(before, located.arena.words)
    stacks = empty_stacks(PIXELS, 9)
    decoder, others = StackDecoder(PIXELS.table, [stacks]), np.arange(9) != 4
    assert decoder.decode(located.entries, located.copy().blob, np.arange(9)).tolist() == others.tolist()
    np.testing.assert_array_equal(stacks[:, others], naive_stacks(PIXELS, records, frames)[:, others])


class CountedWords:
    """The words of an arena, and the number of frames in each read of the offset table."""

    def __init__(self, words):
        self.words, self.reads = words, []

    def take(self, entries, mode):
        self.reads.append(len(entries))
        return self.words.take(entries, mode=mode)


def test_a_batch_that_is_copied_in_parts_is_decoded_by_the_definition():
    records, frames, located, memory = arena_of(5, schema=VECTORS)
    most = int(records["num_frames"].max())
    arena = Arena(memory.data, PART_BYTES // (2 * most))  # A part has at most two transitions.
    arena.words = words = CountedWords(arena.words)
    end = located.entries["blob"][8] + 4 * (located.entries["first_frame"][8] + records["num_frames"][8])
    memory[end : end + 4] = 0  # The last transition cannot be decoded.
    stacks = empty_stacks(VECTORS, 17)
    rows = np.random.default_rng(5).permutation(17)[:9]
    decoder = StackDecoder(VECTORS.table, [stacks])
    assert decoder.decode_located(Located(arena, located.entries), rows).tolist() == [True] * 8 + [False]
    np.testing.assert_array_equal(stacks[:, rows[:8]], naive_stacks(VECTORS, records, frames)[:, :8])
    assert max(words.reads) <= 2 * most < sum(words.reads)


@pytest.mark.parametrize("num_frames", [80, PART_BYTES // 28_224 + 1])
def test_parts_of_a_batch_above_4_gib_fit_a_blob(num_frames):
    entries = np.zeros(2_048, LOCATED)
    entries["num_frames"] = num_frames  # float32 84 x 84; by the second number, one item exceeds a part
    located = Located(Arena(memoryview(bytes(8)), 28_224), entries)
    parts = [range(2_048)[part] for part in located.parts()]
    assert list(chain.from_iterable(parts)) == list(range(2_048))
    assert all(len(part) == 1 or len(part) * num_frames * 28_224 <= PART_BYTES for part in parts)
    assert PART_BYTES < MAX_BYTES < 2_048 * num_frames * 28_224


def fenced(num_bytes):
    """Returns memory before a page whose access ends the process."""
    size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    descriptor = os.memfd_create("fenced")
    os.truncate(descriptor, size + mmap.PAGESIZE)
    memory = mmap.mmap(descriptor, size + mmap.PAGESIZE)
    os.truncate(descriptor, size)
    os.close(descriptor)
    return np.frombuffer(memory, np.uint8)[size - num_bytes : size]


def test_a_damaged_message_never_leads_to_access_outside_blob_and_rows():
    """Records and table are not checked before."""
    if load_native() is None:
        pytest.skip("installed without a C compiler, or there is no liblz4")
    rng = np.random.default_rng(4)
    sound, _, _, arena = arena_of(4, blob_at=0)
    num_entries = int(sound["num_frames"].sum()) + 1
    intact = arena[: arena[: 4 * num_entries].view("<u4")[-1]]
    memory, stacks = fenced(len(intact)), empty_stacks(PIXELS, 11)
    decoder = StackDecoder(PIXELS.table, [stacks])
    num_decoded = 0
    for _ in range(4_000):
        records, length = sound.copy(), len(intact) - int(rng.choice([0, rng.integers(len(intact) // 2)]))
        blob = memory[len(memory) - length :]
        blob[:] = intact[:length]
        for entry in rng.integers(0, num_entries, int(rng.integers(0, 4))).tolist():
            value = int(rng.integers(0, 2 ** int(rng.choice([8, 12, 16, 32]))))
            blob[4 * entry : 4 * entry + 4] = np.frombuffer(value.to_bytes(4, "little"), np.uint8)
        if rng.random() < 0.5:  # LZ4 reads a length from all of these bytes.
            blob[int(rng.integers(length // 2, length + 1)) :] = 0xFF
        name = rng.choice(["num_frames", "frame", "next_frame", "depth", "next_depth"])
        records[name][rng.integers(0, 9)] = rng.integers(0, np.iinfo(records[name].dtype).max + 1)
        num_decoded += decoder.decode(records, blob.data, 1 + np.arange(9)).sum()
    assert 4_000 < num_decoded < 32_000
    assert (stacks[:, [0, 10]].view(np.uint8) == 0xEE).all()
