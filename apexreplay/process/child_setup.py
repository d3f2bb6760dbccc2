"""Prepares a new process, as a script between fork and the program: `python child_setup.py SETTINGS... PROGRAM...`.

A script, because Python code in a fork of a process with several threads can hang, and can run its finalizers.
It starts without site-packages, so it imports only the standard library.
"""

import ctypes
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

# Opened here, because `belong_to` also runs in forks of roles. macOS has no such function.
_prctl = getattr(ctypes.CDLL(None), "prctl", None)
_NEIGHBOUR_GONE = 75  # exit status, as in apexreplay.errors


def belong_to(parent: int, ends_by: int = signal.SIGKILL) -> None:
    """Makes this process end when its parent ends, or now if the parent is gone. SIGKILL ends even a stuck process."""
    pr_set_pdeathsig = 1
    assert _prctl is not None
    _prctl(pr_set_pdeathsig, ends_by)
    if os.getppid() != parent:
        os._exit(_NEIGHBOUR_GONE)


def lower_priority(niceness: int) -> None:
    """Makes this process leave CPU time to others, and also its session if this process or its parent leads it.

    Where Linux groups the processes of a session, niceness applies only within the session. The session of a shell, in
    which a person started a program, keeps its priority.
    """
    os.nice(niceness)
    if os.getsid(0) in (os.getpid(), os.getppid()):
        with suppress(OSError):  # There is no such file without these groups.
            Path("/proc/self/autogroup").write_text(str(niceness))


def main(answer: str, parent: str, ends_by: str, niceness: str, cores: str, *command: str) -> None:
    """Becomes the program, or writes the error's number to the file descriptor `answer`.

    `cores`: comma-separated numbers; empty: all.
    """
    os.set_inheritable(int(answer), False)
    try:
        belong_to(int(parent), int(ends_by))
        if int(niceness):
            lower_priority(int(niceness))
        if cores:
            os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
        for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and a program would inherit that.
            signal.signal(ignored, signal.SIG_DFL)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(int(answer), str(error.errno).encode())
        sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
