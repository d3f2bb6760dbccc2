"""Runs commands one after the other in a temporary folder, and removes the processes and files of each."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from apexreplay.process.lifecycle import POLL_SECONDS, Stop
from apexreplay.process.spawn import spawn
from apexreplay.store.location import MEMORY, memory_folder

END_SECONDS = 60.0  # time for a command to end after SIGTERM
LEFT_SECONDS = 3.0  # time for processes to end after the command has ended
LOOK_SECONDS = 1.0  # interval between two looks at the libraries that the processes have loaded
LAST_LINES = 3  # lines of a log in an error message
# Without this, an editable installation would supply modules that the checkout lacks.
SITECUSTOMIZE = 'import sys; sys.meta_path = [f for f in sys.meta_path if "Editable" not in getattr(f, "__name__", "")]'


class Ran(NamedTuple):
    """Result of a command."""

    status: int
    output: str
    errors: str
    libraries: frozenset[str]  # names of files below the working directory that its Python processes had loaded

    def describe_failure(self) -> str:
        """Returns the exit status, the last lines, and the path of the log, which is written here."""
        number, name = tempfile.mkstemp(prefix="bench-compare-", suffix=".log")
        with open(number, "w", errors="surrogateescape") as log:
            log.write(self.output + self.errors)
        lines = (self.errors.strip() or self.output.strip()).splitlines()[-LAST_LINES:]
        return f"status {self.status}; last lines: {' | '.join(lines) or 'none'}; log: {name}"


class Runner:
    """Runs commands whose working directories are below `folder`."""

    def __init__(self, folder: Path, stop: Stop, limit_seconds: float) -> None:
        """A command that runs longer than `limit_seconds` is stopped and fails."""
        self._folder = folder.resolve()
        self._stop = stop
        self._limit_seconds = limit_seconds
        (self._folder / "site").mkdir()
        (self._folder / "site" / "sitecustomize.py").write_text(SITECUSTOMIZE)

    def run(self, command: Sequence[str], cwd: Path) -> Ran:
        """Runs a command that imports the packages in `cwd`. Raises KeyboardInterrupt if a stop was requested."""
        temporary, output, errors = (self._folder / name for name in ("tmp", "output", "errors"))
        temporary.mkdir()
        with output.open("wb") as stdout, errors.open("wb") as stderr:
            process = spawn(
                command,
                cwd=cwd,
                environment={"PYTHONPATH": f"{cwd}:{self._folder / 'site'}", "TMPDIR": str(temporary)},
                output=stdout,
                errors=stderr,
                ends_by=signal.SIGTERM,  # A benchmark then stops its own programs.
            )
        try:
            libraries = self._wait(process, cwd)
        finally:
            self._end(process)
        printed, complaints = (file.read_text(errors="surrogateescape") for file in (output, errors))
        return Ran(process.returncode, printed, complaints, libraries)

    def _wait(self, process: subprocess.Popen[bytes], cwd: Path) -> frozenset[str]:
        began = looked = time.monotonic()
        libraries: set[str] = set()
        while process.poll() is None and time.monotonic() < began + self._limit_seconds:
            if self._stop.poll():
                raise KeyboardInterrupt
            if time.monotonic() > looked + LOOK_SECONDS:
                libraries.update(*(_read_libraries(pid, cwd) for pid in self._processes()))
                looked = time.monotonic()
            with suppress(subprocess.TimeoutExpired):
                process.wait(POLL_SECONDS)
        return frozenset(libraries)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        try:
            process.terminate()  # This does nothing if the command has ended.
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
            deadline = time.monotonic() + LEFT_SECONDS
            while self._processes() and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS / 4)
        finally:  # A second Ctrl-C interrupts the waits above.
            process.kill()
            process.wait()
            for pid in self._processes():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for manifest in (self._folder / "tmp").rglob("manifest.json"):  # manifests of runs that were killed
                run_id = json.loads(manifest.read_text())["run_id"]
                for folder in (MEMORY, memory_folder()):  # Commits before the folder per user do not have it.
                    for store in folder.glob(f"apex-{run_id:016x}*"):
                        store.unlink(missing_ok=True)
            shutil.rmtree(self._folder / "tmp", ignore_errors=True)

    def _processes(self) -> list[int]:
        """Returns Python processes that work below the folder. They may have other sessions and parents."""
        pids = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                inside = Path(os.readlink(process / "cwd")).is_relative_to(self._folder)
                if inside and (process / "exe").samefile(sys.executable):
                    pids.append(int(process.name))
        return pids


def _read_libraries(pid: int, folder: Path) -> set[str]:
    with suppress(OSError):
        paths = [line.split(maxsplit=5)[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
        return {Path(path).name for path in paths if path.startswith(f"{folder}/")}
    return set()
