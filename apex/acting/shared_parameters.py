"""One copy of the newest parameters per host: the parent process writes it, the worker processes read it."""

import mmap

import numpy as np

from apex.types import Parameters

_NUM_SIDES = 2


class SharedParameters:
    """Anonymous shared memory with two buffers: one is written while the other is read. One writer, no lock.

    Publications are numbered from 1; publication k is in buffer k mod 2. The header is an array of integers: 0 is the
    number of the newest complete publication, 1 that of the newest one begun, 2 and 3 are the versions in the buffers.
    A reader copies buffer k mod 2, then checks that publication k + 2, which overwrites this buffer, has not begun.
    """

    def __init__(self, num_parameters: int) -> None:
        """Create this object before the fork."""
        memory = mmap.mmap(-1, 64 + _NUM_SIDES * 4 * num_parameters)
        self._header = np.frombuffer(memory, "<i8", 8)  # number published, number begun, versions of sides 0 and 1
        self._sides = np.frombuffer(memory, "<f4", _NUM_SIDES * num_parameters, 64).reshape(_NUM_SIDES, -1)

    def publish(self, parameters: Parameters) -> None:
        """Writes newer parameters. Only one process may call this."""
        number = int(self._header[0]) + 1
        side = number % _NUM_SIDES
        self._header[1] = number
        self._sides[side] = parameters.values
        self._header[2 + side] = parameters.version
        self._header[0] = number

    def newer(self, known: int) -> tuple[int, Parameters] | None:
        """Returns the newest parameters and their number, if that is larger than `known` (0: any); otherwise None."""
        while (number := int(self._header[0])) > known:
            side = number % _NUM_SIDES
            version, values = int(self._header[2 + side]), self._sides[side].copy()
            if self._header[1] < number + _NUM_SIDES:
                return number, Parameters(version, values)
        return None
