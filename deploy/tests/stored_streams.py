"""Reads from a replay memory how much of each stream it has stored, while it is written."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from apex.runs.folder import RunFolder
from apexreplay.store.file import open_file
from apexreplay.store.layout import COMMIT
from apexreplay.store.location import MEMORY


class Stored(NamedTuple):
    """The state of one stream."""

    incarnation: int
    contiguous: int  # segments 0 ... contiguous - 1 are stored
    bitmap: int  # bitmap of later segments; not 0: there is a gap


class Memory(NamedTuple):
    """The state of the whole store."""

    incarnation: int
    num_inserted: int  # transitions
    streams: list[Stored]  # streams by actor id


def read_memory(root: Path, run: Path) -> Memory:
    """Reads the store on the machine whose file system is at `root`; `run` is the learner's run folder."""
    folder = RunFolder.open(run)
    (path,) = (root / MEMORY.relative_to("/")).glob(f"apex-*/apex-{folder.run_id:016x}-0.replay")  # of any user
    regions = open_file(path, folder.schema.table, writable=False)
    while True:
        commit = int(regions.cells[COMMIT])
        rows = [max(row for row in versions if row[0] <= commit) for versions in regions.streams.tolist()]
        if int(regions.cells[COMMIT]) == commit:  # Otherwise rows may have been overwritten.
            streams = [Stored(*row[1:]) for row in rows]
            return Memory(int(regions.header["store_incarnation"][0]), commit, streams)
