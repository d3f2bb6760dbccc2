"""Makes the C library keep freed memory."""

from __future__ import annotations

import ctypes

# Constants of malloc.h.
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4


def keep_freed_memory() -> bool:
    """Makes this process reuse large freed blocks instead of returning them to the kernel. Returns False without glibc.

    By default, glibc maps each block above 32 MB again, for example the activations of a batch of 512, and the kernel
    clears its pages. With this setting, used memory stays at its peak, which every update reaches anyway.
    """
    try:
        set_option = ctypes.CDLL(None).mallopt
    except AttributeError:  # musl
        return False
    return bool(set_option(M_MMAP_MAX, 0) and set_option(M_TRIM_THRESHOLD, 2**31 - 1))
