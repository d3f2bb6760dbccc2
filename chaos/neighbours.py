"""The neighbours of a run on its machine: a second run that starts and ends, and another user who plants files."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from apexreplay.process.spawn import spawn
from chaos.environment import PACED_ID

STRANGER = 54_321  # user id of the other user
SECOND = (  # options of a short run
    *("--env", PACED_ID, "--actors", "1", "--evaluator.no-enabled", "--run.no-tensorboard"),
    *("--replay.capacity", "2000", "--replay.min-size-to-sample", "100", "--learner.batch-size", "32"),
    *("--max-updates", "20"),
)
# Names that a replay server looks at: folders, a pipe, a link to itself, and memory without an owner.
PLANTED = """
mkdir -m 777 apex-1-0.counters apex-1-0.board apex-{stranger}
touch apex-1-0.replay apex-2-0.replay apex-{run}-98.counters
ln -s apex-2-0.counters apex-2-0.counters
mkfifo -m 666 apex-{run}-99.replay
"""


@contextmanager
def second_run(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a short run of its own below `folder`; kills it at the end if it is still running."""
    command = [sys.executable, "-m", "apex", "train", *SECOND, "--run.folder", str(folder / "second")]
    with open(folder / "second.log", "ab") as log:
        process = spawn(command, output=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def plant(folder: Path, run_id: int) -> list[Path]:
    """Creates files of another user in `folder`, such as /dev/shm; returns their paths. Needs root."""
    before = set(folder.iterdir())
    script = PLANTED.format(stranger=STRANGER, run=f"{run_id:016x}")
    command = ["/bin/sh", "-c", f"umask 0; {script}"]
    subprocess.run(command, cwd=folder, user=STRANGER, group=STRANGER, extra_groups=[], stderr=subprocess.DEVNULL)
    return sorted(path for path in set(folder.iterdir()) - before if path.lstat().st_uid == STRANGER)


def clear(planted: list[Path]) -> None:
    """Removes these files and folders, as far as they still belong to the other user."""
    for path in planted:
        with suppress(FileNotFoundError):
            if path.lstat().st_uid == STRANGER:
                path.rmdir() if path.is_dir() else path.unlink()
