"""Segments that replay accepts but nobody can learn from, as a faulty or hostile actor may send them."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from apexreplay.client.reliable_sender import ReliableSender
from apexreplay.types import Cut

NO_FRAME = 0xFF  # LZ4 cannot decompress a block of these bytes.
RETURN, PRIORITY = 1e18, 3e38


def spoil_frames(cut: Cut) -> Cut:
    """Replaces one frame in the middle by an invalid LZ4 block of the same length."""
    table = np.frombuffer(cut.blob, "<u4", int(np.frombuffer(cut.blob, "<u4", 1)[0]) // 4)
    frame = (len(table) - 1) // 2
    blob = bytearray(cut.blob)
    blob[table[frame] : table[frame + 1]] = bytes([NO_FRAME]) * int(table[frame + 1] - table[frame])
    return cut._replace(blob=bytes(blob))


def spoil_returns(cut: Cut) -> Cut:
    """Sets every second return to 1e18, the others to -1e18."""
    cut.records["n_step_return"] = np.where(np.arange(len(cut.records)) % 2, RETURN, -RETURN)
    return cut


def spoil_priorities(cut: Cut) -> Cut:
    """Sets every priority to 3e38, nearly the largest float32."""
    cut.records["priority"] = PRIORITY
    return cut


KINDS: dict[str, Callable[[Cut], Cut]] = {
    "frames": spoil_frames,
    "returns": spoil_returns,
    "priorities": spoil_priorities,
}


class SpoilingSender(ReliableSender):
    """Damages a share of the segments before they are sent, each in one of these ways."""

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
