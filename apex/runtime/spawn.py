"""Starts other programs: each in a session of its own, which ends with the process that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from apex.runtime.lifecycle import NEIGHBOUR_GONE

File = int | IO[Any]


def spawn(
    command: Sequence[str],
    *,
    output: File = subprocess.DEVNULL,
    errors: File = subprocess.STDOUT,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    niceness: int = 0,
    cores: Collection[int] = (),
    ends_by: signal.Signals = signal.SIGKILL,
) -> subprocess.Popen[bytes]:
    """Starts a program with an empty standard input, in a session of its own: Ctrl-C does not reach it.

    When the thread that called this ends, the kernel sends the program `ends_by`. `environment` is added to this
    process's own. `cwd` None: this process's own. `cores`: the CPUs that the program may use; empty: all. Raises
    OSError if there is no such program.
    """
    parent = os.getpid()

    def before_exec() -> None:
        belong_to(parent, ends_by)
        os.nice(niceness)
        if niceness:
            with suppress(OSError):  # Where the kernel groups sessions, niceness counts within a session only.
                Path("/proc/self/autogroup").write_text(str(niceness))
        if cores:
            os.sched_setaffinity(0, cores)

    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=errors,
        env={**os.environ, **(environment or {})},
        cwd=cwd,
        start_new_session=True,
        preexec_fn=before_exec,
    )


def belong_to(parent: int, ends_by: signal.Signals = signal.SIGKILL) -> None:
    """Makes this process end with its parent, also if the parent has ended already. SIGKILL ends a stuck one too."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, ends_by)
    if os.getppid() != parent:
        os._exit(NEIGHBOUR_GONE)
