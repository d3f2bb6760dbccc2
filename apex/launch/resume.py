"""`apex train --resume RUN`: checks the settings and verifies all saved files of the run before any program starts."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from apex.command_line import parse_config
from apex.config import Config, flatten, from_dict
from apex.config.arguments import Parser
from apex.environments.inspection import Inspector
from apex.facts import EndReason, LossCause, Missing, OtherVersion, Restored
from apex.metric_tags import shard_tag
from apex.runs.folder import RunFolder
from apex.runtime.provenance import describe_checkout
from apex.runtime.trust import add_allow
from apex.schema import Schema
from apex.sentences import describe
from apex.types import Role
from apex.version import VERSION
from apexreplay.errors import DamagedMemoryError, UsageError, require
from apexreplay.server.open_store import require_snapshot
from apexreplay.snapshots.folder import SnapshotFolder
from apexreplay.snapshots.restore import require_room
from apexreplay.store.file import is_whole, open_file
from apexreplay.store.integrity import require_sound
from apexreplay.store.layout import Store
from apexreplay.store.location import has_owner, store_path

if TYPE_CHECKING:
    from apex.runs.checkpoints.checkpoint import ReplayPart

OPTION, CONTINUE = "--resume", "--continue"
ACCEPT = "--accept-changes"
LIMITS = {
    "score": "run.stop_score",
    "steps": "run.max_steps",
    "updates": "run.max_updates",
    "minutes": "run.max_minutes",
}
CHANGEABLE = {
    *LIMITS.values(),
    "run.mirror",
    "run.stuck_seconds",
    "run.tensorboard",
    "run.tensorboard_port",
    "run.tensorboard_bind",
    "transport.keys",
    "transport.bind",
    "transport.advertise",
    "transport.port_offset",
}
# If one of these settings changed, the saved files would no longer fit. Therefore no flag allows such a change.
FIXED = (
    "run.name",
    "run.folder",
    "run.single_process",
    "environment.id",
    "environment.frame_stack",
    "environment.image_size",
    "environment.image_crop",
    "environment.grayscale",
    "environment.full_action_space",
    "actor.num_actors",
    "actor.n_step",
    "learner.optimizer",
    "replay.num_shards",
    "replay.priority_exponent",
    *(name for name in flatten(Config()) if name.startswith("network.")),
    "algorithm",
    "iqn.layer_norm",
    "r2d2.sequence_length",
    "r2d2.burn_in",
    "r2d2.units",
    "dpg.policy_units",
    "dpg.policy_units_2",
    "dpg.critic_units",
    "dpg.critic_units_2",
    "dpg.num_critics",
    "dpg.first_activation",
    "dpg.normalize_observations",
)

log = logging.getLogger("apex")


def resume_parser(prog: str) -> Parser:
    """Returns a parser for the run to resume and for --allow; `parse_config` reads the rest of the command line."""
    parser = Parser(prog=prog, add_help=False)
    parser.add_argument(
        OPTION,
        metavar="RUN",
        help="continue the run in this folder; limits, mirror, TensorBoard, keys and addresses may change",
    )
    parser.add_argument(
        CONTINUE, dest="continue_run", action="store_true", help="continue the run --name NAME if it exists"
    )
    parser.add_argument(
        ACCEPT, action="store_true", help=f"allow {OPTION} and {CONTINUE} to change other settings or lose saved data"
    )
    add_allow(parser)
    return parser


def reopen(
    name: str,
    changes: Sequence[str] | Mapping[str, Any],
    *,
    accept: bool = False,
    inspector: Inspector | None = None,
) -> tuple[RunFolder, Config]:
    """Returns the run's folder, and its configuration with changes: options of a command line, or a tree of settings.

    Raises UsageError if there is no such run, if the run is still running on this host, if it would end at once at the
    limit that it has reached, or if settings other than limits would change without `accept`.
    """
    folder, run = RunFolder.open(name), f"{OPTION} {name}"
    prepare(folder, run)
    if isinstance(changes, Mapping):
        config = from_dict(dict(changes), folder.config)
    else:
        config = parse_config(changes, prog="apex train", description="", base=folder.config)
    require_fitting(folder, config, run, accept, inspector or Inspector())
    if (end := reached_limit(folder, config)) is not None:
        raise UsageError(f"{run}: this run has reached {limit_option(end)} {end.value:g}", raise_limit(end))
    return folder, config


def prepare(folder: RunFolder, run: str) -> None:
    """Writes config.toml again if it was changed. Raises UsageError if the run cannot be resumed.

    `run`: how messages name the run.
    """
    require(
        not folder.config.run.single_process,
        f"{run}: a run with --single-process cannot be resumed, because its checkpoints contain neither the games nor "
        "the replay memory",
        remedy="start a new run with higher limits: it repeats the same steps",
    )
    folder.restore_config_file()


def require_fitting(folder: RunFolder, config: Config, run: str, accept: bool, inspector: Inspector) -> None:
    """Raises UsageError if settings other than limits differ from the saved ones without `accept`.

    Also if the saved files would not fit the settings, or if the run is still running on this host.
    """
    require_same_settings(folder, config, run, accept)
    require_same_environment(folder, config, run, inspector)
    require_idle(folder, config, run)


def require_idle(folder: RunFolder, config: Config, run: str) -> None:
    """Raises UsageError if a replay server of the run is still running on this host."""
    stores = [store_path(folder.run_id, shard) for shard in range(config.replay.num_shards)]
    require(not any(map(has_owner, stores)), f"{run}: this run is still running", remedy="stop it first")


def require_same_environment(folder: RunFolder, config: Config, run: str, inspector: Inspector) -> None:
    """Raises UsageError if the environment has other observations or actions than those of the run."""
    problem = f"{run}: {config.environment.id} has changed since the run was saved"
    remedy = "install the package versions that the run was started with"
    require(inspector.schema(config) == folder.schema, problem, remedy=remedy)


def require_same_settings(folder: RunFolder, config: Config, run: str, accept: bool) -> None:
    """Raises UsageError if settings other than limits differ from the saved ones without `accept`.

    Also with `accept`, if the saved files would not fit them.
    """
    old, new = flatten(folder.config), flatten(config)
    differing = [setting for setting in old if old[setting] != new[setting] and setting not in CHANGEABLE]
    fixed = [setting for setting in differing if setting in FIXED]
    changes = ", ".join(f"{setting} {old[setting]!r} -> {new[setting]!r}" for setting in fixed or differing)
    require(not fixed, f"{run} would change {changes}; the saved files would not fit", remedy="start a new run")
    require(
        accept or not differing,
        f"{run} would change {changes}",
        remedy=f"remove the other options, add {ACCEPT}, or start a new run; limits, addresses and keys may change",
    )


def reached_limit(folder: RunFolder, config: Config) -> EndReason | None:
    """Returns the limit at which the run has ended if `config` keeps it, because the run would end again at once."""
    end = folder.end
    if end is None or end.kind not in LIMITS or end.value is None:
        return None
    limit = flatten(config)[LIMITS[end.kind]]
    return None if limit == _unlimited(end) or limit > end.value else end


def limit_option(end: EndReason) -> str:
    """Returns the option of the limit at which a run has ended."""
    return f"--{LIMITS[end.kind].removeprefix('run.').replace('_', '-')}"


def _unlimited(end: EndReason) -> int | None:
    return None if end.kind == "score" else 0


def raise_limit(end: EndReason) -> str:
    """Returns how a run that has ended at a limit is trained further."""
    option, none = limit_option(end), _unlimited(end)
    return f"give a higher {option}; {option} {'none' if none is None else none} means no limit"


def find_saved(folder: RunFolder, config: Config, *, accept: bool) -> list[Restored]:
    """Reads and verifies all saved files; returns from what the learner and each shard start. Logs what is damaged.

    Raises UsageError if every saved file is damaged, or if the saved replay memory does not fit the configured sizes.
    Without `accept`, also raises UsageError if all checkpoints are missing, or if the replay memory that belongs to the
    newest checkpoint is missing.
    """
    from apex.runs.checkpoints.folder import find_latest  # Imported here because new runs do not need torch here.

    found = find_latest(folder.checkpoints)
    made = int(_last_figures(folder, Role.LEARNER).get("learner/updates") or 0)
    if found.state is not None:
        saved_at, steps = found.state.num_updates, found.state.progress.num_steps
        lost = max(0, made - saved_at)
        learner = Restored(part="learner", source="checkpoint", number=saved_at, size=steps, lost=lost)
    else:
        path = str(folder.checkpoints) if folder.has_saved else ""
        learner = Restored(part="learner", source="nothing", path=path, lost=made)
        require(
            accept or not folder.has_saved,
            f"{OPTION} {folder.name}: {folder.checkpoints} has no checkpoint, but the run had written one",
            remedy=f"restore it, or add {ACCEPT} to begin at update 0",
        )
    saved = {part.shard: part for part in found.replay}
    is_new = found.state is None and not folder.has_saved
    shards = range(config.replay.num_shards)
    return [learner, *(_find_memory(folder, config, shard, saved.get(shard), is_new, accept) for shard in shards)]


def report_losses(folder: RunFolder, found: Sequence[Restored], *, ask: bool) -> None:
    """Logs what the run lacks if it starts from `found`. With `ask`, raises UsageError instead if it lacks anything."""
    losses = [describe(loss) for loss in (find_missing(folder, found), find_other_version(folder)) if loss is not None]
    require(not ask or not losses, f"{OPTION} {folder.name}: {'; '.join(losses)}", remedy=f"add {ACCEPT} to continue")
    for loss in losses:
        log.warning("%s", loss)


def find_missing(folder: RunFolder, found: Sequence[Restored]) -> Missing | None:
    """Returns which acknowledged transitions the run lacks if it starts from `found`; None: it lacks none.

    Compares with the last row of the curves, which counts the transitions until at most two seconds before the end of
    the run; without such a row, with the checkpoint.
    """
    learner, *parts = found
    figures = _last_figures(folder, Role.REPLAY)
    tags = [(shard_tag("num_inserted", shard), shard_tag("size", shard), [part]) for shard, part in enumerate(parts)]
    if not any(tag in figures for tag, *_ in tags):  # There is one shard, or an earlier version has written the row.
        tags = [("replay/num_inserted", "replay/size", parts)]
        figures["replay/num_inserted"] = figures.get("replay/num_inserted") or learner.size
    missing = held = 0
    for stored_tag, held_tag, its_parts in tags:
        stored = int(figures.get(stored_tag, 0))
        size = int(figures.get(held_tag, stored))
        held += size
        missing += max(0, min(size, stored - sum(part.count for part in its_parts)))
    causes = dict.fromkeys(cause for part in parts for cause in part.causes)
    return Missing(transitions=missing, of=held, causes=tuple(causes)) if missing > 0 else None


def _last_figures(folder: RunFolder, role: Role) -> dict[str, Any]:
    """Returns the last values in a role's curves; {} if there are none."""
    from apex.runs.metrics.writer import MAX_ROW_BYTES, read_curve  # Imported here because new runs do not need it.

    rows = read_curve(folder.curves / f"{role}.jsonl", MAX_ROW_BYTES)
    return {tag: value for row in rows for tag, value in row.get("scalars", {}).items()}


