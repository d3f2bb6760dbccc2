"""Snapshots of the replay memory on disk: writes, verifies and removes their files.

RUN/checkpoints/replay/ (with several shards: shard-0/, shard-1/, ... inside it)
    000000012-0000.segments   records of consecutive keys, then the frame blobs of their segments
    000000012.state           a weight for each key, then one row for each stream
    000000012.json            the manifest: the files of the snapshot, their sizes and SHA-256

Each file is written once, under a new number, and is flushed to disk before the manifest that lists it is written. A
crash at any moment therefore leaves the earlier snapshots intact. All numbers are little-endian.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from apexreplay.errors import SnapshotError
from apexreplay.files.atomic_files import Steps, uninterrupted
from apexreplay.files.sealed_folder import SealedFile, SealedFolder, naming, require_readable

FORMAT = 4  # format of all files; increases when older programs cannot read them
KEPT = 2  # number of snapshots kept; a file that both list is stored once

log = logging.getLogger("apexreplay")


class SnapshotFile(NamedTuple):
    """A file as the manifest lists it."""

    name: str
    num_bytes: int
    sha256: str
    first_key: int  # first key in the file
    end_key: int  # last key in the file + 1


class Snapshot(NamedTuple):
    """The content of a manifest: describes the transitions `first_key` ... `end_key` - 1 of a store."""

    number: int
    run_id: int
    schema: int  # Table.fingerprint
    store_incarnation: int  # incarnation of the store that assigned these keys
    priority_exponent: float  # exponent of the saved weights
    num_streams: int
    num_drawn: int  # transitions that samplers had drawn when the snapshot was taken
    first_key: int
    end_key: int
    state: SnapshotFile
    segments: tuple[SnapshotFile, ...]  # oldest first, without a gap; the first may begin before `first_key`
    num_steps: int | None = None  # steps that the transitions up to `end_key` stand for; None: one each
    draws_per_item: int = 0  # of a queue; 0: another order

    @property
    def size(self) -> int:
        """Returns the number of transitions."""
        return self.end_key - self.first_key


def shard_folder(snapshots: Path, num_shards: int, shard: int) -> Path:
    """Returns the folder with the snapshots of one shard; `snapshots` is the folder for all shards."""
    return snapshots if num_shards == 1 else snapshots / f"shard-{shard}"


class SnapshotFolder:
    """The folder with the snapshots of one store and of the stores restored from these snapshots.

    `steps` is called before each step.
    """

    def __init__(self, path: Path, *, steps: Steps = uninterrupted) -> None:
        self.path = path
        names = r"\d{9}(-\d{4,}\.segments|\.state|\.json)"
        self._folder = SealedFolder(path, FORMAT, SnapshotError, names=names, steps=steps)

    def next_number(self) -> int:
        """Returns a number that no file in the folder has."""
        return 1 + max((int(name.lstrip(".")[:9]) for name in self._folder.names()), default=0)

    def newest(self) -> Snapshot | None:
        """Returns the newest snapshot with a valid manifest; does not verify its files. None if there is none."""
        return next((found for found in map(self._read_or_log, self._manifests()) if found is not None), None)

    def write(self, name: str, parts: Sequence[Any], keys: range) -> SnapshotFile:
        """Writes the buffers `parts` to a file, flushes it to disk and returns its manifest entry."""
        file = self._folder.write(name, *parts, drops_cache=True)  # The file will not be read soon.
        return SnapshotFile(*file, keys.start, keys.stop)

    def commit(self, snapshot: Snapshot) -> None:
        """Adds the snapshot atomically as the newest, and removes files that no kept snapshot lists."""
        state, segments = snapshot.state._asdict(), [file._asdict() for file in snapshot.segments]
        self._folder.seal(f"{snapshot.number:09d}.json", {**snapshot._asdict(), "state": state, "segments": segments})
        self.prune()

    def is_there(self, file: SnapshotFile) -> bool:
        """Returns whether a file exists with the right length; does not verify its content."""
        try:
            return (self.path / file.name).stat().st_size == file.num_bytes
        except OSError:
            return False

    def read(self, file: SnapshotFile) -> bytes:
        """Returns the content of a file; raises SnapshotError if it is missing or differs from its SHA-256."""
        return self._folder.read(SealedFile(*file[:3]))  # the entry without the keys

    def load_latest(self) -> Snapshot | None:
        """Returns the best snapshot to restore, with all its files verified; None if none was ever finished.

        Logs each damaged file as an error. If a file of the newest snapshot is damaged, returns either that snapshot
        with only the keys after the file, or the previous snapshot, whichever has more transitions. Raises
        SnapshotError if no snapshot is usable, or if a file cannot be read: going on without it would remove it later.
        """
        manifests, last = self._manifests(), self.next_number() - 1
        if manifests and int(manifests[0][:9]) < last:
            cause = f"snapshot {last} in {self.path} is unfinished, or its {last:09d}.json was removed"
            log.error("%s; trying the previous snapshot instead", cause)
        best: Snapshot | None = None
        bad: dict[str, str] = {}  # verified file -> error, or "" if the file is sound
        for name in manifests:
            found = self._read_or_log(name, or_raise=True)
            whole = None if found is None else self._verify(found, bad)
            if whole is not None and (best is None or whole.size > best.size):
                best = whole
            if best is not None and best == found:
                break  # This snapshot is complete.
        if best is None and manifests:
            raise SnapshotError(
                f"every snapshot of the replay memory in {self.path} is damaged (see the errors above)",
                "remove this folder to continue with an empty replay memory",
            )
        if best is None and self._folder.names():
            log.error("%s has no manifest: no snapshot of the replay memory was ever finished", self.path)
        return best

    def _verify(self, snapshot: Snapshot, bad: dict[str, str]) -> Snapshot | None:
        """Returns the snapshot without its newest damaged file and all older ones; None if no segments remain."""
        first_key = snapshot.end_key
        kept: list[SnapshotFile] = []
        for file in (snapshot.state, *reversed(snapshot.segments)):
            if file.name not in bad:
                try:
                    self.read(file)
                    bad[file.name] = ""
                except SnapshotError as error:
                    require_readable(error)
                    bad[file.name] = str(error)
                    log.error("%s; trying the other snapshots", error)
            if bad[file.name]:
                break
            if file != snapshot.state:
                kept.insert(0, file)
                first_key = max(file.first_key, snapshot.first_key)
        return snapshot._replace(first_key=first_key, segments=tuple(kept)) if kept else None

    def prune(self) -> None:
        """Keeps the KEPT newest snapshots with valid manifests and the files that they list; removes all others.

        Manifests that list the same state file count as one snapshot: a restore adds a manifest with the same files.
        Removes nothing while the disk cannot read a manifest, because the snapshot may be intact.
        """
        kept: set[str] = set()  # state files
        names: set[str] = set()
        for name in self._manifests():
            if len(kept) == KEPT:
                break
            try:
                found = self._read(name)
            except SnapshotError as error:
                if isinstance(error.__cause__, OSError):
                    log.error("%s; no snapshot is removed", error)
                    return
                log.error("%s; removing it", error)
                continue
            kept.add(found.state.name)
            names |= {name, found.state.name, *(file.name for file in found.segments)}
        self._folder.keep(names)

    def _read(self, name: str) -> Snapshot:
        """Returns the snapshot of a manifest; raises SnapshotError if the manifest is damaged or cannot be read."""
        fields = self._folder.manifest(name)
        with naming(self.path / name, SnapshotError):
            fields["state"] = SnapshotFile(**fields["state"])
            fields["segments"] = tuple(SnapshotFile(**file) for file in fields["segments"])
            return Snapshot(**fields)

    def _read_or_log(self, name: str, *, or_raise: bool = False) -> Snapshot | None:
        """Returns the snapshot of a manifest; logs an error and returns None if there is none.

        `or_raise`: raises SnapshotError if the manifest cannot be read, because it may be intact.
        """
        try:
            return self._read(name)
        except SnapshotError as error:
            if or_raise:
                require_readable(error)
            log.error("%s; trying the previous snapshot instead", error)
            return None

    def _manifests(self) -> list[str]:
        """Returns the names of all manifests, newest first."""
        return [name for name in sorted(self._folder.names(), reverse=True) if name.endswith(".json")]
