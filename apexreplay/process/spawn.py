"""Starts other programs, each in its own session. They end with the process that started them."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from apexreplay.process import child_setup

PIPE = subprocess.PIPE

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
) -> Process:
    """Starts a program in its own session, so that Ctrl-C does not reach it.

    When the calling thread ends, the kernel sends the signal `ends_by` to the program. `environment` is added to the
    environment of this process. `cwd`: working directory; None: that of this process. `cores`: numbers of the CPU cores
    that the program may use; empty: all. Raises OSError if the program does not exist.
    """
    variables = {**os.environ, **(environment or {})}
    name, cwd = command[0], cwd or Path()
    if shutil.which(cwd / name if os.sep in name else name, path=variables.get("PATH")) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
    settings = [str(os.getpid()), str(int(ends_by)), str(niceness), ",".join(map(str, cores))]
    return subprocess.Popen(
        [sys.executable, "-I", "-S", child_setup.__file__, *settings, *command],
        stdin=input,
        stdout=output,
        stderr=errors,
        env=variables,
        cwd=cwd,
        start_new_session=True,
    )
