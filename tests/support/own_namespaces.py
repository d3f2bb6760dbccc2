"""Gives a test process its own loopback ports and memory files, if it is root on Linux."""

import ctypes
import fcntl
import os
import socket
import struct

NEW_MOUNTS, NEW_NETWORK = 0x0002_0000, 0x4000_0000  # <linux/sched.h>
PRIVATE, RECURSIVE = 1 << 18, 1 << 14  # <linux/mount.h>
SET_FLAGS, UP = 0x8914, 1  # <linux/sockios.h>, <linux/if.h>
MEMORY = b"/dev/shm"


def enter_namespaces() -> None:
    """Moves this process and its children to an empty network and an empty /dev/shm. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name: str, *arguments: object) -> None:
        if getattr(libc, name)(*arguments):
            raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")

    call("unshare", NEW_MOUNTS | NEW_NETWORK)
    call("mount", b"none", b"/", None, ctypes.c_ulong(PRIVATE | RECURSIVE), None)
    call("mount", b"tmpfs", MEMORY, b"tmpfs", ctypes.c_ulong(0), None)
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, SET_FLAGS, struct.pack("16sH14x", b"lo", UP))


def can_enter_namespaces() -> bool:
    """Tries it in a child process."""
    child = os.fork()
    if not child:
        try:
            enter_namespaces()
        except OSError:
            os._exit(1)
        os._exit(0)
    return not os.waitpid(child, 0)[1]
