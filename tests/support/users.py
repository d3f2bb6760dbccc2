"""Plays other users of the machine: calls functions in child processes with other user ids. Needs root on Linux."""

import os
import signal
import traceback

import pytest
from support.own_namespaces import can_enter_namespaces, enter_namespaces

needs_root = pytest.mark.skipif(os.geteuid() != 0 or not can_enter_namespaces(), reason="plays other users")
STRANGER, OWNER = 12_345, 54_321  # user ids without privileges
CALL_SECONDS = 30  # A call that hangs is killed.


def in_child(function, *arguments):
    """Calls the function in a child process; returns "" or the traceback of its exception, or of its death."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        text = ""
        try:
            signal.alarm(CALL_SECONDS)
            function(*arguments)
        except BaseException:
            text = traceback.format_exc()
        os.write(writer, text.encode()[-4_000:])
        os._exit(0)
    os.close(writer)
    text = os.read(reader, 4_000).decode()
    os.close(reader)
    _, status = os.waitpid(child, 0)
    return text or ("" if status == 0 else f"ended with wait status {status}")


def as_user(uid, function, *arguments):
    """Does the same as `in_child`, as another user."""

    def call():
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        function(*arguments)

    return in_child(call)


def in_own_tmpfs(function, *arguments):
    """Does the same as `in_child`, with an empty /dev/shm."""

    def call():
        enter_namespaces()
        os.chmod("/dev/shm", 0o1777)
        function(*arguments)

    return in_child(call)
