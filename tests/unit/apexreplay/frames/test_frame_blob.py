"""A blob returns the frames that it was made of, and a blob with a wrong table or too many bytes is refused."""

import itertools

import numpy as np
import pytest

from apexreplay.frame_blob import (
    MAX_BYTES,
    BlobError,
    as_words,
    check_table,
    copy_runs,
    find_frames,
    join_blob,
    make_blob,
    measure_blobs,
    read_table,
)


def make_frames(rng, count):
    return [rng.bytes(int(rng.integers(1, 33))) for _ in range(count)]


def make_memory(rng, num_blobs):
    """Returns blobs at multiples of 8, their frames, and the start of each blob."""
    memory, contents, starts = bytearray(), [], []
    for _ in range(num_blobs):
        contents.append(make_frames(rng, int(rng.integers(1, 9))))
        starts.append(len(memory))
        memory += make_blob(contents[-1])
        memory += bytes(-len(memory) % 8)
    return memory, contents, np.array(starts)


def test_a_table_says_where_each_frame_lies():
    frames = make_frames(np.random.default_rng(0), 7)
    blob = make_blob(frames)
    table = read_table(blob)
    assert [blob[begin:end] for begin, end in itertools.pairwise(table)] == frames
    assert read_table(blob, 7).tolist() == table.tolist()
    assert check_table(blob, shortest=1, longest=32, max_frames=7) == 7


@pytest.mark.parametrize("seed", range(5))
def test_frames_of_many_blobs_are_found_at_once(seed):
    rng = np.random.default_rng(seed)
    memory, contents, starts = make_memory(rng, 20)
    blobs = rng.integers(0, 20, 50)
    first = np.array([rng.integers(0, len(contents[blob])) for blob in blobs])
    counts = np.array([rng.integers(1, len(contents[blob]) - at + 1) for blob, at in zip(blobs, first, strict=True)])
    begins, ends = find_frames(as_words(memoryview(memory)), starts[blobs], first, counts)
    at = np.repeat(starts[blobs], counts)
    found = [bytes(memory[begin:end]) for begin, end in zip(at + begins, at + ends, strict=True)]
    assert found == [
        frame
        for blob, start, count in zip(blobs, first, counts, strict=True)
        for frame in contents[blob][start : start + count]
    ]


def test_blobs_are_measured_at_once():
    memory, contents, starts = make_memory(np.random.default_rng(1), 10)
    lengths = measure_blobs(as_words(memoryview(memory)), starts)
    assert lengths.tolist() == [len(make_blob(frames)) for frames in contents]


@pytest.mark.parametrize(
    "offsets", [(4, 0, 0, 0), (4_000, 0, 0, 0), (8, 17, 0, 0), (8, 7, 0, 0), (10, 12, 0, 0), (0, 0, 0, 0)]
)
def test_blob_with_an_invalid_table_has_length_0(offsets):
    words = as_words(memoryview(np.array([8, 8, *offsets], "<u4")).cast("B"))
    assert measure_blobs(words, np.array([0, 8])).tolist() == [8, 0]


FRAMES = [b"a" * 8] * 12


@pytest.mark.parametrize(
    ("blob", "message"),
    [
        (b"\x04\0\0\0", "a blob has 4 bytes"),
        ((9).to_bytes(4, "little") * 20, "table has 9 bytes"),
        ((84).to_bytes(4, "little") * 20, "table has 84 bytes"),
        (make_blob([*FRAMES, *FRAMES]), "table has 100 bytes"),
        (make_blob(FRAMES) + b"a", "its table says"),
        (np.array([12, 20, 12], "<u4").tobytes(), "a frame has -8 bytes"),
        (make_blob([*FRAMES, b"a" * 33]), "a frame has 33 bytes"),
        (make_blob([*FRAMES, b""]), "a frame has 0 bytes"),
    ],
)
def test_inconsistent_table_is_refused(blob, message):
    with pytest.raises(BlobError, match=message):
        check_table(blob, shortest=1, longest=32, max_frames=20)


def test_a_blob_of_4_gib_is_refused_because_offsets_have_32_bits():
    lengths = np.array([1 << 31, (1 << 31) - 13])  # A table of two frames has 12 bytes.
    assert read_table(join_blob(lengths, []), 2).tolist() == [12, 12 + (1 << 31), MAX_BYTES]
    lengths[1] += 1
    with pytest.raises(BlobError, match=f"{MAX_BYTES + 1} bytes"):
        join_blob(lengths, [])


SOURCES = [np.arange(10, dtype=np.uint8), np.arange(20, dtype=np.uint8)[::2], np.arange(10, dtype=np.uint8)[::-1]]


@pytest.mark.parametrize("source", SOURCES, ids=["contiguous", "every second", "reversed"])
@pytest.mark.parametrize(
    ("num_bytes", "starts"), [(3, []), (0, [0, 4, 10]), (10, [0, 0]), (4, [6, 0, 5]), (1, [9]), (11, []), (12, [])]
)
def test_copied_runs_equal_slices(source, num_bytes, starts):
    runs = copy_runs(source, np.array(starts, np.int64), num_bytes)
    assert runs.shape == (len(starts), num_bytes)
    assert runs.tolist() == [source[start : start + num_bytes].tolist() for start in starts]
    assert not np.shares_memory(runs, source)


@pytest.mark.parametrize(("num_bytes", "start"), [(4, 7), (0, 11), (10, 1), (11, 0), (12, 0)])
def test_a_run_beyond_the_end_is_refused(num_bytes, start):
    with pytest.raises(IndexError):
        copy_runs(SOURCES[0], np.array([0, start]), num_bytes)
