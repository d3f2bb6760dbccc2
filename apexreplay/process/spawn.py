"""Starts other programs, each in its own session. They end with the process that started them."""

import os
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
    that the program may use; empty: all. Raises OSError if the program cannot be started.
    Takes as long as Python needs to start.
    """
    reader, writer = os.pipe()
    with open(reader, "rb", 0) as answer:
        try:
            settings = [writer, os.getpid(), int(ends_by), niceness, ",".join(map(str, cores))]
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", child_setup.__file__, *map(str, settings), *command],
                stdin=input,
                stdout=output,
                stderr=errors,
                env={**os.environ, **(environment or {})},
                cwd=cwd,
                start_new_session=True,
                pass_fds=[writer],
            )
        finally:
            os.close(writer)
        failure = answer.read()  # The program, when it runs, has closed the pipe.
    if failure:
        process.wait()
        raise OSError(int(failure), os.strerror(int(failure)), command[0])
    return process
