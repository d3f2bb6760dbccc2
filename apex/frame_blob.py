"""The frame blob: compressed frames behind a table of their offsets."""

from __future__ import annotations

import numpy as np


def make_blob(frames: list[bytes]) -> bytes:
    """Lays out compressed frames: a table of uint32 byte offsets (F + 1 of them), then the frames.

    Offset i is where frame i begins, counted from the image's first byte, so that a reader who knows
    where the image lies finds a frame without knowing F.
    """
    table = np.empty(len(frames) + 1, "<u4")
    table[0] = table.nbytes
    np.cumsum([len(frame) for frame in frames], out=table[1:])
    table[1:] += table[0]
    return b"".join([table.tobytes(), *frames])
