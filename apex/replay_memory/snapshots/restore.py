"""Fills a new replay memory from the newest snapshot on disk that is whole."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

import numpy as np

from apex.errors import require
from apex.replay_memory.snapshots.folder import Snapshot, SnapshotFolder
from apex.replay_memory.store.layout import (
    COMMIT,
    END_BYTE,
    FIRST_BYTE,
    FIRST_KEY,
    STORED_RECORD,
    STREAM_ROW,
    Regions,
    Sizes,
    StoreSettings,
)
from apex.replay_memory.store.writer import StoreWriter
from apex.types import Schema

log = logging.getLogger("apex")


class Restored(NamedTuple):
    """A store that holds what a snapshot says."""

    store: StoreWriter
    num_drawn: int  # transitions that samplers had drawn by then


def restore(
    folder: SnapshotFolder,
    path: Path,
    schema: Schema,
    settings: StoreSettings,
    *,
    run_id: int,
    store_incarnation: int,
) -> Restored | None:
    """Makes a store at `path` from the newest snapshot that is whole: keys, weights and rows as they were.

    None if there is no snapshot. `store_incarnation` must be a new one, as keys may be used again. The file appears at
    `path` when it is complete. Raises ConfigError where the snapshot does not fit, SnapshotError where none is whole.
    """
    snapshot = folder.load_latest()
    if snapshot is None:
        return None
    where = f"the snapshot of the replay memory in {folder.path}"
    require(snapshot.run_id == run_id, f"{where} is of another run ({snapshot.run_id:016x}): name another folder")
    require(snapshot.schema == schema.fingerprint, f"{where} holds transitions of another kind: name another folder")
    require(
        snapshot.priority_exponent == settings.priority_exponent,
        f"{where} was made with priority_exponent {snapshot.priority_exponent}, but this is "
        f"{settings.priority_exponent}",
    )
    require(
        snapshot.num_streams <= settings.num_streams,
        f"{where} has {snapshot.num_streams} actors, but actor.num_actors is {settings.num_streams}",
    )
    require_room(folder, snapshot, capacity=settings.capacity, max_bytes=settings.max_bytes)
    store = StoreWriter.create(
        path,
        schema,
        settings,
        store_incarnation=store_incarnation,
        fill=lambda regions: _fill(regions, folder, snapshot),
    )
    try:  # The next snapshot goes on from these files: they hold the new store's first keys.
        folder.commit(snapshot._replace(number=folder.next_number(), store_incarnation=store_incarnation))
    except OSError as error:
        log.error("cannot write to %s: %s", folder.path, error)
    return Restored(store, snapshot.num_drawn)


def require_room(folder: SnapshotFolder, snapshot: Snapshot, *, capacity: int, max_bytes: int) -> None:
    """Raises ConfigError where a memory of this size cannot hold what the snapshot has; reads its oldest file."""
    require(snapshot.size <= capacity, f"replay.capacity {capacity} must hold the snapshot's {snapshot.size}: raise it")
    oldest = snapshot.segments[0]
    records = np.frombuffer(folder.read(oldest), STORED_RECORD, oldest.end_key - oldest.first_key)
    dead = int(records["segment"][max(0, snapshot.first_key - oldest.first_key)])  # bytes of blobs before the first
    num_bytes = sum(
        file.num_bytes - STORED_RECORD.itemsize * (file.end_key - file.first_key) for file in snapshot.segments
    )
    require(
        num_bytes - dead <= Sizes(capacity, max_bytes, snapshot.num_streams).arena_bytes,
        f"replay.max_bytes {max_bytes} is too small for the snapshot, whose frames take {num_bytes - dead}: raise it",
    )


def _fill(regions: Regions, folder: SnapshotFolder, snapshot: Snapshot) -> None:
    """Lays everything into an empty store, the blobs side by side from the arena's beginning."""
    capacity, cells = regions.sizes.capacity, regions.cells
    state = folder.read(snapshot.state)
    num_weights = snapshot.state.end_key - snapshot.state.first_key
    weights = np.frombuffer(state, np.float64, num_weights)[snapshot.first_key - snapshot.state.first_key :]
    rows = np.frombuffer(state, STREAM_ROW, snapshot.num_streams, 8 * num_weights)
    end = 0
    for file in snapshot.segments:
        data = folder.read(file)
        num_records = file.end_key - file.first_key
        first_key = max(file.first_key, snapshot.first_key)
        records = np.frombuffer(data, STORED_RECORD, num_records)[first_key - file.first_key :].copy()
        first = int(records["segment"][0])
        blobs = memoryview(data)[STORED_RECORD.itemsize * num_records + first :]
        records["segment"] += end - first
        regions.arena[end : end + len(blobs)] = blobs
        end += len(blobs)
        slots = np.arange(first_key, file.end_key) % capacity
        regions.records[slots] = records
        regions.tree.set(slots, weights[first_key - snapshot.first_key :][: len(slots)])
    regions.streams[: len(rows), 0] = rows
    cells[END_BYTE], cells[FIRST_BYTE] = end, 0
    cells[FIRST_KEY], cells[COMMIT] = snapshot.first_key, snapshot.end_key
