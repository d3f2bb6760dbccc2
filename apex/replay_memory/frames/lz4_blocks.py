"""LZ4 blocks, many at a time: by a small native loop over liblz4 where both are there, else frame by frame."""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import cramjam
import numpy as np
from numpy.typing import NDArray

from apex.frame_blob import FrameBlob
from apex.runtime.native import open_native
from apex.types import Array

STORED = np.dtype(  # `struct stored` of decompress.c
    [
        (name, "<i8")
        for name in ("row", "blob", "first_frame", "num_frames", "frame", "depth", "next_frame", "next_depth")
    ]
)
MOST_FRAMES = 255  # of one transition, for the native loop
INTERFACE = 2  # `apex_interface` of decompress.c
LIBRARY = "liblz4.so.1"  # which apt and systemd need too

log = logging.getLogger("apex")


class FrameError(ValueError):
    """A compressed frame that is none."""


class Blocks:
    """Decompresses frames of one size into the places of one array."""

    def __init__(self, target: NDArray[np.uint8]) -> None:
        """`target`: uint8[P, frame_bytes], contiguous."""
        self._target = target
        self._frame_bytes = target.shape[1]
        self._rows = [row.data for row in target]  # A slice costs as much as a third of decompressing.

    def decompress(
        self, blob: FrameBlob, starts: NDArray[np.int64], stops: NDArray[np.int64], places: NDArray[np.int64]
    ) -> None:
        """Frame i, blob[starts[i] : stops[i]], goes to places[i]: int64[N, 2], below 0 for none. Raises FrameError."""
        source = np.frombuffer(blob, np.uint8)
        if (
            not ((starts >= 0) & (starts <= stops) & (stops <= len(source))).all()
            or (places >= len(self._target)).any()
        ):
            raise FrameError("a frame lies outside of what was received")
        num_done = self._decompress(source, starts, stops, places)
        if num_done < len(starts):
            size = stops[num_done] - starts[num_done]
            raise FrameError(f"a frame of {size} bytes does not decompress to {self._frame_bytes}")

    def _decompress(
        self, source: NDArray[np.uint8], starts: NDArray[np.int64], stops: NDArray[np.int64], places: NDArray[np.int64]
    ) -> int:
        """Returns how many came out right before the first that did not."""
        view, target, rows, size = source.data, self._target, self._rows, self._frame_bytes
        into = cramjam.lz4.decompress_block_into
        froms, tos = starts.tolist(), stops.tolist()
        first = np.where(places[:, 0] < 0, places[:, 1], places[:, 0])
        for done, (start, stop, place) in enumerate(zip(froms, tos, first.tolist(), strict=True)):
            if place < 0:
                continue
            try:
                if into(view[start:stop], rows[place], output_len=size) != size:
                    return done
            except cramjam.DecompressionError:
                return done
        twins = places[(places >= 0).all(axis=1)]
        target[twins[:, 1]] = target[twins[:, 0]]
        return len(starts)


class NativeBlocks(Blocks):
    """The same with one call for all frames; and straight from the replay memory."""

    def __init__(self, target: NDArray[np.uint8], native: Native) -> None:
        super().__init__(target)
        self._native = native
        self._scratch = np.empty(0, np.uint8)

    def _decompress(
        self, source: NDArray[np.uint8], starts: NDArray[np.int64], stops: NDArray[np.int64], places: NDArray[np.int64]
    ) -> int:
        return int(
            self._native.decompress(
                self._native.lz4,
                _address(source),
                _address(starts),
                _address(stops),
                _address(places),
                len(starts),
                _address(self._target),
                self._frame_bytes,
            )
        )

    def decode_stored(
        self, arena: NDArray[np.uint8], stored: Array, *, max_frame_bytes: int, stack: int
    ) -> NDArray[np.bool_]:
        """Decodes transitions (STORED[b]) from the arena; the target is that of stacks [2, B, S].

        Returns which came out, bool[b]; the rows of the others may hold anything. The arena may be written to
        meanwhile.
        """
        if len(self._scratch) < MOST_FRAMES * max_frame_bytes:
            self._scratch = np.empty(MOST_FRAMES * max_frame_bytes, np.uint8)
        # `struct memory` and `struct stacks` of decompress.c: all of their fields take 8 bytes.
        memory = np.array([_address(arena), len(arena), max_frame_bytes, _address(self._scratch)], np.int64)
        batch_size = len(self._target) // (2 * stack)
        stacks = np.array([_address(self._target), batch_size, stack, self._frame_bytes], np.int64)
        good = np.zeros(len(stored), np.bool_)
        self._native.decode_stored(
            self._native.lz4, _address(memory), _address(stored), len(stored), _address(stacks), _address(good)
        )
        return good


def make_blocks(target: NDArray[np.uint8]) -> Blocks:
    """The faster of the two that works here."""
    native = load_native()
    return Blocks(target) if native is None else NativeBlocks(target, native)


class Native(NamedTuple):
    """The functions of decompress.c, and liblz4's that they call."""

    decompress: Any
    decode_stored: Any
    lz4: Any
    version: str  # liblz4's


def describe_native() -> str:
    """Whether the native loops are in use, for people."""
    native = find_native()
    return f"liblz4 {native.version}" if isinstance(native, Native) else f"none: {native}"


@cache
def load_native() -> Native | None:
    """None where the loops were not built, or are another version's, or liblz4 is missing: it is logged once."""
    native = find_native()
    if isinstance(native, Native):
        return native
    log.warning("frames are decompressed one by one: %s; install again (pip install -e .) with a compiler", native)
    return None


def find_native(interface: int = INTERFACE, library: str = LIBRARY) -> Native | str:
    """The native loops, or why there are none and what that costs."""
    costs = "loaders take about 1.8 times as long"  # docs/adr/0010
    try:
        loops = open_native(Path(__file__).parent, "decompress", interface)
        liblz4 = ctypes.CDLL(library)
        lz4 = ctypes.cast(liblz4.LZ4_decompress_safe, ctypes.c_void_p)
        liblz4.LZ4_versionString.restype = ctypes.c_char_p
        version = liblz4.LZ4_versionString().decode()
        native = Native(loops.apex_decompress, loops.apex_decode_stored, lz4, version)
    except (OSError, AttributeError) as error:
        return f"{error}; {costs}"
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    native.decompress.argtypes = [pointer, pointer, pointer, pointer, pointer, number, pointer, number]
    native.decompress.restype = number
    native.decode_stored.argtypes = [pointer, pointer, pointer, number, pointer, pointer]
    native.decode_stored.restype = None
    return native


def _address(array: Array) -> int:
    """Where a contiguous array lies; the caller keeps it alive."""
    assert array.flags.c_contiguous
    return int(array.ctypes.data)
