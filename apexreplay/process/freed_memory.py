"""Reuses freed memory within a process."""

import ctypes

TRIM_THRESHOLD, MMAP_MAX = -1, -4  # constants of malloc.h


def keep_freed_memory() -> None:
    """Makes this process reuse large freed blocks instead of returning them to the kernel. Needs glibc.

    By default, glibc returns large blocks, for example the message of a batch or the activations of a batch of 512, and
    the kernel clears the pages of the next one. With this setting, used memory stays at its peak, which every batch
    reaches anyway.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has no such function.
    if set_option is not None:
        set_option(MMAP_MAX, 0)
        set_option(TRIM_THRESHOLD, 2**31 - 1)
