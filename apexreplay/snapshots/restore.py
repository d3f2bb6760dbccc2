"""Restores a new replay memory from the newest usable snapshot on disk."""

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np

from apexreplay.errors import require
from apexreplay.snapshots.folder import Snapshot, SnapshotFolder
from apexreplay.store import layout
from apexreplay.store.writer import StoreWriter
from apexreplay.tables import Table

log = logging.getLogger("apexreplay")


def restore(
    folder: SnapshotFolder,
    path: Path,
    table: Table,
    settings: layout.StoreSettings,
    *,
    run_id: int,
    store_incarnation: int,
    note_drawn: Callable[[int], None] = lambda num_drawn: None,
) -> StoreWriter | None:
    """Creates a store at `path` from the newest usable snapshot, with the same keys, weights and stream rows.

    Returns None if there is no snapshot. `store_incarnation` must be new, because the store may assign keys that the
    earlier store has assigned to other transitions. The file appears at `path` once it is complete, and after a call of
    `note_drawn` with the number of transitions that samplers had drawn when the snapshot was taken. Raises UsageError
    if the snapshot does not fit these settings, and SnapshotError if all snapshots are damaged.
    """
    snapshot = folder.load_latest()
    if snapshot is None:
        return None
    where = f"the snapshot of the replay memory in {folder.path}"
    remedy = "choose another folder"
    require(snapshot.run_id == run_id, f"{where} belongs to another run id, {snapshot.run_id:016x}", remedy=remedy)
    problem = f"{where} has schema {snapshot.schema:08x}, but the table has schema {table.fingerprint:08x}"
    require(snapshot.schema == table.fingerprint, problem, remedy=remedy)
    saved, exponent = snapshot.priority_exponent, settings.priority_exponent
    problem = f"{where} has priority_exponent {saved}, but the setting is {exponent}"
    require(saved == exponent, problem, remedy="use the same value")
    draws, wanted = snapshot.draws_per_item, settings.draws_per_item
    problem = f"{where} has draws_per_item {draws}, but the setting is {wanted}{layout.NOTES['draws_per_item']}"
    require(draws == wanted, problem, remedy="use the same order and number")
    problem = f"{where} has {snapshot.num_streams} streams, but num_streams is {settings.num_streams}"
    require(snapshot.num_streams <= settings.num_streams, problem, remedy="raise it")
    require_room(folder, snapshot, table, capacity=settings.capacity, max_bytes=settings.max_bytes)

    def fill(regions: layout.Regions) -> None:
        _fill(folder, snapshot, regions)
        note_drawn(snapshot.num_drawn)

    store = StoreWriter.create(path, table, settings, store_incarnation=store_incarnation, fill=fill)
    try:  # Lists the files as a snapshot of the new store, so that the next one reuses them.
        folder.commit(snapshot._replace(number=folder.next_number(), store_incarnation=store_incarnation))
    except OSError as error:
        log.error("cannot write to %s: %s; the next snapshot will write all items", folder.path, error)
    return store


def require_room(folder: SnapshotFolder, snapshot: Snapshot, table: Table, *, capacity: int, max_bytes: int) -> None:
    """Raises UsageError if a memory with these limits cannot hold the snapshot. Reads the snapshot's oldest file."""
    needed = f"at least {snapshot.size}, the size of the snapshot"
    require(snapshot.size <= capacity, f"capacity {capacity} must be {needed}", remedy="raise it")
    oldest, dtype = snapshot.segments[0], layout.stored_record_dtype(table)
    records = np.frombuffer(folder.read(oldest), dtype, oldest.end_key - oldest.first_key)
    dead = int(records["segment"][max(0, snapshot.first_key - oldest.first_key)])  # bytes of blobs before `first_key`
    num_bytes = sum(file.num_bytes - dtype.itemsize * (file.end_key - file.first_key) for file in snapshot.segments)
    require(
        num_bytes - dead <= layout.Sizes(capacity, max_bytes, snapshot.num_streams).arena_bytes,
        f"max_bytes {max_bytes} is too small for the snapshot, whose frames take {num_bytes - dead} B",
        remedy="raise it",
    )


def _fill(folder: SnapshotFolder, snapshot: Snapshot, regions: layout.Regions) -> None:
    """Copies the snapshot into an empty store, with the blobs next to each other from the start of the arena."""
    capacity, cells, dtype = regions.sizes.capacity, regions.cells, regions.records.dtype
    state = folder.read(snapshot.state)
    num_weights = snapshot.state.end_key - snapshot.state.first_key
    weights = np.frombuffer(state, np.float64, num_weights)[snapshot.first_key - snapshot.state.first_key :]
    rows = np.frombuffer(state, layout.STREAM_ROW, snapshot.num_streams, 8 * num_weights)
    end = 0
    for file in snapshot.segments:
        data = folder.read(file)
        num_records = file.end_key - file.first_key
        first_key = max(file.first_key, snapshot.first_key)
        records = np.frombuffer(data, dtype, num_records)[first_key - file.first_key :].copy()
        first = int(records["segment"][0])
        blobs = memoryview(data)[dtype.itemsize * num_records + first :]
        records["segment"] += end - first
        regions.arena[end : end + len(blobs)] = blobs
        end += len(blobs)
        slots = np.arange(first_key, file.end_key) % capacity
        regions.records[slots] = records
        regions.tree.set(slots, weights[first_key - snapshot.first_key :][: len(slots)])
    regions.streams[: len(rows), 0] = rows
    cells[layout.END_BYTE], cells[layout.FIRST_BYTE] = end, 0
    cells[layout.STEPS] = snapshot.end_key if snapshot.num_steps is None else snapshot.num_steps
    cells[layout.FIRST_KEY], cells[layout.COMMIT] = snapshot.first_key, snapshot.end_key
