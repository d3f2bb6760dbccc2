"""Keeps a run's mirror up to date while the run's programs work, and brings a run back that this host lacks."""

import logging
import os
import platform
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from apex.config.tree import RunConfig
from apex.errors import FencedError, MirrorError, StoppedError
from apex.facts import Ending, Failure
from apex.runs.checkpoints.paths import newest_update
from apex.runs.folder import MANIFEST, RunFolder
from apex.runs.mirror.mirror import STATE, Mirror
from apex.runs.mirror.objects import open_objects
from apexreplay.errors import FINISHED, UsageError, describe_exception, require
from apexreplay.process.lifecycle import POLL_SECONDS, Helper, Stop, sleep
from apexreplay.store.location import discard, store_path

PERIOD_SECONDS = 60.0  # time between two uploads; a new checkpoint is uploaded at once
TRY_SECONDS = 60.0  # time to repeat a failed first or last access
PAUSE_SECONDS = 5.0  # time between two attempts, and between two looks for a new checkpoint

_Result = TypeVar("_Result")

log = logging.getLogger("apex")


def require_unused(run: RunConfig, stop: Stop) -> None:
    """Raises UsageError if the mirror has a run with the name of this new run already."""
    if run.mirror and run.name:
        mirror = _mirror(run, Path(run.folder) / run.name)
        has_run = _repeat(mirror, lambda: mirror.has_run, stop)
        remedy = "add --continue to continue that run, or choose another name"
        require(not has_run, f"{mirror} has a run of this name already", remedy=remedy)


def bring_back(
    run: RunConfig, stop: Stop, check: Callable[[RunFolder, bool], None] = lambda folder, is_over: None
) -> bool:
    """Makes the run folder from the mirror if this host has none, or only an older one, which is moved aside.

    `check(folder, is_over)` raises UsageError if the run cannot be continued here. It is called first, because the host
    that trains the run ends once another one restores it. Returns whether the folder is one from the mirror, without a
    newer checkpoint. Raises MirrorError if the mirror cannot be read.
    """
    path = Path(run.folder) / run.name
    mirror = _mirror(run, path)
    if not _repeat(mirror, lambda: mirror.has_run, stop):
        return False
    if (path / MANIFEST).exists():
        own, begun = _begun(RunFolder.open(path)), _repeat(mirror, mirror.owner, stop).get("begun")
        remedy = "choose another name, or move one of them"
        require(begun == own, f"{mirror} has another run than {path}", remedy=remedy)
        if _repeat(mirror, mirror.newest_update, stop) <= _newest(path):
            return mirror.restored == _newest(path)
    manifest, owner = _repeat(mirror, mirror.manifest, stop), _repeat(mirror, mirror.owner, stop)
    folder = RunFolder.from_manifest(path, lambda: manifest, f"{mirror}/{MANIFEST}")
    check(folder, _repeat(mirror, lambda: mirror.has_ended, stop))
    if path.exists():
        aside = path.with_name(f"{path.name}.older-{datetime.now():%Y%m%d-%H%M%S}")
        path.rename(aside)
        log.warning("%s was older than %s: moved it to %s", path, mirror, aside)
    mirror = _mirror(run, path)  # without the state of the folder that was moved
    _repeat(mirror, lambda: mirror.begin(owner["begun"], _writer()), stop)  # Another writer must end first.
    if f" on {platform.node()} (" not in str(owner.get("host")):  # See `_writer`.
        for store in (store_path(folder.run_id, shard) for shard in range(folder.config.replay.num_shards)):
            if discard(store):  # An earlier start on this host has left it.
                log.warning("removed %s: another host has trained the run since", store)
    _repeat(mirror, mirror.restore, stop)
    return True


