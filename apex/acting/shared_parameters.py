"""One copy of the newest parameters per host: the host's process writes them, its worker processes read them."""

from __future__ import annotations

import mmap

import numpy as np

from apex.types import Parameters

_NUM_SIDES = 2


class SharedParameters:
    """Anonymous shared memory with two sides: one is written while the other is read. One writer, no lock.

    Word 0 counts the publishes; number k (from 1) stands on side k mod 2. A reader copies, then looks whether
    the writer has begun number k + 2, which overwrites the side: word 1 says which number it is at.
    """

    def __init__(self, num_parameters: int) -> None:
        """To be made before the fork."""
        memory = mmap.mmap(-1, 64 + _NUM_SIDES * 4 * num_parameters)
        self._words = np.frombuffer(memory, "<i8", 8)  # published, begun, version of either side
        self._sides = np.frombuffer(memory, "<f4", _NUM_SIDES * num_parameters, 64).reshape(_NUM_SIDES, -1)

    def publish(self, parameters: Parameters) -> None:
        """Writes newer parameters. One process only may do this."""
        number = int(self._words[0]) + 1
        side = number % _NUM_SIDES
        self._words[1] = number
        self._sides[side] = parameters.values
        self._words[2 + side] = parameters.version
        self._words[0] = number

    def newer(self, known: int) -> tuple[int, Parameters] | None:
        """What was published after number `known` (0: anything), with its number; None if nothing was."""
        while (number := int(self._words[0])) > known:
            side = number % _NUM_SIDES
            version, values = int(self._words[2 + side]), self._sides[side].copy()
            if self._words[1] < number + _NUM_SIDES:
                return number, Parameters(version, values)
        return None
