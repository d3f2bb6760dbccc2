"""This end of a program that is started over ssh: `python -m apex.launch.ssh.client JOB COMMAND...`, by the launcher.

COMMAND, an ssh, runs `remote_guard` on the host. This process sends it the file JOB, then a byte every second until
this process ends or is asked to end.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from apex.launch.ssh.remote_guard import BEAT_SECONDS
from apex.runtime.lifecycle import NEIGHBOUR_GONE, POLL_SECONDS, REFUSED, complain, stop_on_signals
from apex.runtime.watchdog import take_notifier

CONNECTION_LOST = 255  # ssh's own status; all others are the far end's
NOT_FOUND = (126, 127)  # a shell's


def main(argv: Sequence[str] | None = None) -> int:
    """The composition root."""
    job, *command = sys.argv[1:] if argv is None else argv
    with stop_on_signals(take_notifier()) as stop, subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0) as ssh:
        assert ssh.stdin is not None
        beat_at = time.monotonic()
        with suppress(BrokenPipeError):  # It has ended: its status says more.
            ssh.stdin.write(Path(job).read_bytes())
            while not stop.requested and ssh.poll() is None:
                if time.monotonic() >= beat_at:
                    beat_at = time.monotonic() + BEAT_SECONDS
                    ssh.stdin.write(b"\n")
                time.sleep(POLL_SECONDS)
        ssh.stdin.close()
        while (status := ssh.poll()) is None:
            stop.tick()
            time.sleep(POLL_SECONDS)
    if status < 0 or status == CONNECTION_LOST:
        complain("the connection is lost")
        return NEIGHBOUR_GONE
    return REFUSED if status in NOT_FOUND else status


if __name__ == "__main__":
    sys.exit(main())
