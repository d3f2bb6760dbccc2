"""`apex train --resume RUN`: opens the run, and checks that its settings allow it to continue."""

from __future__ import annotations

from collections.abc import Sequence

from apex.command_line import parse_config
from apex.config import Config, flatten
from apex.config.arguments import Parser
from apex.environments.factory import describe
from apex.errors import UsageError, require
from apex.replay_memory.store.location import has_owner, store_path
from apex.runs.folder import RunFolder

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
    "transport.bind",
}
# If one of these settings changed, the saved files would no longer fit. Therefore no flag allows such a change.
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
    "network.",  # all settings of that branch
    "algorithm",
    "dpg.policy_units",
    "dpg.critic_units",
    "dpg.num_critics",
    "dpg.first_activation",
    "dpg.normalize_observations",
)


def resume_parser(prog: str) -> Parser:
    """Returns a parser for the run to resume; `parse_config` reads the rest of the command line."""
    parser = Parser(prog=prog, add_help=False)
    parser.add_argument(
        OPTION, metavar="RUN", help="continue the run in this folder; only limits, such as --run.max-steps, may change"
    )
    parser.add_argument(ACCEPT, action="store_true", help=f"allow {OPTION} to change other settings or lose saved data")
    return parser


def reopen(name: str, arguments: Sequence[str], *, accept: bool = False) -> tuple[RunFolder, Config]:
    """Returns the run's folder, and its configuration with the changes in `arguments`.

    Raises UsageError if there is no such run, if the run is still running on this host, or if settings other than
    limits would change without `accept`.
    """
    folder = RunFolder.open(name)
    require(
        not folder.config.run.single_process,
        f"{OPTION} {name}: a run with --single-process cannot be resumed, because its checkpoints contain neither the "
        "games nor the replay memory. Start a new run with higher limits: it repeats the same steps",
    )
    folder.restore_config_file()
    saved = folder.config
    config = parse_config(arguments, prog="apex train", base=saved)
    old, new = flatten(saved), flatten(config)
    differing = [setting for setting in old if old[setting] != new[setting] and setting not in CHANGEABLE]
    fixed = [setting for setting in differing if setting.startswith(FIXED)]
    changes = ", ".join(f"{setting} {old[setting]!r} -> {new[setting]!r}" for setting in fixed or differing)
    require(not fixed, f"{OPTION} {name} would change {changes}; the saved files would not fit. Start a new run")
    if differing and not accept:
        raise UsageError(
            f"{OPTION} {name} would change {changes}; only limits may change: {', '.join(LIMITS)}. "
            f"Remove the other options, add {ACCEPT}, or start a new run"
        )
    if describe(config.environment, config.actor.n_step) != folder.schema:
        cause = f"{config.environment.id} has changed since the run was saved"
        raise UsageError(f"{OPTION} {name}: {cause}; install the package versions that the run was started with")
    stores = [store_path(folder.run_id, shard) for shard in range(config.replay.num_shards)]
    require(not any(map(has_owner, stores)), f"{OPTION} {name}: this run is still running; stop it first")
    return folder, config
