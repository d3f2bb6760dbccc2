"""Starts other programs, each in its own session. They end with the process that started them."""

import ctypes
import os
import signal
import subprocess
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from apexreplay.errors import NEIGHBOUR_GONE

PIPE = subprocess.PIPE
# Opened here, because little works in a fork of a process with several threads. macOS has no such function.
_prctl = getattr(ctypes.CDLL(None), "prctl", None)

File = int | IO[Any]
Process = subprocess.Popen[bytes]


def spawn(
    command: Sequence[str],
    *,
    input: File = subprocess.DEVNULL,
    output: File = subprocess.DEVNULL,
    errors: File | None = subprocess.STDOUT,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    niceness: int = 0,
    cores: Collection[int] = (),
    ends_by: signal.Signals = signal.SIGKILL,
) -> subprocess.Popen[bytes]:
    """Starts a program in its own session, so that Ctrl-C does not reach it.

    When the calling thread ends, the kernel sends the signal `ends_by` to the program. `environment` is added to the
    environment of this process. `cwd`: working directory; None: that of this process. `cores`: numbers of the CPU cores
    that the program may use; empty: all. Raises OSError if the program does not exist.
    """
    parent = os.getpid()

    def before_exec() -> None:
        belong_to(parent, ends_by)
        if niceness:
            lower_priority(niceness)
        if cores:
            os.sched_setaffinity(0, cores)

    return subprocess.Popen(
        command,
        stdin=input,
        stdout=output,
        stderr=errors,
        env={**os.environ, **(environment or {})},
        cwd=cwd,
        start_new_session=True,
        preexec_fn=before_exec,
    )


def lower_priority(niceness: int) -> None:
    """Makes this process leave CPU time to others, and also its session if this process or its parent leads it.

    Where Linux groups the processes of a session, niceness applies only within the session. The session of a shell, in
    which a person started a program, keeps its priority.
    """
    os.nice(niceness)
    if os.getsid(0) in (os.getpid(), os.getppid()):
        with suppress(OSError):  # There is no such file without these groups.
            Path("/proc/self/autogroup").write_text(str(niceness))


def belong_to(parent: int, ends_by: signal.Signals = signal.SIGKILL) -> None:
    """Makes this process end when its parent ends, or now if the parent is gone. SIGKILL ends even a stuck process."""
    pr_set_pdeathsig = 1
    assert _prctl is not None
    _prctl(pr_set_pdeathsig, ends_by)
    if os.getppid() != parent:
        os._exit(NEIGHBOUR_GONE)
