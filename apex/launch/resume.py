"""`apex train --resume RUN`: which run goes on, and whether it is the same one."""

from __future__ import annotations

from collections.abc import Sequence

from apex.config import Config, flatten
from apex.config.arguments import Parser
from apex.config.command_line import parse_config
from apex.environments.factory import describe, kind
from apex.errors import ConfigError, require
from apex.replay_memory.store.location import has_owner, store_path
from apex.runs.folder import RunFolder
from apex.runtime.gpu import means_gpu

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


def resume_parser(prog: str) -> Parser:
    """Reads which run a program goes on with; `parse_config` reads the rest of the command line."""
    parser = Parser(prog=prog, add_help=False)
    parser.add_argument(OPTION, metavar="RUN", help="go on with the run in this folder; only limits may change")
    parser.add_argument(ACCEPT, action="store_true", help=f"let {OPTION} change other settings, or lose saved parts")
    return parser


def reopen(name: str, arguments: Sequence[str], *, accept: bool = False) -> tuple[RunFolder, Config]:
    """The run's folder, and its configuration with the changes that `arguments` give.

    Raises ConfigError if there is no such run, if it still runs on this host, or if more than limits would change
    without `accept`.
    """
    folder = RunFolder.open(name)
    require(
        not folder.config.run.single_process,
        f"{OPTION} {name}: a run of --single-process has one curve from its first step, and cannot go on: a checkpoint "
        "has neither its games nor its memory. Start it anew with higher limits: it passes through the same states",
    )
    folder.restore_config_file()
    saved = folder.config
    config = parse_config(arguments, prog="apex train", description="", kind=kind, means_gpu=means_gpu, base=saved)
    old, new = flatten(saved), flatten(config)
    differing = [setting for setting in old if old[setting] != new[setting] and setting not in CHANGEABLE]
    fixed = [setting for setting in differing if setting.startswith(FIXED)]
    changes = ", ".join(f"{setting} {old[setting]!r} -> {new[setting]!r}" for setting in fixed or differing)
    require(not fixed, f"{OPTION} {name} would change {changes}: what is saved would not fit. Start a new run")
    if differing and not accept:
        raise ConfigError(
            f"{OPTION} {name} would change {changes}; only limits may change: {', '.join(LIMITS)}. "
            f"Leave the rest out, say {ACCEPT}, or start a new run"
        )
    if describe(config.environment, config.actor.n_step) != folder.schema:
        raise ConfigError(f"{OPTION} {name}: {config.environment.id} is not what it was; install the versions of then")
    stores = [store_path(folder.run_id, shard) for shard in range(config.replay.num_shards)]
    require(not any(map(has_owner, stores)), f"{OPTION} {name}: this run is still going; stop it first")
    return folder, config