class Mirroring:
    """Uploads a run from a thread of its own. Requests `stop` if another host has continued the run."""

    def __init__(self, run: RunConfig, folder: RunFolder, stop: Stop) -> None:
        """Registers this process as the mirror's only writer.

        Raises UsageError if the mirror has another run, or a newer version of this one, and MirrorError if it cannot be
        used.
        """
        self._mirror = _mirror(run, folder.path)
        self._stop = stop
        self._writer = _writer()
        self._over = threading.Event()
        there, here = _repeat(self._mirror, self._mirror.newest_update, stop), _newest(folder.path)
        problem = f"{self._mirror} has update {there:,} of this run, this host only update {max(here, 0):,}"
        require(
            there <= here, problem, remedy="use --continue, which takes the newer one, or move the run in the mirror"
        )
        _repeat(self._mirror, lambda: self._mirror.begin(_begun(folder), self._writer), stop)
        self._thread = Helper("mirror", self._work, stop)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread after the upload that it is making."""
        self._over.set()

    def finish(self, ending: Ending) -> Ending:
        """Uploads what is missing, and returns how the run has ended."""
        self.close()
        stop = Stop(self._stop.tick)  # A stop was requested already, and this upload is still to be made.
        while self._thread.is_alive():
            self._thread.join(POLL_SECONDS)
            stop.tick()
        try:
            self._thread.check()
            _repeat(self._mirror, lambda: self._mirror.upload(self._writer), stop, always=True)
        except (FencedError, MirrorError, UsageError) as error:
            if ending.failure is None:
                failure = Failure(role="launcher", kind="error", detail=str(error))
                return Ending(error.exit_status, "launcher", failure)
            log.error("%s", error)
        return ending

    def _work(self) -> None:
        failed, uploaded, since = False, -1, time.monotonic()
        while not self._over.wait(PAUSE_SECONDS):
            newest = self._mirror.noted_update  # An upload sends a checkpoint only after it was noted.
            if newest == uploaded and time.monotonic() - since < PERIOD_SECONDS:
                continue
            uploaded, since = newest, time.monotonic()
            try:
                self._mirror.upload(self._writer)
            except FencedError:
                raise
            except Exception as error:  # network, permissions, or a file that is being replaced
                if not failed:
                    what = describe_exception(error)
                    log.warning("cannot write %s; trying again each minute: %s", self._mirror, what)
                failed = True
            else:
                if failed:
                    log.warning("%s can be written again", self._mirror)
                failed = False


def upload_ended(run: RunConfig, folder: RunFolder, stop: Stop) -> Ending:
    """Uploads what an earlier start of a run that is over could not upload."""
    if run.mirror and _mirror(run, folder.path).only_here():
        return Mirroring(run, folder, stop).finish(Ending(FINISHED))
    return Ending(FINISHED)


def with_absolute_mirror(run: RunConfig) -> RunConfig:
    """Returns the settings so that a command in another folder uses the same mirror."""
    is_folder = run.mirror and "://" not in run.mirror
    return replace(run, mirror=str(Path(run.mirror).expanduser().absolute())) if is_folder else run


def _mirror(run: RunConfig, path: Path) -> Mirror:
    """Returns the mirror of the run folder `path`. Raises UsageError if the copy would be inside that folder."""
    inside = "://" not in run.mirror and (Path(run.mirror).expanduser() / path.name).resolve().is_relative_to(
        path.resolve()
    )
    require(
        not inside, f"run.mirror {run.mirror} is the run's own folder", remedy="choose another folder, on another disk"
    )
    return Mirror(open_objects(run.mirror, path.name), path, path / STATE)


def _writer() -> str:
    return f"process {os.getpid()} on {platform.node()} ({secrets.token_hex(4)})"


def _begun(folder: RunFolder) -> str:
    return f"{folder.run_id:016x}"


def _newest(path: Path) -> int:
    """Returns the update of the newest checkpoint of the run folder; -1 if there is none."""
    found = newest_update(path / "checkpoints")
    return -1 if found is None else found


def _repeat(mirror: Mirror, step: Callable[[], _Result], stop: Stop, *, always: bool = False) -> _Result:
    """Repeats a step that fails, for TRY_SECONDS, and sends heartbeats meanwhile.

    Raises MirrorError after that time, UsageError at once if repeating would not help (unless `always`), and
    StoppedError on a stop request.
    """
    until = time.monotonic() + TRY_SECONDS
    while True:
        try:
            return _beside(step, stop)
        except (UsageError, FencedError):
            raise
        except Exception as error:  # network, permissions, or another host that is writing
            if not always and _is_lasting(error, mirror):
                remedy = "choose another run.mirror, or permit this user to write there"
                raise UsageError(f"cannot use the mirror {mirror}: {describe_exception(error)}", remedy) from error
            if time.monotonic() + PAUSE_SECONDS > until and not stop.poll():
                raise MirrorError(f"cannot use the mirror {mirror}: {describe_exception(error)}") from error
            log.warning("cannot use the mirror %s; trying again: %s", mirror, describe_exception(error))
            sleep(PAUSE_SECONDS, stop)
            if stop.poll():
                raise StoppedError(f"stopped while {mirror} could not be used") from error


def _is_lasting(error: Exception, mirror: Mirror) -> bool:
    """Whether the error remains when the step is repeated. A store may accept new credentials after a minute."""
    is_folder = "://" not in str(mirror)
    return isinstance(error, FileExistsError | NotADirectoryError) or (isinstance(error, PermissionError) and is_folder)


def _beside(step: Callable[[], _Result], stop: Stop) -> _Result:
    """Calls `step` in a thread, because it may take many minutes, in which `stop` must send heartbeats."""
    results: list[_Result] = []
    thread = Helper("mirror-step", lambda: results.append(step()), Stop())
    thread.start()
    while thread.is_alive():
        thread.join(POLL_SECONDS)
        stop.tick()
    thread.check()
    return results[0]
