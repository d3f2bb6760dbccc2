"""LZ4 blocks, many at a time: by a small native loop over liblz4 where both are there, else frame by frame."""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, NamedTuple

import cramjam
import numpy as np
from numpy.typing import NDArray

from apex.types import Array, Image

STORED = np.dtype(  # `struct stored` of decompress.c
    [
        (name, "<i8")
        for name in ("row", "image", "first_frame", "num_frames", "frame", "depth", "next_frame", "next_depth")
    ]
)
MOST_FRAMES = 255  # of one transition, for the native loop
INTERFACE = 2  # `apex_interface` of decompress.c
LIBRARY = "liblz4.so.1"  # which apt and systemd need too

log = logging.getLogger("apex")


class BlockError(ValueError):
    """A compressed frame that is none."""


class Blocks:
    """Decompresses frames of one size into the places of one array."""

    def __init__(self, target: NDArray[np.uint8]) -> None:
        """`target`: uint8[P, frame_bytes], contiguous."""
        self._target = target
        self._frame_bytes = target.shape[1]
        self._rows = [row.data for row in target]  # A slice costs as much as a third of decompressing.

    def decompress(
        self, image: Image, starts: NDArray[np.int64], stops: NDArray[np.int64], places: NDArray[np.int64]
    ) -> None:
        """Frame i, image[starts[i] : stops[i]], goes to places[i]: int64[N, 2], below 0 for none. Raises BlockError."""
        source = np.frombuffer(image, np.uint8)
        if (
            not ((starts >= 0) & (starts <= stops) & (stops <= len(source))).all()
            or (places >= len(self._target)).any()
        ):
            raise BlockError("a frame lies outside of what was received")
        num_done = self._decompress(source, starts, stops, places)
        if num_done < len(starts):
            size = stops[num_done] - starts[num_done]
            raise BlockError(f"a frame of {size} bytes does not decompress to {self._frame_bytes}")

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

    def __init__(self, target: NDArray[np.uint8]) -> None:
        super().__init__(target)
        native = load_native()
        if native is None:
            raise RuntimeError("apex/decompress.c was not built, or there is no " + LIBRARY)
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
        memory = _Memory(_address(arena), len(arena), max_frame_bytes, _address(self._scratch))
        stacks = _Stacks(_address(self._target), len(self._target) // (2 * stack), stack, self._frame_bytes)
        good = np.zeros(len(stored), np.bool_)
        self._native.decode_stored(
            self._native.lz4,
            ctypes.byref(memory),
            _address(stored),
            len(stored),
            ctypes.byref(stacks),
            _address(good),
        )
        return good


class _Memory(ctypes.Structure):
    """`struct memory` of decompress.c."""

    _fields_ = (
        ("arena", ctypes.c_void_p),
        ("arena_bytes", ctypes.c_int64),
        ("max_frame_bytes", ctypes.c_int64),
        ("scratch", ctypes.c_void_p),
    )


class _Stacks(ctypes.Structure):
    """`struct stacks` of decompress.c."""

    _fields_ = (
        ("rows", ctypes.c_void_p),
        ("batch", ctypes.c_int64),
        ("stack", ctypes.c_int64),
        ("frame_bytes", ctypes.c_int64),
    )


def make_blocks(target: NDArray[np.uint8]) -> Blocks:
    """The faster of the two that works here."""
    return Blocks(target) if load_native() is None else NativeBlocks(target)


class Native(NamedTuple):
    """The functions of decompress.c, and liblz4's that they call."""

    decompress: Any
    decode_stored: Any
    lz4: Any


@cache
def load_native() -> Native | None:
    """None where the loops were not built, or are another version's, or liblz4 is missing."""
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_decompress{suffix}")
        if path.exists():
            try:
                loops = ctypes.CDLL(str(path))
                interface = ctypes.c_int64.in_dll(loops, "apex_interface").value
                if interface != INTERFACE:
                    raise OSError(f"{path} is of another version ({interface}, but this is {INTERFACE})")
                lz4 = ctypes.cast(ctypes.CDLL(LIBRARY).LZ4_decompress_safe, ctypes.c_void_p)
                native = Native(loops.apex_decompress, loops.apex_decode_stored, lz4)
            except (OSError, AttributeError, ValueError) as error:
                log.warning("frames are decompressed one by one, slowly: %s; install again (pip install -e .)", error)
                return None
            pointer, number = ctypes.c_void_p, ctypes.c_int64
            native.decompress.argtypes = [pointer, pointer, pointer, pointer, pointer, number, pointer, number]
            native.decompress.restype = number
            native.decode_stored.argtypes = [pointer, pointer, pointer, number, pointer, pointer]
            native.decode_stored.restype = None
            return native
    return None


def _address(array: Array) -> int:
    """Where a contiguous array lies; the caller keeps it alive."""
    assert array.flags.c_contiguous
    return int(array.ctypes.data)
