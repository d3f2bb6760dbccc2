"""Copies a run folder to its mirror while the run trains, and makes the run folder from the mirror on another host.

    MIRROR/RUN/
        begun.json           identifies the run, and its only writer
        manifest.json ...    the run folder without logs, keys and replay memory, and only its newest checkpoint
        parts/FILE/I-OFFSET  parts of files that only grow: part I replaces all bytes of the file from byte OFFSET on

Uploading curves and event files completely every time would transfer terabytes. They are uploaded completely only when
the run ends.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from apex.errors import FencedError
from apex.runs.mirror.objects import Objects
from apexreplay.errors import UsageError
from apexreplay.files.atomic_files import replace_file

BEGUN = "begun.json"
MANIFEST = "manifest.json"  # every run has this file, written first and uploaded last
NEWEST = "checkpoints/newest.json"
END = "end.json"  # why the run ended; the run has it only while it does not train
PARTS = "parts/"
STATE = "mirror.json"  # file in the run folder that records what this host has uploaded
MAX_PARTS = 100  # newest parts recorded per file; a file truncated before them is uploaded again from byte 0
THREADS = 16  # parallel downloads of a restore

_GROWING = ("curves/", "tensorboard/")
_LEFT_OUT = ("logs/", "keys/", "checkpoints/replay/", "run.lock", STATE)
_LASTING = (errno.EACCES, errno.EROFS, errno.ENOTDIR, errno.EEXIST)
_CHECKPOINT = re.compile(r"checkpoints/(\d{9,})/")

log = logging.getLogger("apex")


class Part(NamedTuple):
    """An uploaded part of a growing file."""

    offset: int  # position in the file, in bytes
    size: int
    digest: str

    @classmethod
    def of(cls, offset: int, data: bytes) -> Part:
        """Returns the part that consists of `data` at `offset`."""
        return cls(offset, len(data), hashlib.sha256(data).hexdigest()[:16])


class _Change(NamedTuple):
    """A file that the mirror lacks or has in an older version."""

    name: str  # path relative to the run folder
    path: Path
    mark: list[int]  # size in bytes, modification time in ns, and 1 if the store may delete the object later


class Mirror:
    """The mirror of the run folder `run`; `state_file` records what was uploaded, and as which writer."""

    def __init__(self, objects: Objects, run: Path, state_file: Path) -> None:
        self._objects = objects
        self._run = run
        self._state_file = state_file
        self._sent: dict[str, list[int]] = {}
        self._parts: dict[str, list[Part]] = {}
        self._number = 0  # number of the last part
        self._writer = ""  # the last writer that this host has registered
        self.restored: int | None = None  # update of the checkpoint with which this host's run folder was restored
        with suppress(OSError, ValueError, KeyError, TypeError):  # If the file is unreadable, uploads everything.
            state = json.loads(state_file.read_text())
            self._number, self.restored = int(state["number"]), state["restored"]
            if state["mirror"] != str(objects):
                return  # This mirror has none of it.
            self._writer = str(state["writer"])
            self._parts = {name: [Part(*part) for part in parts] for name, parts in state["parts"].items()}
            self._sent = {str(name): [*map(int, mark)] for name, mark in state["sent"].items()}

    def __str__(self) -> str:
        return str(self._objects)

    @property
    def has_run(self) -> bool:
        """Whether the mirror has a run to restore."""
        return self._objects.has(MANIFEST)

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
        has_run = self.has_run
        if has_run and self.owner().get("begun") != begun:
            raise UsageError(f"{self} has another run of this name", "choose another name, or move that run")
        if not has_run or self.owner().get("host") != self._writer:
            # Another host may have replaced what this one sent.
            self._sent, self._parts = {}, {}
        self._objects.write(BEGUN, json.dumps({"begun": begun, "host": writer}).encode())
        self._writer = writer
        if has_run:
            newest = self.newest_update()
            found = ((name, _CHECKPOINT.match(name)) for name in self._objects.names())
            self._objects.delete([name for name, match in found if match and int(match[1]) != newest])
        return has_run

    def owner(self) -> dict[str, Any]:
        """Returns what the last call of `begin` has registered: "begun" and, as "host", the writer; {} if nothing."""
        return dict(json.loads(self._objects.read(BEGUN))) if self._objects.has(BEGUN) else {}

    def upload(self, writer: str, *, whole: bool = False) -> int:
        """Uploads new and changed files; returns the number of objects.

        `whole`: also uploads growing files completely, because the run has ended. Raises FencedError if another writer
        has replaced this one.
        """
        self._require_owner(writer)
        number, newest, mark = self._newest()  # Read first, so that the uploaded curves cover it.
        try:
            growing = ((name, path) for name, path in self._files() if name.startswith(_GROWING))
            count = sum([self._upload_part(name, path) for name, path in growing])
            for change in self._changes(number, whole):
                if change.name == NEWEST and f"checkpoints/{number:09d}/{MANIFEST}" not in self._sent:
                    continue  # The learner has replaced the checkpoint by a newer one meanwhile.
                with suppress(FileNotFoundError):
                    if change.name == NEWEST:
                        self._require_owner(writer)  # The files before may have taken minutes.
                        self._objects.write(NEWEST, newest)
                    else:
                        self._objects.upload(change.path, change.name, expires=bool(change.mark[2]))
                    # If the learner has changed the file meanwhile, the old mark makes the next upload send it again.
                    self._sent[change.name] = mark if change.name == NEWEST else change.mark
                    count += 1
            if NEWEST in self._sent and self._sent[NEWEST] == mark:
                self._delete_superseded(number)
            if END in self._sent and not (self._run / END).exists():  # The run goes on.
                self._objects.delete([END])
                del self._sent[END]
        finally:
            self._write_state()
        return count

    def _require_owner(self, writer: str) -> None:
        if (owner := self.owner().get("host", writer)) != writer:
            raise FencedError(f"{self} now belongs to {owner}, which continued this run: nothing more is uploaded here")

    def only_here(self, *, whole: bool = False) -> list[str]:
        """Returns the names of files that the mirror lacks or has only in an older version; `whole`: see `upload`."""
        changes = (change.name for change in self._changes(self.noted_update, whole))
        growing = ((name, path) for name, path in self._files() if name.startswith(_GROWING))
        return [*changes, *(name for name, path in growing if self._next_part(name, path)[1] is not None)]

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
        names = sorted(self._objects.names())
        newest = self._objects.read(NEWEST) if NEWEST in names else b""
        number = json.loads(newest)["num_updates"] if newest else -1
        if newest and f"checkpoints/{number:09d}/{MANIFEST}" not in names:
            raise RuntimeError(f"another host is writing {self}: checkpoint {number} is incomplete")
        files = [name for name in names if _is_restored(name, number)]
        partial.mkdir(mode=0o700, parents=True)
        (partial / "logs").mkdir()
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lambda name: self._download(name, partial), files))
            parts = (name for name in names if name.startswith(PARTS))
            for folder, of_file in groupby(parts, key=lambda name: name.rpartition("/")[0]):
                name = folder.removeprefix(PARTS)
                self._parts[name] = self._join(pool, list(of_file), _below(partial, name))
        if newest:
            (partial / NEWEST).write_bytes(newest)  # The downloaded object may already be newer.
        os.replace(partial, self._run)
        self._sent = {name: _mark(self._run / name, expires=bool(_CHECKPOINT.match(name))) for name in files}
        self.restored = number
        self._write_state()
        log.info("restored %s from %s, checkpoint of update %d", self._run, self, number)

    def _join(self, pool: ThreadPoolExecutor, names: list[str], path: Path) -> list[Part]:
        """Writes a growing file from its parts, in order of their numbers; returns the last parts."""
        path.parent.mkdir(parents=True, exist_ok=True)
        parts: list[Part] = []
        with path.open("wb") as file:
            for some in (names[i : i + 4 * THREADS] for i in range(0, len(names), 4 * THREADS)):  # limits memory
                for name, data in zip(some, pool.map(self._objects.read, some), strict=True):
                    number, offset = map(int, name.rpartition("/")[2].split("-"))
                    self._number = max(self._number, number)
                    file.truncate(offset)
                    file.seek(offset)
                    file.write(data)
                    parts = [*(part for part in parts if part.offset < offset), Part.of(offset, data)]
        return [part for part in parts if part.size][-MAX_PARTS:]

    def _upload_part(self, name: str, path: Path) -> bool:
        """Uploads the new data of a growing file; returns whether there was any."""
        kept, data = self._next_part(name, path)
        if data is None:
            return False
        offset = kept[-1].offset + kept[-1].size if kept else 0
        self._number = max(self._number + 1, time.time_ns() // 1_000_000)  # increases even if the state file was lost
        self._objects.write(f"{PARTS}{name}/{self._number:015d}-{offset:015d}", data)
        self._parts[name] = [*kept, *([Part.of(offset, data)] if data else [])][-MAX_PARTS:]
        return True

    def _next_part(self, name: str, path: Path) -> tuple[list[Part], bytes | None]:
        """Returns the uploaded parts that still match the file, and the bytes of the file after these parts.

        The bytes are None if there is nothing to upload, and empty if the file only became shorter. A resumed run
        truncates rows after its checkpoint, so the last parts may no longer match.
        """
        parts = self._parts.get(name, [])
        with path.open("rb") as file:
            kept = list(parts)
            while (
                kept and Part.of(kept[-1].offset, os.pread(file.fileno(), kept[-1].size, kept[-1].offset)) != kept[-1]
            ):
                kept.pop()
            file.seek(kept[-1].offset + kept[-1].size if kept else 0)
            data = file.read()
        return kept, data if data or len(kept) < len(parts) else None

    def _delete_superseded(self, number: int) -> None:
        """Deletes the files of checkpoints that are older than checkpoint `number`, which the mirror has."""
        old = {name for name in self._sent if (found := _CHECKPOINT.match(name)) and int(found[1]) != number}
        self._objects.delete(sorted(old))
        self._sent = {name: mark for name, mark in self._sent.items() if name not in old}

    def _changes(self, number: int, whole: bool) -> Iterator[_Change]:
        """Yields files to upload: those of checkpoint `number` first, and each manifest after the files it lists."""
        for name, path in sorted(self._files(), key=lambda item: _rank(item[0])):
            checkpoint = _CHECKPOINT.match(name)
            is_due = int(checkpoint[1]) == number if checkpoint else whole or not name.startswith(_GROWING)
            with suppress(FileNotFoundError):
                mark, sent = _mark(path, expires=bool(checkpoint) and not whole), self._sent.get(name, [-1, -1, 0])
                if is_due and (sent[:2] != mark[:2] or sent[2] > mark[2]):  # changed, or no longer expires
                    yield _Change(name, path, mark)

    def _files(self) -> Iterator[tuple[str, Path]]:
        for folder, folders, names in os.walk(self._run):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in sorted(names):
                path = Path(folder) / name
                relative = path.relative_to(self._run).as_posix()
                if not name.startswith(".") and not relative.startswith(_LEFT_OUT):  # Hidden files are incomplete.
                    yield relative, path

    def _newest(self) -> tuple[int, bytes, list[int]]:
        """Returns the number of the newest checkpoint (-1: none), the content of newest.json, and that file's mark."""
        with suppress(OSError, ValueError, KeyError):
            path = self._run / NEWEST
            mark, data = _mark(path, expires=False), path.read_bytes()
            return int(json.loads(data)["num_updates"]), data, mark
        return -1, b"", [-1, -1, 0]

    def _download(self, name: str, folder: Path) -> None:
        path = _below(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._objects.download(name, path)

    def _write_state(self) -> None:
        state = {"mirror": str(self), "writer": self._writer, "restored": self.restored, "number": self._number}
        data = json.dumps({**state, "parts": self._parts, "sent": self._sent}).encode()
        with suppress(OSError):  # The disk of the run folder is full: the next start of this host uploads more again.
            replace_file(self._state_file, data)


def _is_restored(name: str, number: int) -> bool:
    checkpoint = _CHECKPOINT.match(name)
    return int(checkpoint[1]) == number if checkpoint else not name.startswith((PARTS, *_GROWING, *_LEFT_OUT, BEGUN))


def _below(folder: Path, name: str) -> Path:
    """Returns the path of an object below `folder`. Raises UsageError if the path would be outside."""
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise UsageError(f"the mirror has the object {name!r}, whose path is outside the run folder")
    return path


def _mark(path: Path, *, expires: bool) -> list[int]:
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, int(expires)]


def _rank(name: str) -> tuple[bool, bool, str]:
    return not _CHECKPOINT.match(name), name.endswith(MANIFEST), name
