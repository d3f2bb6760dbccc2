"""Opens the memory of a replay server, which may be an existing file, a restored snapshot or a new file.

Also removes memories that no run can use any more and, if tmpfs is short, those of killed runs.
"""

import logging
import mmap
import secrets
from contextlib import suppress
from pathlib import Path

from apexreplay.errors import DamagedMemoryError, UsageError
from apexreplay.process.limits import read_available_memory, read_space
from apexreplay.process.text import size
from apexreplay.sampling.sampler_counters import SamplerCounters
from apexreplay.snapshots.folder import SnapshotFolder
from apexreplay.snapshots.restore import restore
from apexreplay.store import location
from apexreplay.store.file import is_whole
from apexreplay.store.layout import StoreSettings
from apexreplay.store.writer import StoreWriter
from apexreplay.tables import Table

log = logging.getLogger("apexreplay")


def open_store(
    path: Path,
    table: Table,
    settings: StoreSettings,
    num_rows: int,
    *,
    run_id: int,
    snapshots: SnapshotFolder | None = None,
) -> tuple[StoreWriter, SamplerCounters]:
    """Attaches to the run's store if it exists and is sound; else restores the newest snapshot; else creates a store.

    Returns the store and the samplers' counters, with `num_rows` rows. Raises UsageError if the store is damaged and
    there is no snapshot.
    """
    if path.exists() and not is_whole(path) and not location.has_owner(path):
        log.error("removed %s: it was incomplete, because its creation was interrupted", path)
        location.remove(path)
    if path.exists():
        try:
            store = StoreWriter.attach(path, table, settings)
        except DamagedMemoryError as error:
            require_snapshot(error, snapshots)
            log.error("%s; removing the file and restoring the newest snapshot, without later items", error)
            location.remove(path)
        else:
            log.info("attached to %s: %d items", path, store.size)
            return store, SamplerCounters(num_rows, location.counters_path(path))
    location.counters_path(path).unlink(missing_ok=True)  # The counts of an earlier store.
    incarnation = secrets.randbits(62) + 1
    log.info("allocating %.1f GB in %s; restoring a snapshot if there is one", settings.max_bytes / 1e9, path)

    def note_drawn(num_drawn: int) -> None:
        # Otherwise the limiter would allow a burst of samples, and a queue would give items again.
        SamplerCounters(num_rows, location.counters_path(path)).continue_from(num_drawn)

    restored = None
    if snapshots is not None:
        options = {"run_id": run_id, "store_incarnation": incarnation}
        restored = restore(snapshots, path, table, settings, **options, note_drawn=note_drawn)
    if restored is None:
        store = StoreWriter.create(path, table, settings, store_incarnation=incarnation)
        log.info("created %s", path)
    else:
        store = restored
        log.info("restored %s: %d items (%d inserted in total)", path, store.size, store.num_inserted)
    return store, SamplerCounters(num_rows, location.counters_path(path))


def require_snapshot(damage: DamagedMemoryError, snapshots: SnapshotFolder | None) -> None:
    """Raises UsageError unless there is a snapshot that can replace the damaged memory."""
    if snapshots is None or snapshots.newest() is None:
        remedy = "remove the file to start with no items"
        raise UsageError(f"{damage}, and there is no snapshot", remedy) from damage


def reclaim(own: Path, num_bytes: int) -> None:
    """Removes what no run can use any more, to make room for `own`, the path of a store of `num_bytes`.

    If that is not enough and `own` does not exist, also removes memories of killed runs, the run started first before
    the others. Keeps the files of active runs and of the run of `own`.
    """
    for path in location.find_old_files():
        path.unlink(missing_ok=True)
        log.info("removed %s, left behind by an earlier version", path)
    kept: dict[Path, int] = {}
    for store in location.find_stores(own.parent):
        if location.is_same_run(store, own) or location.is_wanted(store):
            continue
        if not location.is_abandoned(store):
            with suppress(FileNotFoundError):  # Another process has just removed it.
                kept[store] = store.stat().st_size
        elif location.discard(store):
            log.info("removed %s: its run folder is gone, or it was never completed", store)
    for claim in own.parent.glob("apex-*.run"):
        location.forget_run(claim)
    for store, freed in kept.items():
        if own.exists() or not 0 < _missing_bytes(own.parent, num_bytes) <= sum(kept.values()):
            break
        run = location.read_run_folder(store) or "another host"
        if location.discard(store):
            log.warning("removed %s (%s) of the killed run %s, for space", store, size(freed), run)


def _missing_bytes(folder: Path, num_bytes: int) -> int:
    """Returns how many bytes tmpfs, or the memory of this host, lacks for a store of this size and its counters."""
    return num_bytes + mmap.PAGESIZE - min(read_space(folder).free, read_available_memory())
