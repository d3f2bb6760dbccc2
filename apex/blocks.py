"""LZ4 blocks, many at a time: by a small native loop over liblz4 where both are there, else frame by frame."""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import cramjam
import numpy as np
from numpy.typing import NDArray

from apex.types import Array, Image

LIBRARY = "liblz4.so.1"  # a part of every Linux that has systemd, dpkg or rpm

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
    """The same with one call for all frames."""

    def __init__(self, target: NDArray[np.uint8]) -> None:
        super().__init__(target)
        loaded = load_native()
        if loaded is None:
            raise RuntimeError("apex/decompress.c was not built, or there is no " + LIBRARY)
        self._loop, self._lz4 = loaded

    def _decompress(
        self, source: NDArray[np.uint8], starts: NDArray[np.int64], stops: NDArray[np.int64], places: NDArray[np.int64]
    ) -> int:
        return int(
            self._loop(
                self._lz4,
                _address(source),
                _address(starts),
                _address(stops),
                _address(places),
                len(starts),
                _address(self._target),
                self._frame_bytes,
            )
        )


def make_blocks(target: NDArray[np.uint8]) -> Blocks:
    """The faster of the two that works here."""
    return Blocks(target) if load_native() is None else NativeBlocks(target)


@cache
def load_native() -> tuple[Any, Any] | None:
    """The loop and liblz4's function, or None where one of them is missing."""
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_decompress{suffix}")
        if path.exists():
            try:
                loop = ctypes.CDLL(str(path)).apex_decompress
                lz4 = ctypes.cast(ctypes.CDLL(LIBRARY).LZ4_decompress_safe, ctypes.c_void_p)
            except (OSError, AttributeError) as error:
                log.warning("frames are decompressed one by one: %s", error)
                return None
            pointer, number = ctypes.c_void_p, ctypes.c_int64
            loop.argtypes = [pointer, pointer, pointer, pointer, pointer, number, pointer, number]
            loop.restype = number
            return loop, lz4
    return None


def _address(array: Array) -> int:
    """Where a contiguous array lies; the caller keeps it alive."""
    assert array.flags.c_contiguous
    return int(array.ctypes.data)
