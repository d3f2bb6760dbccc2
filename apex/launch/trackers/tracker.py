"""What all trackers do: they copy a run from its folder into the store of an experiment tracker, as callbacks."""

import importlib.util
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from weakref import WeakKeyDictionary

from apex.facts import EndReason
from apex.launch.callbacks import Callback, LiveRun
from apex.runs.checkpoints.paths import BEST, has_policy, newest_update
from apex.runtime.optional_imports import remedy
from apex.runtime.trust import allow_options
from apex.transport.messages.run_status import RunStatus
from apexreplay.errors import UsageError
from apexreplay.process.spawn import spawn

# Files that trackers make in the run folder at the end. They must not replace the user's film.mp4 and report.html.
FILM, PAGE = "tracked-film.mp4", "tracked-report.html"
AGAIN_SECONDS = 60.0  # after which a record that could not be opened is tried again
MOST_FAILURES = 10  # after so many, the rows that could not be logged are left out
PROGRAM_SECONDS = 60.0  # time limit for each of them

log = logging.getLogger("apex")
_making = threading.Lock()
_made: WeakKeyDictionary[LiveRun, dict[str, bool]] = WeakKeyDictionary()  # of each file, whether it could be made


class Row(NamedTuple):
    """Figures of a program of the run at one time."""

    steps: int  # of the run
    time: float  # Unix seconds
    figures: dict[str, float]  # by tag of TensorBoard


class Tracker(Callback):
    """Base class of the trackers. The run folder must be on this host. A resumed run continues its record."""

    slow_seconds = 60.0  # The import of a tracker can take 10 s beside a run that starts.
    end_seconds = 150.0  # for film, report page and upload
    package: str  # that this tracker needs

    def __init__(self) -> None:
        """Raises UsageError if the package is not installed."""
        found = importlib.util.find_spec(self.package)
        if found is None or found.origin is None:  # Without an origin, it is only a folder of that name.
            raise UsageError(f"tracking with {self.package} needs an optional package", remedy(self.package))
        self._is_open = False
        self._num_failures = 0
        self._open_at = time.monotonic() + AGAIN_SECONDS
        self._since = time.time()
        self._offsets: dict[Path, int] = {}  # of the curves: bytes that were read
        self._times: dict[Path, float] = {}  # of their last rows that were logged

    def open(self, run: LiveRun, run_id: str) -> None:
        """Opens the run's record, and logs the settings. A resumed run has the same `run_id`."""
        raise NotImplementedError

    def log_rows(self, rows: Sequence[Row]) -> None:
        """Logs rows of the curves."""
        raise NotImplementedError

    def keep(self, kind: str, path: Path) -> None:
        """Stores a file or a folder. `kind`: "checkpoint", "policy", "film" or "report"."""
        raise NotImplementedError

    def finish(self, *, failed: bool) -> None:
        """Closes the record."""
        raise NotImplementedError

    def on_start(self, run: LiveRun) -> None:
        """Opens the record."""
        manifest = json.loads((run.folder / "manifest.json").read_bytes())
        self.open(run, str(manifest["run_id"]))
        self._is_open = True

    def on_status(self, run: LiveRun, status: RunStatus) -> None:
        """Logs the rows of the curves since the last call. Opens the record if `on_start` could not."""
        if not self._is_open:
            if time.monotonic() < self._open_at:
                return
            self._open_at = time.monotonic() + AGAIN_SECONDS
            self.on_start(run)
        before = dict(self._offsets), dict(self._times)
        try:
            self.log_rows(list(self._new_rows(run.folder / "curves")))
        except BaseException:  # The next call logs them again, unless the store never accepts them.
            self._num_failures += 1
            if self._num_failures % MOST_FAILURES:
                self._offsets, self._times = before
            raise

    def on_end(self, run: LiveRun, end: EndReason | None) -> None:
        """Logs the rest, stores the best policy, the last checkpoint, a film and the report page, and closes."""
        if not self._is_open:
            return
        try:
            if run.status is not None:
                try:
                    self.on_status(run, run.status)
                except Exception:  # The files may be stored all the same.
                    log.exception("the last rows were not logged")
            for kind, path in self._artifacts(run):
                self.keep(kind, path)
        finally:
            self.finish(failed=end is not None and end.kind == "failed")

    def _artifacts(self, run: LiveRun) -> Iterator[tuple[str, Path]]:
        """Yields kind and path of what to store; makes film and page when they are asked for."""
        folder = run.folder.absolute()
        saved, film, page = folder / "checkpoints", folder / FILM, folder / PAGE
        if (saved / BEST).exists():
            yield "policy", saved / BEST
        if (newest := newest_update(saved)) is not None:
            yield "checkpoint", saved / f"{newest:09d}"
        if has_policy(saved) and self._makes(run, film, "evaluate", "--episodes", "1", "--video"):
            yield "film", film
        if self._makes(run, page, "report", "--no-video", "--out"):
            yield "report", page

    def _new_rows(self, folder: Path) -> Iterator[Row]:
        """Yields the rows since the last call and since this start of the run."""
        for path in sorted(folder.glob("*.jsonl")):
            with path.open("rb") as file:
                begin = self._offsets.get(path, 0)
                if begin > os.fstat(file.fileno()).st_size:
                    begin = 0  # A resumed learner has replaced the file by a shorter one.
                file.seek(begin)
                whole, newline, _ = file.read().rpartition(b"\n")
            self._offsets[path] = begin + len(whole) + len(newline)
            for line in whole.splitlines():
                try:
                    row = json.loads(line)
                except ValueError:  # half a line of a learner that was killed
                    continue
                if row["time"] > self._times.get(path, self._since):
                    self._times[path] = row["time"]
                    figures = {tag: value for tag, value in row["scalars"].items() if value is not None}
                    yield Row(row["steps"], row["time"], figures)

    def _makes(self, run: LiveRun, path: Path, command: str, *arguments: str) -> bool:
        """Makes a file with a command of `apex`, unless another tracker has tried it; returns whether there is one.

        `arguments`: after the run, the last one before the path.
        """
        paths = os.pathsep.join(each or os.getcwd() for each in sys.path)
        partial = path.with_name(f".partial-{path.name}")
        words = [command, str(path.parent), *arguments, str(partial), *allow_options()]
        with _making:
            made = _made.setdefault(run, {})
            if path.name in made:
                return made[path.name]
            program = spawn([sys.executable, "-P", "-m", "apex", *words], environment={"PYTHONPATH": paths})
            until = time.monotonic() + PROGRAM_SECONDS
            while (status := program.poll()) is None and time.monotonic() < until:
                time.sleep(0.1)
            program.kill()
            program.wait()
            made[path.name] = False
            if status == 0:
                partial.replace(path)
                made[path.name] = True
            else:
                partial.unlink(missing_ok=True)
        if status is None:
            log.warning("%s was not made: apex %s took longer than %g s", path, command, PROGRAM_SECONDS)
        elif status:
            log.warning("%s was not made: apex %s ended with status %d", path, command, status)
        return status == 0
