"""The frame blob: the compressed frames of a segment or of a batch, behind a table of their offsets.

A blob begins with uint32[F + 1] byte offsets, little-endian. Offset i is where frame i begins, counted from the blob's
first byte; the last one is the blob's length. So a reader who knows where a blob lies finds a frame without knowing F.
This module alone knows that layout, but for the C loop in `replay_memory/frames/decompress.c`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

FrameBlob = bytes | memoryview
MIN_BYTES = 8  # of a blob with one empty frame


class BlobError(ValueError):
    """The table of a blob contradicts itself, or exceeds what a blob may contain."""


def make_blob(frames: Sequence[bytes]) -> bytes:
    """Lays out compressed frames, one after the other."""
    return join_blob(np.fromiter(map(len, frames), np.int64, len(frames)), frames)


def join_blob(lengths: NDArray[np.int64], pieces: Sequence[bytes | memoryview]) -> bytes:
    """Lays out frames of `lengths` [F] bytes; each piece holds some of them side by side, in their order."""
    table = np.empty(len(lengths) + 1, "<u4")
    table[0] = table.nbytes
    table[1:] = table.nbytes + np.cumsum(lengths)
    return b"".join([table.tobytes(), *pieces])


def table_bytes(num_frames: int) -> int:
    """How long the table is, and so where the first frame begins."""
    return 4 * (num_frames + 1)


def read_table(blob: FrameBlob, num_frames: int | None = None) -> NDArray[np.int64]:
    """The offsets, int64[F + 1], of a blob that `check_table` has found sound."""
    count = int.from_bytes(blob[:4], "little") // 4 if num_frames is None else num_frames + 1
    return np.frombuffer(blob, "<u4", count).astype(np.int64)


def check_table(blob: FrameBlob, *, shortest: int, longest: int, max_frames: int | None = None) -> int:
    """Returns the number of frames, each of `shortest` ... `longest` bytes; raises BlobError for a table that lies."""
    num_bytes = len(blob)
    if num_bytes < MIN_BYTES:
        raise BlobError(f"a blob of {num_bytes} bytes")
    start = int.from_bytes(blob[:4], "little")
    most = num_bytes if max_frames is None else min(num_bytes, table_bytes(max_frames))
    if start % 4 or not MIN_BYTES <= start <= most:
        raise BlobError(f"a table of {start} bytes")
    table = read_table(blob)
    if table[-1] != num_bytes:
        raise BlobError(f"a blob of {num_bytes} bytes, its table says {table[-1]}")
    lengths = np.diff(table)
    for length in (int(lengths.min()), int(lengths.max())):
        if not shortest <= length <= longest:
            raise BlobError(f"a frame of {length} bytes, {shortest} to {longest} may be")
    return len(lengths)


def as_words(memory: memoryview) -> NDArray[np.uint32]:
    """A memory in which blobs begin at multiples of 4 bytes, as `find_frames` and `find_end` read it."""
    return np.frombuffer(memory, "<u4", len(memory) // 4)


def find_frames(
    words: NDArray[np.uint32],
    starts: NDArray[np.int64],  # [B]  byte at which each blob begins
    first_frames: NDArray[np.int64],  # [B]  the first frame to find in each blob
    counts: NDArray[np.int64],  # [B]  how many frames to find, at least 1
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns where each frame begins and ends, int64[sum of counts], counted from its blob's first byte.

    The blobs may be written to meanwhile: then the numbers are any below 2**32.
    """
    ends = np.cumsum(counts)
    entries = np.repeat(starts // 4 + first_frames - (ends - counts), counts) + np.arange(counts.sum())
    begin, end = (words.take(entries + next_one, mode="clip").astype(np.int64) for next_one in (0, 1))
    return begin, end


def find_end(words: NDArray[np.uint32], start: int) -> int:
    """Returns the byte at which the blob that begins at byte `start` ends; raises BlobError outside of the memory."""
    num_bytes = 4 * len(words) - start
    table = int(words[start // 4])
    if MIN_BYTES <= table <= num_bytes:
        length = int(words[(start + table) // 4 - 1])
        if length <= num_bytes:
            return start + length
    raise BlobError(f"a table of {table} bytes in {num_bytes}")
