"""`apex train --resume RUN`: which run goes on, whether it is the same one, and what it goes on from."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from apex.checkpoint_folder import Found, find_latest
from apex.config import Config, ConfigError, flatten, require
from apex.environment import describe, kind
from apex.options import parse_config
from apex.run_folder import RunFolder
from apex.saves import snapshot_folder
from apex.snapshot_restore import require_room
from apex.store_layout import Store, has_owner, is_whole, open_file, store_path

log = logging.getLogger("apex")

OPTION = "--resume"
ACCEPT = "--accept-changes"
LIMITS = ("run.stop_score", "run.max_steps", "run.max_updates", "run.max_minutes")
CHANGEABLE = {
    *LIMITS,
    "run.stuck_seconds",
    "run.tensorboard",
    "run.tensorboard_port",
    "run.tensorboard_bind",
    "transport.keys",
}
# What is on disk would not fit: no flag accepts a change of these.
FIXED = (
    "run.name",
    "run.folder",
    "run.single_process",
    "environment.id",
    "actor.num_actors",
    "actor.n_step",
    "learner.optimizer",
    "replay.num_shards",
    "replay.priority_exponent",
    "network.",  # all of that branch
)


def take_resume(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """The run that `--resume` names, if it is there, and all other arguments."""
    rest = list(arguments)
    for at, word in enumerate(rest):
        option, equals, name = word.partition("=")
        if option == OPTION:
            del rest[at]
            if not equals and at < len(rest) and not rest[at].startswith("--"):
                name = rest.pop(at)
            require(bool(name), f"{OPTION} needs a run folder, as in {OPTION} runs/pong-20250131-235959")
            return name, rest
    return None, rest


def reopen(name: str, arguments: Sequence[str]) -> tuple[RunFolder, Config]:
    """The run's folder, and its configuration with the changes that `arguments` give.

    Raises ConfigError if there is no such run, if it still runs on this host, or if more than limits would change
    without `--accept-changes` among the arguments.
    """
    folder = RunFolder.open(name)
    require(
        not folder.config.run.single_process,
        f"{OPTION} {name}: a run of --single-process has one curve from its first step, and cannot go on: a checkpoint "
        "has neither its games nor its memory. Start it anew with higher limits: it passes through the same states",
    )
    folder.mend_config_file()
    own = ["--config", str(folder.config_file)]
    config = parse_config([*own, *without_accept(arguments)], prog="apex train", description="", kind=kind)
    old, new = flatten(folder.config), flatten(config)
    differing = [knob for knob in old if old[knob] != new[knob] and knob not in CHANGEABLE]
    fixed = [knob for knob in differing if knob.startswith(FIXED)]
    changes = ", ".join(f"{knob} {old[knob]!r} -> {new[knob]!r}" for knob in fixed or differing)
    require(not fixed, f"{OPTION} {name} would change {changes}: what is saved would not fit. Start a new run")
    if differing and ACCEPT not in arguments:
        raise ConfigError(
            f"{OPTION} {name} would change {changes}; only limits may change: {', '.join(LIMITS)}. "
            f"Leave the rest out, say {ACCEPT}, or start a new run"
        )
    if describe(config.environment, config.actor.n_step) != folder.schema:
        raise ConfigError(f"{OPTION} {name}: {config.environment.id} is not what it was; install the versions of then")
    stores = [store_path(folder.run_id, shard) for shard in range(config.replay.num_shards)]
    require(not any(map(has_owner, stores)), f"{OPTION} {name}: this run is still going; stop it first")
    return folder, config


def without_accept(arguments: Sequence[str]) -> list[str]:
    """What is left for the knobs."""
    return [word for word in arguments if word != ACCEPT]


def survey(folder: RunFolder, config: Config, *, accept: bool) -> list[str]:
    """What the run will go on from, in sentences for the user: what was found, and what was passed over and why.

    All of it is read and verified here, before anything is started. Raises ConfigError where nothing that was saved is
    whole, where the replay memory would not fit its sizes, and, unless `accept`, where all checkpoints are gone or the
    replay memory that belongs to the newest is.
    """
    with _listen() as said:
        found = find_latest(folder.checkpoints)
        shards = range(config.replay.num_shards)
        replay = [_survey_replay(folder, config, shard, found, accept=accept) for shard in shards]
    lines = [f"passed over: {sentence}" for sentence in said]
    if found.state is None and folder.has_saved:
        gone = f"{folder.checkpoints} has no checkpoint, but one was written"
        require(accept, f"{OPTION} {folder.name}: {gone}. Put it back, or say {ACCEPT} to begin at update 0")
        lines.append(f"learner: begins at update 0; {gone}")
    elif found.state is None:
        lines.append("learner: no checkpoint was ever finished; it begins at update 0")
    else:
        steps = found.state.progress.num_steps
        lines.append(f"learner: goes on at update {found.state.num_updates:,}, {steps:,} steps")
    return lines + replay


def _survey_replay(folder: RunFolder, config: Config, shard: int, found: Found, *, accept: bool) -> str:
    name = "replay" if config.replay.num_shards == 1 else f"replay {shard}"
    path = store_path(folder.run_id, shard)
    if path.exists() and not is_whole(path):
        log.warning("%s: no replay memory, its making was cut short; the replay server removes it", path)
    snapshots = snapshot_folder(folder.checkpoints, config.replay.num_shards, shard)
    sizes = config.replay.per_shard()
    max_bytes = sizes.max_bytes or sys.maxsize  # 0: by what there is room for, which is not known here
    if path.exists() and is_whole(path):
        store = Store(open_file(path, folder.schema, writable=False))
        made = store.capacity, store.max_bytes if sizes.max_bytes else 0
        require(
            made == (sizes.capacity, sizes.max_bytes),
            f"{path} was made with replay.capacity {made[0]} and replay.max_bytes {made[1]}, but this is "
            f"{sizes.capacity} and {sizes.max_bytes}: use those, or remove it",
        )
        line = f"{name}: {store.size:,} transitions, still in {path}"
        newer = snapshots.newest() if config.checkpoint.replay else None
        if newer is not None and newer.end_key > store.num_inserted:
            line += f"; snapshot {newer.number} is newer by {newer.end_key - store.num_inserted:,}, and is not taken"
        return line
    snapshot = snapshots.load_latest() if config.checkpoint.replay else None
    saved = next((part for part in found.replay if part.shard == shard), None)
    if snapshot is not None:
        require_room(snapshots, snapshot, capacity=sizes.capacity, max_bytes=max_bytes)
        line = f"{name}: {snapshot.size:,} transitions of snapshot {snapshot.number}"
        if saved is not None and snapshot.number < saved.number:
            line += f"; the checkpoint was saved with snapshot {saved.number} of {saved.size:,}"
        return line
    if saved is not None:
        gone = f"{snapshots.path} has no snapshot, but the checkpoint was saved with one of {saved.size:,} transitions"
        require(accept, f"{OPTION} {folder.name}: {gone}. Put it back, or say {ACCEPT} to go on with an empty memory")
        return f"{name}: begins with an empty memory; {gone}"
    if found.state is None and not folder.has_saved:
        return f"{name}: no snapshot was ever finished; it begins with an empty memory"
    return f"{name}: nothing here; a replay server elsewhere goes on from its own --snapshots, or begins empty"


class _Ear(logging.Handler):
    """Keeps what is said of damage."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@contextmanager
def _listen() -> Iterator[list[str]]:
    ear = _Ear()
    log.addHandler(ear)
    try:
        yield ear.said
    finally:
        log.removeHandler(ear)
