"""Both decoders decompress blocks correctly or refuse them, and write only to the given rows."""

import re
import shutil
from functools import partial

import lz4.block
import numpy as np
import pytest

from apexreplay import native
from apexreplay.frames import lz4_blocks
from apexreplay.frames.lz4_blocks import Blocks, NativeBlocks

FRAME_BYTES = 600
NUM_PLACES = 12


@pytest.fixture(params=[Blocks, NativeBlocks])
def implementation(request):
    if request.param is Blocks:
        return Blocks
    found = lz4_blocks.load_native()
    if found is None:
        pytest.skip("installed without a C compiler, or there is no liblz4")
    return partial(NativeBlocks, native=found)


def compress(frames):
    """Compresses with another library; returns the blob, and the start and end of each frame in it."""
    compressed = [lz4.block.compress(frame.tobytes(), store_size=False) for frame in frames]
    stops = np.cumsum([len(frame) for frame in compressed])
    return b"".join(compressed), stops - [len(frame) for frame in compressed], stops


def make_frames(rng, count):
    """Returns frames with runs, repetitions and noise."""
    frames = rng.integers(0, 3, (count, FRAME_BYTES)).astype(np.uint8)
    frames[::2, 100:400] = 7
    frames[1::3, 300:] = frames[1::3, :300]
    return frames


def empty_target():
    return np.full((NUM_PLACES, FRAME_BYTES), 0xEE, np.uint8)


@pytest.mark.parametrize("seed", range(5))
def test_each_frame_is_decompressed_to_its_rows(implementation, seed):
    rng = np.random.default_rng(seed)
    frames = make_frames(rng, 6)
    places = rng.permutation(NUM_PLACES).reshape(6, 2)
    places[0, 0] = places[1, 1] = places[2] = -1
    target, wanted = empty_target(), empty_target()
    for frame, pair in zip(frames, places, strict=True):
        wanted[pair[pair >= 0]] = frame
    assert implementation(target).decompress(*compress(frames), places).all()
    np.testing.assert_array_equal(target, wanted)


def test_nothing_is_decompressed_without_frames(implementation):
    target = empty_target()
    none = np.zeros(0, np.int64)
    implementation(target).decompress(b"", none, none, np.zeros((0, 2), np.int64))
    assert (target == 0xEE).all()


@pytest.mark.parametrize(
    ("start", "stop", "place"), [(-1, 20, 0), (21, 20, 0), (0, 10**9, 0), (0, 20, NUM_PLACES), (2**40, 2**40 + 9, 0)]
)
def test_only_frames_inside_of_blob_and_target_are_decompressed(implementation, start, stop, place):
    frames = make_frames(np.random.default_rng(0), 3)
    blob, starts, stops = compress(frames)
    starts[1], stops[1] = start, stop
    target, wanted = empty_target(), empty_target()
    wanted[[1, 3, 4]] = frames[[0, 2, 2]]
    places = np.array([[1, -1], [place, -1], [3, 4]])
    assert implementation(target).decompress(blob, starts, stops, places).tolist() == [True, False, True]
    np.testing.assert_array_equal(target, wanted)


@pytest.mark.parametrize("size", [0, 1, FRAME_BYTES - 1, FRAME_BYTES + 1, 10 * FRAME_BYTES])
def test_frames_of_another_size_are_refused(implementation, size):
    good = make_frames(np.random.default_rng(0), 1)[0]
    frames = compress([good, np.zeros(size, np.uint8), good])
    target = empty_target()
    places = np.array([[3, -1], [5, -1], [4, 7]])
    assert implementation(target).decompress(*frames, places).tolist() == [True, False, True]
    np.testing.assert_array_equal(target[[3, 4, 7]], [good] * 3)
    assert (target[[0, 1, 2, 6, 8, 9, 10, 11]] == 0xEE).all()


def test_damaged_bytes_change_only_their_own_row(implementation):
    """Changes every byte of a block in turn, and tries blocks of noise."""
    rng = np.random.default_rng(1)
    blob, starts, _ = compress(make_frames(rng, 1))
    broken = [bytearray(blob) for _ in range(len(blob))]
    for position, block in enumerate(broken):
        block[position] ^= int(rng.integers(1, 256))
    broken += [bytearray(rng.bytes(int(rng.integers(1, 900)))) for _ in range(500)]
    num_refused = 0
    target = empty_target()
    decoder = implementation(target)
    for block in broken:
        num_refused += not decoder.decompress(bytes(block), starts, np.array([len(block)]), np.array([[5, -1]])).all()
    assert (target[[0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11]] == 0xEE).all()
    assert num_refused > len(broken) // 2


def test_native_code_is_built_if_there_is_a_compiler():
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    assert isinstance(lz4_blocks.make_blocks(empty_target()), NativeBlocks)
    assert re.fullmatch(r"\d+\.\d+\.\d+", lz4_blocks.find_native().version)


def problem(**options):
    with pytest.raises(native.NativeError) as error:
        lz4_blocks.find_native(**options)
    return error.value.problem


def test_missing_native_code_is_logged_once(monkeypatch, caplog):
    monkeypatch.setattr(lz4_blocks, "open_native", partial(native.open_native, suffixes=[".not-built"]))
    lz4_blocks.load_native.cache_clear()
    try:
        assert type(lz4_blocks.make_blocks(empty_target())) is Blocks
        assert problem() == "build"
    finally:
        lz4_blocks.load_native.cache_clear()
    assert len(caplog.records) == 1


def test_native_code_of_another_version_or_without_liblz4_is_not_used():
    if lz4_blocks.load_native() is None:
        pytest.skip("installed without a C compiler, or there is no liblz4")
    assert problem(interface=1_000) == "build"
    assert problem(library="libnowhere.so.9") == "library"
