"""The frame blob: the compressed frames of a segment or of a batch, preceded by a table of their offsets.

A blob of F frames starts with uint32[F + 1] byte offsets, little-endian. Offset i is the start of frame i, counted from
the blob's first byte; the last offset is the blob's length. A reader can therefore find a frame without knowing F. Only
this module and the C loop in `frames/decompress.c` depend on this layout.
"""

from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

FrameBlob = bytes | memoryview
MIN_BYTES = 8  # bytes of a blob with one empty frame
MAX_BYTES = (1 << 32) - 1  # Offsets have 32 bits.


class BlobError(ValueError):
    """The offset table of a blob is inconsistent, or a number in it exceeds a limit."""


def make_blob(frames: Sequence[bytes]) -> bytes:
    """Returns a blob that contains compressed frames in the given order."""
    return join_blob(np.fromiter(map(len, frames), np.int64, len(frames)), frames)


def join_blob(lengths: NDArray[np.int64], pieces: Sequence[bytes | memoryview]) -> bytes:
    """Returns a blob of F frames. `pieces`, one after the other, contain all frames in order.

    `lengths`, int64[F], are the sizes of the frames in bytes. Raises BlobError if the blob would exceed MAX_BYTES.
    """
    table = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=table[1:])
    table += table_bytes(len(lengths))
    if table[-1] > MAX_BYTES:
        raise BlobError(f"a blob would have {table[-1]} bytes, maximum is {MAX_BYTES}")
    return b"".join([table.astype("<u4").tobytes(), *pieces])


def table_bytes(num_frames: int) -> int:
    """Returns the size of the table in bytes. The first frame begins at this offset."""
    return 4 * (num_frames + 1)


def count_frames(blob: FrameBlob) -> int:
    """Returns the number of frames of a blob that `check_table` has accepted."""
    return int.from_bytes(blob[:4], "little") // 4 - 1


def read_table(blob: FrameBlob, num_frames: int | None = None) -> NDArray[np.int64]:
    """Returns the offsets, int64[F + 1], of a blob that `check_table` has accepted."""
    count = (count_frames(blob) if num_frames is None else num_frames) + 1
    return np.frombuffer(blob, "<u4", count).astype(np.int64)


def check_table(blob: FrameBlob, *, shortest: int, longest: int, max_frames: int | None = None) -> int:
    """Checks the offset table of a received blob and returns the number of frames.

    Raises BlobError unless the table is consistent, every frame has `shortest` to `longest` bytes, and the blob has at
    most `max_frames` frames.
    """
    num_bytes = len(blob)
    if num_bytes < MIN_BYTES:
        raise BlobError(f"a blob has {num_bytes} bytes, expected at least {MIN_BYTES}")
    start = int.from_bytes(blob[:4], "little")
    most = num_bytes if max_frames is None else min(num_bytes, table_bytes(max_frames))
    if start % 4 or not MIN_BYTES <= start <= most:
        raise BlobError(f"a blob's table has {start} bytes, expected a multiple of 4 from {MIN_BYTES} to {most}")
    table = read_table(blob)
    if table[-1] != num_bytes:
        raise BlobError(f"a blob has {num_bytes} bytes, but its table says {table[-1]}")
    lengths = np.diff(table)
    for length in (int(lengths.min()), int(lengths.max())):
        if not shortest <= length <= longest:
            raise BlobError(f"a frame has {length} bytes, expected {shortest} to {longest}")
    return len(lengths)


def as_words(memory: memoryview) -> NDArray[np.uint32]:
    """Returns `memory` as uint32 words, in which each blob must start at a multiple of 4 bytes."""
    return np.frombuffer(memory, "<u4", len(memory) // 4)


def find_frames(
    words: NDArray[np.uint32],
    starts: NDArray[np.int64],  # [B]  byte at which each blob starts
    first_frames: NDArray[np.int64],  # [B]  number of the first frame to find in each blob
    counts: NDArray[np.int64],  # [B]  number of frames to find, at least 1
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the start and the end of each frame, each int64[sum of counts], in bytes from the blob's first byte.

    If another process overwrites a blob at the same time, the results for this blob are arbitrary numbers below 2**32.
    """
    ends = np.cumsum(counts)
    entries = np.repeat(starts // 4 + first_frames - (ends - counts), counts) + np.arange(counts.sum())
    begin, end = (words.take(entries + next_one, mode="clip").astype(np.int64) for next_one in (0, 1))
    return begin, end


def measure_blobs(words: NDArray[np.uint32], starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the length of each blob, int64[B]; 0 if its table is invalid.

    `starts`, int64[B], are the bytes at which the blobs start.
    """
    rest = 4 * len(words) - starts
    tables = words[starts // 4].astype(np.int64)
    lengths = words[(starts + np.minimum(tables, rest)) // 4 - 1].astype(np.int64)
    valid = (tables >= MIN_BYTES) & (tables % 4 == 0) & (tables <= lengths) & (lengths <= rest)
    return np.where(valid, lengths, 0)


def copy_runs(source: NDArray[np.uint8], starts: NDArray[np.int64], num_bytes: int) -> NDArray[np.uint8]:
    """Returns a copy of the `num_bytes` bytes of `source` from each of `starts`, uint8[N, num_bytes].

    An index of each byte would take eight times as much memory as the copy. Raises IndexError if a start is too large.
    """
    shape = max(0, len(source) - num_bytes + 1), num_bytes
    runs: NDArray[np.uint8] = as_strided(source, shape, source.strides * 2, writeable=False)[starts]
    return runs
