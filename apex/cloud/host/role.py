"""Builds the command that runs a role on a cluster's host, from settings, a TOML file and the learner's address."""

import logging
import os
from functools import partial
from pathlib import Path

from apex.cloud.host.key_exchange import learner_address
from apex.cloud.host.settings import HostSettings
from apex.config import Config, lay_over, load_toml
from apex.config.codec import read_toml
from apex.config.role_command import role_command
from apex.runtime.trust import allow_options
from apex.types import Role
from apexreplay.errors import require

ANY = "0.0.0.0"  # all addresses: the host's address may change; security groups and keys control access

log = logging.getLogger("apex")


def host_command(settings: HostSettings, role: Role, num_cores: int) -> list[str]:
    """Returns the arguments of `apex`. Raises UsageError if this host lacks `role` or the TOML file is invalid."""
    require(role in settings.roles, f"this host has the roles {', '.join(settings.roles)}, not {role!r}")
    file = settings.etc / f"{role}.toml"
    if role == Role.LEARNER:
        return _learner(settings, file)
    joins = partial(role_command, role, learner=learner_address(settings), keys=settings.keys)
    if role == Role.REPLAY:
        shared = Role.LEARNER in settings.roles  # Only a separate replay host has disk space for snapshots.
        return list(joins(bind=ANY, snapshots=None if shared else settings.run / "checkpoints" / "replay"))
    if role == Role.ACTOR:
        # The learner's number of processes is chosen for the learner's host, not for this one.
        config = load_toml(file) if file.exists() else Config()
        return list(
            joins(processes=config.actor.num_processes or num_cores, envs=config.actor.envs_per_process or None)
        )
    return list(joins())


def is_new(settings: HostSettings) -> bool:
    """Returns whether this host has no run yet. If so, a run must be restored from the bucket or started."""
    return not (settings.run / "manifest.json").exists()


def _learner(settings: HostSettings, file: Path) -> list[str]:
    """Returns the command that resumes this host's run or starts a new one."""
    run = settings.run
    if file.exists():  # The user's Terraform has written it.
        from apex.environments.foreign import require_trust  # Other commands do not need Gymnasium.

        require_trust(lay_over(Config(), read_toml(file)), given=True)
    if not is_new(settings):
        return [*role_command(Role.LEARNER, run_folder=run), *allow_options()]
    if run.exists():  # The creation of the run was interrupted. A new run needs a new folder.
        aside = run.with_name(f"{run.name}.unfinished-{os.getpid()}")
        os.replace(run, aside)
        log.error("%s has no manifest: moved this folder to %s; starting a new run", run, aside)
    return [
        *role_command(Role.LEARNER, config=file),
        *("--run.name", settings.cluster, "--run.folder", str(settings.runs)),
        *("--transport.bind", ANY, "--transport.keys", str(settings.keys)),
        *allow_options(),
    ]
