"""Has the C library keep the memory that it was given back."""

from __future__ import annotations

import ctypes

# Of malloc.h.
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4


def keep_freed_memory() -> bool:
    """From now on large blocks are reused by this process, not returned to the kernel; False without glibc.

    By default glibc maps every block above 32 MB anew, such as the activations of a batch of 512, and the kernel clears
    its pages. Memory then never shrinks below its peak, which comes back with every update anyway.
    """
    try:
        set_option = ctypes.CDLL(None).mallopt
    except AttributeError:  # musl
        return False
    return bool(set_option(M_MMAP_MAX, 0) and set_option(M_TRIM_THRESHOLD, 2**31 - 1))