def find_other_version(folder: RunFolder) -> OtherVersion | None:
    """Returns the version of this package that started the run last, and the present one; None if they are the same.

    Compares commits if both are known, else version numbers.
    """
    last = [folder.manifest, *folder.manifest.get("resumed", [])][-1]
    git, checkout = last.get("git"), describe_checkout(Path(__file__).parent)
    saved, present = (last.get("versions") or {}).get("apex") or "?", VERSION
    if git and checkout:
        saved, present = git["commit"], checkout["commit"]
    return None if saved == present else OtherVersion(saved, present)


def _find_memory(
    folder: RunFolder, config: Config, shard: int, saved: ReplayPart | None, is_new: bool, accept: bool
) -> Restored:
    """`saved`: the snapshot that the checkpoint was saved with. `is_new`: the run has never saved anything."""
    from apex.learning.run_save import snapshot_folder

    part = "replay" if config.replay.num_shards == 1 else f"replay {shard}"
    sizes, snapshots = config.replay.per_shard(), snapshot_folder(folder.checkpoints, config.replay.num_shards, shard)
    path = store_path(folder.run_id, shard)
    store = _open_memory(path, folder.schema, snapshots if config.checkpoint.replay else None)
    newest = snapshots.newest() if config.checkpoint.replay else None
    if isinstance(store, Store):
        made = store.capacity, store.max_bytes if sizes.max_bytes else 0
        require(
            made == (sizes.capacity, sizes.max_bytes),
            f"{path} was created with replay.capacity {made[0]} and replay.max_bytes {made[1]}, but the settings are "
            f"{sizes.capacity} and {sizes.max_bytes}",
            remedy="use the sizes of the file, or remove the file",
        )
        found = Restored(part=part, source="memory", size=store.size, count=store.num_inserted, path=str(path))
        if newest is None or newest.end_key <= store.num_inserted:
            return found
        more = newest.end_key - store.num_inserted
        return replace(found, other_number=newest.number, other_size=more, causes=("memory_older",))
    other = {} if saved is None else {"other_number": saved.number, "other_size": saved.size}
    snapshot = snapshots.load_latest() if config.checkpoint.replay else None
    if snapshot is not None:
        max_bytes = sizes.max_bytes or sys.maxsize  # If 0, the replay server chooses the size from its free memory.
        require_room(snapshots, snapshot, folder.schema.table, capacity=sizes.capacity, max_bytes=max_bytes)
        damaged = newest.size - snapshot.size if newest is not None and newest.number == snapshot.number else 0
        is_older = damaged > 0 or snapshot.number < snapshots.next_number() - 1
        is_oldest = saved is not None and snapshot.number < saved.number
        causes: tuple[LossCause, ...] = (store, "snapshot_older") if is_older or is_oldest else (store,)
        found = Restored(part=part, source="snapshot", number=snapshot.number, size=snapshot.size, causes=causes)
        return replace(found, count=snapshot.end_key - damaged, **(other if is_oldest else {}))
    require(
        accept or saved is None,
        f"{OPTION} {folder.name}: {snapshots.path} has no snapshot, but the checkpoint was saved with one",
        remedy=f"copy it back, or add {ACCEPT} to continue with an empty memory",
    )
    where = "" if is_new else str(snapshots.path)
    return Restored(part=part, source="nothing", path=where, causes=(store, "snapshot_gone"), **other)


def _open_memory(path: Path, schema: Schema, snapshots: SnapshotFolder | None) -> Store | LossCause:
    """Opens the replay memory that is still in tmpfs; returns why if there is none that the server can use."""
    if not path.exists():
        return "memory_gone"
    if not is_whole(path):
        log.warning("skipped %s: its creation was interrupted; the replay server will remove it", path)
        return "memory_incomplete"
    try:
        regions = open_file(path, schema.table, writable=False)
        require_sound(path, regions, schema.table)
    except DamagedMemoryError as error:
        require_snapshot(error, snapshots)
        log.warning("skipped: %s; the replay server will remove this file", error)
        return "memory_damaged"
    return Store(regions)
