"""Snapshots of the replay memory on disk: which files make one, and which of them are whole.

RUN/checkpoints/replay/ (and below it shard-0/, shard-1/, ... where there are several)
    000000012-0000.segments   transitions of consecutive keys, then the images of their segments
    000000012.state           a weight for each key, then what is known of each stream
    000000012.json            the manifest: which files make the snapshot, their sizes and SHA-256

Every file is written once, under a number that was never used before, and is on disk before the manifest that names
it. So a crash at any moment leaves the manifests before as they were. All numbers are little-endian.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from apex.errors import ConfigError
from apex.runtime.atomic_files import (
    check_digest,
    digest,
    go_on,
    seal,
    sync_folder,
    unseal,
    write_beside,
    write_flushed,
)

FORMAT = 2  # of the manifest; grows when an older program could no longer read the files
OLD_FORMAT = 1  # of a manifest that has its SHA-256 in another place
KEPT = 2  # snapshots with weights of their own; what they have in common is there once

_NAME = re.compile(r"\.?(\d{9})(-\d{4,}\.segments|\.state|\.json)(\.partial)?")

log = logging.getLogger("apex")


class SnapshotError(ConfigError):
    """A file that is missing, damaged or of another format; the text names it and says why."""


class SnapshotFile(NamedTuple):
    """What the manifest says of a file."""

    name: str
    num_bytes: int
    sha256: str
    first_key: int  # what it tells of are the keys from this one ...
    end_key: int  # ... up to this one, which is not among them


class Snapshot(NamedTuple):
    """What the manifest says: the transitions `first_key` ... `end_key` - 1 of a store."""

    number: int
    run_id: int
    schema: int  # Schema.fingerprint
    store_incarnation: int  # of the store that has these keys
    priority_exponent: float  # of the weights
    num_streams: int
    num_drawn: int  # transitions that samplers had drawn
    first_key: int
    end_key: int
    state: SnapshotFile
    segments: tuple[SnapshotFile, ...]  # oldest first, without a gap; the first one may begin before `first_key`

    @property
    def size(self) -> int:
        """Transitions in it."""
        return self.end_key - self.first_key


def shard_folder(snapshots: Path, num_shards: int, shard: int) -> Path:
    """Where a shard has its snapshots below the folder of all."""
    return snapshots if num_shards == 1 else snapshots / f"shard-{shard}"


class SnapshotFolder:
    """The snapshots of one store, and of those that were restored from them.

    `pause` is called with the name of each step before it is taken: tests crash in between.
    """

    def __init__(self, path: Path, *, pause: Callable[[str], None] = go_on) -> None:
        self.path = path
        self._pause = pause

    def next_number(self) -> int:
        """A number that no file here has."""
        return 1 + max((int(name.lstrip(".")[:9]) for name in self._names()), default=0)

    def newest(self) -> Snapshot | None:
        """The newest snapshot whose manifest is whole; its files are not looked into."""
        return next((found for found in map(self._read_or_log, self._manifests()) if found is not None), None)

    def write(self, name: str, parts: Sequence[Any], keys: range) -> SnapshotFile:
        """Writes a file, on disk when this returns; `parts` are buffers."""
        self._pause("write a file")
        self.path.mkdir(parents=True, exist_ok=True)
        write_flushed(self.path / name, *parts, drops_cache=True)  # Nobody reads it soon.
        num_bytes = sum(memoryview(part).nbytes for part in parts)
        return SnapshotFile(name, num_bytes, digest(*parts), keys.start, keys.stop)

    def commit(self, snapshot: Snapshot) -> None:
        """Makes the snapshot the newest, in one step, and removes what no kept one names."""
        path = self.path / f"{snapshot.number:09d}.json"
        self._pause("write the manifest")
        partial = write_beside(path, _encode(snapshot))
        sync_folder(self.path)  # The names of the files must be there before the manifest's.
        self._pause("rename the manifest")
        os.replace(partial, path)
        self._pause("flush the folder")
        sync_folder(self.path)
        self.prune()

    def is_there(self, file: SnapshotFile) -> bool:
        """Whether a file has the right length, at least."""
        try:
            return (self.path / file.name).stat().st_size == file.num_bytes
        except OSError:
            return False

    def read(self, file: SnapshotFile) -> bytes:
        """The file's content; raises SnapshotError unless it is what was written."""
        self._pause("read a file")
        path = self.path / file.name
        try:
            return check_digest(path.read_bytes(), file.sha256)
        except OSError as error:
            raise SnapshotError(f"{path}: {error.strerror}") from error
        except ValueError as error:
            raise SnapshotError(f"{path} is damaged: {error}") from error

    def load_latest(self) -> Snapshot | None:
        """The snapshot to go on from, with all its files verified; None if none was ever finished.

        What is bad is logged as an error. Where a file of the newest snapshot is bad, this is the one before or the
        keys behind the bad file, whichever are more. Raises SnapshotError where nothing is whole.
        """
        manifests, last = self._manifests(), self.next_number() - 1
        if manifests and int(manifests[0].name[:9]) < last:
            cause = f"{self.path} has files of {last:09d}.json without it: it was never finished, or is gone"
            log.error("%s; trying the snapshot before it", cause)
        best: Snapshot | None = None
        bad: dict[str, str] = {}  # files that were looked into already
        for found in map(self._read_or_log, manifests):
            whole = None if found is None else self._verify(found, bad)
            if whole is not None and (best is None or whole.size > best.size):
                best = whole
            if best is not None and best == found:
                break  # Nothing older has what it lacks.
        if best is None and manifests:
            raise SnapshotError(
                f"no snapshot of the replay memory in {self.path} is whole: the log says what is wrong with each. "
                "Remove that folder to go on with an empty replay memory"
            )
        if best is None and self._names():
            log.error("%s has no manifest: no snapshot of the replay memory was ever finished", self.path)
        return best

    def _verify(self, snapshot: Snapshot, bad: dict[str, str]) -> Snapshot | None:
        """The newest part of the snapshot that is whole; None if nothing is."""
        first_key = snapshot.end_key
        kept: list[SnapshotFile] = []
        for file in (snapshot.state, *reversed(snapshot.segments)):
            if file.name not in bad:
                try:
                    self.read(file)
                    bad[file.name] = ""
                except SnapshotError as error:
                    bad[file.name] = str(error)
                    log.error("%s; trying what else there is", error)
            if bad[file.name]:
                break
            if file != snapshot.state:
                kept.insert(0, file)
                first_key = max(file.first_key, snapshot.first_key)
        return snapshot._replace(first_key=first_key, segments=tuple(kept)) if kept else None

    def _read_or_log(self, path: Path) -> Snapshot | None:
        try:
            return _decode(path.read_bytes())
        except OSError as error:
            log.error("%s: %s; trying the snapshot before it", path, error.strerror)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            log.error("%s is damaged: %s; trying the snapshot before it", path, error)
        return None

    def prune(self) -> None:
        """Keeps the newest snapshots whose manifests are whole, and what they name; removes all else.

        What was restored from a snapshot, and has its files, is no second one: each could be damaged with the other.
        """
        kept: set[str] = set()  # files of weights
        names: set[str] = set()
        for path in self._manifests():
            found = self._read_or_log(path) if len(kept) < KEPT else None
            if found is not None:
                kept.add(found.state.name)
                names |= {path.name, found.state.name, *(file.name for file in found.segments)}
        self._pause("remove a file")
        for name in sorted(set(self._names()) - names, key=lambda name: not name.endswith(".json")):  # Manifests first.
            (self.path / name).unlink(missing_ok=True)

    def _manifests(self) -> list[Path]:
        """Newest first."""
        return [self.path / name for name in sorted(self._names(), reverse=True) if name.endswith(".json")]

    def _names(self) -> list[str]:
        try:
            return [name for name in os.listdir(self.path) if _NAME.fullmatch(name)]
        except FileNotFoundError:
            return []


def _encode(snapshot: Snapshot) -> bytes:
    state, segments = snapshot.state._asdict(), [file._asdict() for file in snapshot.segments]
    return seal({"format": FORMAT, **snapshot._asdict(), "state": state, "segments": segments})


def _decode(data: bytes) -> Snapshot:
    """The inverse of `_encode`; raises ValueError, KeyError or TypeError for anything else."""
    fields = json.loads(data)
    file_format = fields["format"]
    if file_format == OLD_FORMAT:
        check_digest(json.dumps(fields["snapshot"]).encode(), fields["sha256"])
        fields = fields["snapshot"]
    elif file_format == FORMAT:
        fields = unseal(data)
        del fields["format"]
    else:
        raise ValueError(f"its format is {file_format!r}, but this is {FORMAT}")
    state, segments = SnapshotFile(**fields.pop("state")), [SnapshotFile(**file) for file in fields.pop("segments")]
    return Snapshot(**fields, state=state, segments=tuple(segments))
