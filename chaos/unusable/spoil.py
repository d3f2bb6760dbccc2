"""Segments that replay accepts and nobody can learn from: what a broken or hostile actor may send."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from apex.acting.reliable_sender import ReliableSender
from apex.acting.segment_builder import Cut

NO_FRAME = 0xFF  # Of a block of these bytes LZ4 decompresses none.
RETURN, PRIORITY = 1e18, 3e38


def spoil_frames(cut: Cut) -> Cut:
    """One frame, in the middle, is no LZ4 block; lengths and table stay as they are."""
    table = np.frombuffer(cut.blob, "<u4", int(np.frombuffer(cut.blob, "<u4", 1)[0]) // 4)
    frame = (len(table) - 1) // 2
    blob = bytearray(cut.blob)
    blob[table[frame] : table[frame + 1]] = bytes([NO_FRAME]) * int(table[frame + 1] - table[frame])
    return cut._replace(blob=bytes(blob))


def spoil_returns(cut: Cut) -> Cut:
    """Every second return is 1e18, the others -1e18."""
    cut.records["n_step_return"] = np.where(np.arange(len(cut.records)) % 2, RETURN, -RETURN)
    return cut


def spoil_priorities(cut: Cut) -> Cut:
    """Every priority is 3e38, nearly the largest number that a message holds."""
    cut.records["priority"] = PRIORITY
    return cut


KINDS: dict[str, Callable[[Cut], Cut]] = {
    "frames": spoil_frames,
    "returns": spoil_returns,
    "priorities": spoil_priorities,
}


class SpoilingSender(ReliableSender):
    """Spoils a share of the segments before they are sent, each in one of some ways."""

    def __init__(self, kinds: Sequence[str], share: float, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._ways = [KINDS[kind] for kind in kinds]
        self._share = share
        self._rng = np.random.default_rng(0)

    def send(self, cuts: Sequence[Cut], version: int) -> None:
        """See ReliableSender."""
        super().send([self._spoil(cut) for cut in cuts], version)

    def _spoil(self, cut: Cut) -> Cut:
        if not self._ways or self._rng.random() >= self._share:
            return cut
        return self._ways[int(self._rng.integers(len(self._ways)))](cut)
