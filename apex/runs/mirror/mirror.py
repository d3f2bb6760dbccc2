"""Copies a run folder to its mirror while the run trains, and makes the run folder from the mirror on another host.

    MIRROR/RUN/
        begun.json           identifies the run, and its only writer
        manifest.json ...    the run folder without logs, keys and replay memory, and only its newest checkpoint

Files that have changed are uploaded completely, because object stores cannot append. Curves and event files therefore
continue in the next file while they are small: see MAX_FILE_BYTES in apex/runs/metrics/writer.py.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from apex.errors import FencedError
from apex.runs.mirror.objects import Objects
from apexreplay.errors import UsageError, require
from apexreplay.files.atomic_files import replace_file

BEGUN = "begun.json"
MANIFEST = "manifest.json"  # every run has this file, written first and uploaded last
NEWEST = "checkpoints/newest.json"
END = "end.json"  # why the run ended; the run has it only while it does not train
STATE = "mirror.json"  # file in the run folder that records what this host has uploaded
GROWING = ("curves/", "tensorboard/")  # folders of files that grow while the run trains
THREADS = 16  # parallel requests

_LEFT_OUT = ("logs/", "keys/", "checkpoints/replay/", "run.lock", STATE, BEGUN)
_LASTING = (errno.EACCES, errno.EROFS, errno.ENOTDIR, errno.EEXIST)
_CHECKPOINT = re.compile(r"checkpoints/(\d{9,})/")

log = logging.getLogger("apex")


class Mirror:
    """The mirror of the run folder `run`; `state_file` records what was uploaded, and as which writer."""

    def __init__(self, objects: Objects, run: Path, state_file: Path) -> None:
        self._objects = objects
        self._run = run
        self._state_file = state_file
        self._sent: dict[str, list[int]] = {}  # `_mark` of each file in the mirror; []: another host has sent it
        self._writer = ""  # the last writer that this host has registered
        self.restored: int | None = None  # update of the checkpoint with which this host's run folder was restored
        with suppress(OSError, ValueError, KeyError, TypeError):  # If the file is unreadable, uploads everything.
            state = json.loads(state_file.read_text())
            self.restored = state["restored"]
            if state["mirror"] == str(objects):  # Another mirror has none of it.
                self._writer, self._sent = str(state["writer"]), dict(state["sent"])

    def __str__(self) -> str:
        return str(self._objects)

    @property
    def has_run(self) -> bool:
        """Whether the mirror has a run to restore."""
        return self._objects.has(MANIFEST)

    @property
    def has_ended(self) -> bool:
        """Whether the run had ended when it was last uploaded."""
        return self._objects.has(END)

    def manifest(self) -> bytes:
        """Returns the manifest of the run that the mirror has."""
        return self._objects.read(MANIFEST)

    @property
    def noted_update(self) -> int:
        """The update that newest.json of the run folder names; -1 if that file does not exist."""
        return self._newest()[0]

    def newest_update(self) -> int:
        """Returns the update of the newest checkpoint in the mirror; -1 if there is none, or no complete run."""
        if not self.has_run or not self._objects.has(NEWEST):
            return -1
        return int(json.loads(self._objects.read(NEWEST))["num_updates"])

    def begin(self, begun: str, writer: str) -> bool:
        """Registers `writer` as the only writer of this mirror; returns whether there is a run to restore.

        `begun` distinguishes the run from others with the same name. Raises UsageError if the mirror has another run.
        Errors of reading and writing are raised too, because they must be known before a run starts.
        """
        has_run, owner = self.has_run, self.owner()
        is_own = not has_run or owner.get("begun") == begun
        require(is_own, f"{self} has another run of this name", remedy="choose another name, or move that run")
        self._objects.write(BEGUN, json.dumps({"begun": begun, "host": writer}).encode())
        names = self._objects.names()
        if not has_run or owner.get("host") != self._writer:
            # Another host may have replaced what this one sent, and added curves that this one lacks.
            self._sent = {name: [] for name in names if name.startswith(GROWING) or name == END}
        self._writer = writer
        self._keep_only(self.newest_update(), names)
        return has_run

    def owner(self) -> dict[str, Any]:
        """Returns what the last call of `begin` has registered: "begun" and, as "host", the writer; {} if nothing."""
        return dict(json.loads(self._objects.read(BEGUN))) if self._objects.has(BEGUN) else {}

    def upload(self, writer: str) -> int:
        """Uploads new and changed files; returns their number.

        Raises FencedError if another writer has replaced this one.
        """
        self._require_owner(writer)
        number, newest, newest_mark = self._newest()  # Read first, so that the uploaded curves cover it.
        count = 0
        try:
            for name, mark in self._changes(number):
                if name == NEWEST and f"checkpoints/{number:09d}/{MANIFEST}" not in self._sent:
                    continue  # The learner has replaced the checkpoint by a newer one meanwhile.
                try:
                    if name == NEWEST:
                        self._require_owner(writer)  # The files before may have taken minutes.
                        self._objects.write(NEWEST, newest)
                    else:
                        self._objects.upload(self._run / name, name)
                except FileNotFoundError:
                    if (self._run / name).exists():  # The bucket is missing.
                        raise
                else:
                    # If the file has changed meanwhile, the old mark makes the next upload send it again.
                    self._sent[name] = newest_mark if name == NEWEST else mark
                    count += 1
            if self._sent.get(NEWEST) == newest_mark:
                self._keep_only(number, list(self._sent))
            # The end of a run that goes on, and curves that only another host has.
            others = [name for name, mark in self._sent.items() if name == END or not mark]
            gone = [name for name in others if not (self._run / name).exists()]
            self._objects.delete(gone)
            for name in gone:
                del self._sent[name]
        finally:
            self._write_state(self._state_file)
        return count

    def _require_owner(self, writer: str) -> None:
        if (owner := self.owner().get("host", writer)) != writer:
            raise FencedError(f"{self} now belongs to {owner}, which continued this run: nothing more is uploaded here")

    def only_here(self) -> list[str]:
        """Returns the names of files that the mirror lacks or has only in an older version."""
        return [name for name, _ in self._changes(self.noted_update)]

    def restore(self) -> None:
        """Creates the run folder from the mirror, completely or not at all. Replay memory and logs start empty.

        Raises UsageError if this host's disk is full, or if the folder of runs cannot be written.
        """
        partial = self._run.with_name(f".{self._run.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            self._restore(partial)
        except OSError as error:
            is_here = str(error.filename or "").startswith(str(partial))
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) and not (is_here and error.errno in _LASTING):
                raise
            shutil.rmtree(partial, ignore_errors=True)
            remedy = "free disk space, or set run.folder to another folder"
            raise UsageError(f"cannot write {self._run}: {error.strerror}", remedy) from error

    def _restore(self, partial: Path) -> None:
        names = self._objects.names()
        newest = self._objects.read(NEWEST) if NEWEST in names else b""
        number = json.loads(newest)["num_updates"] if newest else -1
        if newest and f"checkpoints/{number:09d}/{MANIFEST}" not in names:
            raise RuntimeError(f"another host is writing {self}: checkpoint {number} is incomplete")
        files = [name for name in names if _is_copied(name, number)]
        partial.mkdir(mode=0o700, parents=True)
        (partial / "logs").mkdir()
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lambda name: self._download(name, partial), files))
        if newest:
            (partial / NEWEST).write_bytes(newest)  # The downloaded object may already be newer.
        self._sent = {name: _mark(partial / name) for name in files}
        self.restored = number
        if self._state_file.parent == self._run:
            self._write_state(partial / STATE)  # Before the folder is there: a start without it would accept no loss.
        os.replace(partial, self._run)
        self._write_state(self._state_file)
        log.info("restored %s from %s, checkpoint of update %d", self._run, self, number)

    def _download(self, name: str, folder: Path) -> None:
        """Raises UsageError if the path of the object would be outside `folder`."""
        path = folder / name
        is_inside = path.resolve().is_relative_to(folder.resolve())
        require(is_inside, f"the mirror has the object {name!r}, whose path is outside the run folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._objects.download(name, path)

    def _keep_only(self, number: int, names: Iterable[str]) -> None:
        """Deletes the files among `names` that belong to other checkpoints than `number`, which the mirror has."""
        self._objects.delete([name for name in names if _is_of_other(name, number)])
        self._sent = {name: mark for name, mark in self._sent.items() if not _is_of_other(name, number)}

    def _changes(self, number: int) -> Iterator[tuple[str, list[int]]]:
        """Yields names and marks of the files to upload, in the order in which a restore can trust them.

        Growing files come first, then checkpoint `number`, and each manifest after the files it lists.
        """
        for name in sorted(self._files(), key=_rank):
            with suppress(FileNotFoundError):
                if _is_copied(name, number) and self._sent.get(name) != (mark := _mark(self._run / name)):
                    yield name, mark

    def _files(self) -> Iterator[str]:
        """Yields the names of all files but hidden ones, which are incomplete."""
        for folder, folders, names in os.walk(self._run):
            folders[:] = [name for name in folders if not name.startswith(".")]
            paths = (Path(folder) / name for name in names if not name.startswith("."))
            yield from (path.relative_to(self._run).as_posix() for path in paths)

    def _newest(self) -> tuple[int, bytes, list[int]]:
        """Returns the number of the newest checkpoint (-1: none), the content of newest.json, and that file's mark."""
        with suppress(OSError, ValueError, KeyError):
            path = self._run / NEWEST
            mark, data = _mark(path), path.read_bytes()
            return int(json.loads(data)["num_updates"]), data, mark
        return -1, b"", []

    def _write_state(self, file: Path) -> None:
        state = {"mirror": str(self), "writer": self._writer, "restored": self.restored, "sent": self._sent}
        with suppress(OSError):  # The disk of the run folder is full: the next start of this host uploads more again.
            replace_file(file, json.dumps(state).encode())


def _is_copied(name: str, number: int) -> bool:
    """Whether the mirror of a run whose newest checkpoint is `number` has this file."""
    return not name.startswith(_LEFT_OUT) and not _is_of_other(name, number)


def _is_of_other(name: str, number: int) -> bool:
    found = _CHECKPOINT.match(name)
    return found is not None and int(found[1]) != number


def _mark(path: Path) -> list[int]:
    """Returns size in bytes and modification time in ns."""
    found = path.stat()
    return [found.st_size, found.st_mtime_ns]


def _rank(name: str) -> tuple[bool, bool, bool, str]:
    return not name.startswith(GROWING), not _CHECKPOINT.match(name), name.endswith(MANIFEST), name
