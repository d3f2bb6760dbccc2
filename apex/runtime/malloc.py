"""Has the C library keep the memory that it was given back."""

from __future__ import annotations

import ctypes

# Of malloc.h.
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4


def keep_freed_memory() -> bool:
    """From now on large blocks are reused by this process, not returned to the kernel; False without glibc.

    By default glibc maps every block above 32 MB anew and unmaps it when it is freed. The activations of a batch of 512
    are such blocks, and the kernel clearing their pages was a quarter of the time of an update on a CPU. Memory then
    never shrinks below its peak; the learner's peak comes back with every update anyway.
    """
    try:
        set_option = ctypes.CDLL(None).mallopt
    except AttributeError:  # musl
        return False
    return bool(set_option(M_MMAP_MAX, 0) and set_option(M_TRIM_THRESHOLD, 2**31 - 1))
