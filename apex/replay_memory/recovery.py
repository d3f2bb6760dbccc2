"""Where a replay server's memory comes from: what is there, else a snapshot, else nothing; and who clears up."""

from __future__ import annotations

import logging
import secrets
from pathlib import Path

from apex.config import ReplayConfig
from apex.errors import ConfigError
from apex.replay_memory.sampler_counters import SamplerCounters, counter_rows
from apex.replay_memory.snapshots.folder import SnapshotFolder
from apex.replay_memory.snapshots.restore import restore
from apex.replay_memory.store.file import DamagedMemoryError, is_whole
from apex.replay_memory.store.layout import StoreSettings
from apex.replay_memory.store.location import (
    beside,
    counters_path,
    has_owner,
    is_same_run,
    is_wanted,
    remove,
    store_path,
)
from apex.replay_memory.store.writer import StoreWriter
from apex.transport.hello import Welcome, host_name
from apex.transport.messages.control import WaitAnswer

log = logging.getLogger("apex")


def open_store(
    path: Path, welcome: Welcome, snapshots: SnapshotFolder | None = None
) -> tuple[StoreWriter, SamplerCounters]:
    """Goes on with the run's store if it is there and sound, else with its newest snapshot, else makes a new one.

    Returns it with the samplers' counters. Raises ConfigError where the store is damaged and there is no snapshot.
    """
    config, schema = welcome.config, welcome.schema
    settings = store_settings(config.replay, config.actor.num_actors)
    num_rows = counter_rows(config.replay, config.learner)
    if path.exists() and not is_whole(path) and not has_owner(path):
        log.error("removed %s, which was no replay memory: its making was cut short", path)
        remove(path)
    if path.exists():
        try:
            store = StoreWriter.attach(path, schema, settings)
        except DamagedMemoryError as error:
            require_snapshot(error, snapshots)
            log.error("%s; removed: going on with the newest snapshot, without what was stored after it", error)
            remove(path)
        else:
            log.info("goes on with %s: %d transitions", path, store.size)
            return store, SamplerCounters(num_rows, counters_path(path))
    counters_path(path).unlink(missing_ok=True)  # It counted what was drawn from another store.
    incarnation = secrets.randbits(62) + 1
    log.info("reserving %.1f GB in %s, and filling it if there is a snapshot", settings.max_bytes / 1e9, path)
    restored = None
    if snapshots is not None:
        restored = restore(snapshots, path, schema, settings, run_id=welcome.run_id, store_incarnation=incarnation)
    if restored is None:
        store = StoreWriter.create(path, schema, settings, store_incarnation=incarnation)
        log.info("made %s", path)
        return store, SamplerCounters(num_rows, counters_path(path))
    store, counters = restored.store, SamplerCounters(num_rows, counters_path(path))
    counters.go_on_from(restored.num_drawn)  # Else the limiter would see samples to catch up with.
    log.info("restored %s: %d transitions, %d in all", path, store.size, store.num_inserted)
    return store, counters


def require_snapshot(damage: DamagedMemoryError, snapshots: SnapshotFolder | None) -> None:
    """Raises ConfigError unless there is a snapshot to go on from instead of a damaged memory."""
    if snapshots is None or snapshots.newest() is None:
        raise ConfigError(f"{damage}, and there is no snapshot: remove it to begin with an empty memory") from damage


def store_settings(replay: ReplayConfig, num_streams: int) -> StoreSettings:
    """What each shard's store is made for."""
    own = replay.per_shard()
    return StoreSettings(own.capacity, own.max_bytes, num_streams, own.priority_exponent, own.min_priority)


def reclaim(own: Path) -> None:
    """Removes what other runs that crashed have left in memory, unless an owner or a learner beside it lives."""
    for path in own.parent.glob("apex-*.replay"):
        if not is_same_run(path, own) and not is_wanted(path):
            try:
                removed = remove(path)
            except ConfigError:
                continue
            if removed:  # Else it went with its store.
                log.info("removed %s, which a run that ended badly had left", path)
    for counters in own.parent.glob("apex-*.board"):
        store = counters.with_suffix(".replay")
        if not store.exists() and not is_same_run(store, own) and not is_wanted(store):
            counters.unlink(missing_ok=True)


def predecessor_is_dead(shard: int, answer: WaitAnswer) -> bool:
    """Whether the replay server that holds this shard ran on this host, died and left its memory.

    `answer` is the learner's when it says that the place is taken.
    """
    path = store_path(answer.run_id, shard)
    left = path.exists() or beside(path).exists()
    return answer.host == host_name() and left and not has_owner(path)
