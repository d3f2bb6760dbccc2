"""Decompresses LZ4 blocks: many per call with native code and liblz4 if both are available, else one by one."""

from __future__ import annotations

import ctypes
import logging
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import cramjam
import numpy as np
from numpy.typing import NDArray

from apexreplay.frame_blob import FrameBlob, copy_runs
from apexreplay.frames.located import Located
from apexreplay.item_kinds import Array
from apexreplay.native import NativeError, open_native

MOST_FRAMES = 255  # maximum frames of one transition for the native code
INTERFACE = 3  # must equal `apex_interface` of decompress.c
LIBRARY = "liblz4.so.1"  # installed on most hosts, because apt and systemd depend on it

log = logging.getLogger("apexreplay")


class Blocks:
    """Decompresses frames of one size into the rows of one array."""

    def __init__(self, target: NDArray[np.uint8]) -> None:
        """`target`: uint8[P, frame_bytes], contiguous."""
        self._target = target
        self._frame_bytes = target.shape[1]

    @cached_property
    def _rows(self) -> list[memoryview]:
        """The rows of the target, sliced once: slicing takes a third as long as decompressing."""
        return [row.data for row in self._target]

    def decompress(
        self, blob: FrameBlob, starts: NDArray[np.int64], stops: NDArray[np.int64], places: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Decompresses blob[starts[i] : stops[i]] into the rows places[i] of the target; returns bool[N]: which worked.

        `places`: int64[N, 2], up to two rows for each frame; a negative number stands for no row.
        """
        source = np.frombuffer(blob, np.uint8)
        good: NDArray[np.bool_] = (starts >= 0) & (starts <= stops) & (stops <= len(source))
        good &= (places < len(self._target)).all(axis=1)
        if not good.all():
            places = np.where(good[:, None], places, -1)
        done = 0
        while (done := done + self._decompress(source, starts[done:], stops[done:], places[done:])) < len(starts):
            good[done] = False
            done += 1
        return good

    def _decompress(
        self, source: NDArray[np.uint8], starts: NDArray[np.int64], stops: NDArray[np.int64], places: NDArray[np.int64]
    ) -> int:
        """Returns the number of frames before the first that does not decompress. Skips frames without a row."""
        view, target, rows, size = source.data, self._target, self._rows, self._frame_bytes
        into = cramjam.lz4.decompress_block_into
        first = np.where(places[:, 0] < 0, places[:, 1], places[:, 0])
        done = 0
        for start, stop, place in zip(starts.tolist(), stops.tolist(), first.tolist(), strict=True):
            try:
                if place >= 0 and into(view[start:stop], rows[place], output_len=size) != size:
                    break
            except cramjam.DecompressionError:
                break
            done += 1
        twins = places[:done][(places[:done] >= 0).all(axis=1)]
        target[twins[:, 1]] = target[twins[:, 0]]
        return done


class RawFrames(Blocks):
    """Copies frames that are not compressed."""

    def decompress(
        self, blob: FrameBlob, starts: NDArray[np.int64], stops: NDArray[np.int64], places: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Copies blob[starts[i] : stops[i]]; see `Blocks.decompress`."""
        source, size = np.frombuffer(blob, np.uint8), self._frame_bytes
        good: NDArray[np.bool_] = (stops - starts == size) & (stops <= len(source))
        if good.all() and (starts[1:] == stops[:-1]).all():  # The frames follow each other.
            body = source[starts[:1].sum() : stops[-1:].sum()].reshape(-1, size)
        else:
            body, places = copy_runs(source, starts[good], size), places[good]
        for side in (0, 1):
            real = places[:, side] >= 0
            self._target[places[real, side]] = body[real]
        return good


class NativeBlocks(Blocks):
    """Decompresses all frames with one native call; can also read directly from the replay memory."""

    def __init__(self, target: NDArray[np.uint8], native: Native) -> None:
        super().__init__(target)
        self._native = native
        self._scratch = np.empty(0, np.uint8)

    def _decompress(
        self, source: NDArray[np.uint8], starts: NDArray[np.int64], stops: NDArray[np.int64], places: NDArray[np.int64]
    ) -> int:
        addresses = [_address(array) for array in (source, starts, stops, places)]
        target, decompress = _address(self._target), self._native.decompress
        return int(decompress(self._native.lz4, *addresses, len(starts), target, self._frame_bytes))

    def decode_located(self, located: Located, stack: int) -> NDArray[np.bool_]:
        """Decodes frames from the arena into the target, whose rows form stacks [2, B, S].

        Returns bool[M]: which transitions were decoded. The rows of the others are undefined. Another process may write
        to the arena at the same time if the arena `is_shared`.
        """
        arena, entries = located
        most = min(int(entries["num_frames"].max(initial=0)), MOST_FRAMES) * arena.max_frame_bytes
        if arena.is_shared and len(self._scratch) < most:
            self._scratch = np.empty(most, np.uint8)
        scratch = _address(self._scratch) if arena.is_shared else 0
        # `struct memory` and `struct stacks` of decompress.c: all of their fields take 8 bytes.
        memory = np.array([_address(arena.bytes), len(arena.bytes), arena.max_frame_bytes, scratch], np.int64)
        batch_size = len(self._target) // (2 * stack)
        stacks = np.array([_address(self._target), batch_size, stack, self._frame_bytes], np.int64)
        good = np.zeros(len(entries), np.bool_)
        self._native.decode_stored(
            self._native.lz4, _address(memory), _address(entries), len(entries), _address(stacks), _address(good)
        )
        return good


def make_blocks(target: NDArray[np.uint8], codec: str = "lz4") -> Blocks:
    """Returns the decoder of a codec of `Table`; for "lz4", NativeBlocks if the native code is available."""
    if codec == "raw":
        return RawFrames(target)
    native = load_native()
    return Blocks(target) if native is None else NativeBlocks(target, native)


class Native(NamedTuple):
    """The functions of decompress.c, and the function of liblz4 that they call."""

    decompress: Any
    decode_stored: Any
    lz4: Any
    version: str  # version of liblz4


@cache
def load_native() -> Native | None:
    """Returns the native code; None, with one warning, if it was not built, is outdated, or liblz4 is missing."""
    try:
        return find_native()
    except NativeError as error:
        log.warning(
            "frames are decompressed one by one: %s; install a C compiler, then pip install -e ./apexreplay", error
        )
        return None


def find_native(interface: int = INTERFACE, library: str = LIBRARY) -> Native:
    """Returns the native code; raises NativeError with the reason, and with how much slower decoding is."""
    costs = "decoding takes about 1.8 times as long"  # docs/adr/0010
    try:
        loops = open_native(Path(__file__).parent, "decompress", interface)
    except OSError as error:
        raise NativeError("build", f"{error}, so {costs}") from error
    try:
        liblz4 = ctypes.CDLL(library)
        lz4 = ctypes.cast(liblz4.LZ4_decompress_safe, ctypes.c_void_p)
        liblz4.LZ4_versionString.restype = ctypes.c_char_p
        version = liblz4.LZ4_versionString().decode()
        native = Native(loops.apex_decompress, loops.apex_decode_stored, lz4, version)
    except (OSError, AttributeError) as error:
        raise NativeError("library", f"{error}, so {costs}") from error
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    native.decompress.argtypes = [pointer, pointer, pointer, pointer, pointer, number, pointer, number]
    native.decompress.restype = number
    native.decode_stored.argtypes = [pointer, pointer, pointer, number, pointer, pointer]
    native.decode_stored.restype = None
    return native


def _address(array: Array) -> int:
    """Returns the address of a contiguous array. The caller must keep the array alive."""
    assert array.flags.c_contiguous
    return int(array.ctypes.data)
