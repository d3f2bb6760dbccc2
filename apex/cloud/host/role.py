"""The command of a role on a cluster's host, by its settings, its TOML file and the learner's address."""

from __future__ import annotations

import logging
import os
from functools import partial
from pathlib import Path

from apex.cloud.host.key_exchange import learner_address
from apex.cloud.host.settings import HostSettings
from apex.config import Config, load_toml
from apex.config.role_command import learner_command, role_command
from apex.errors import require
from apex.types import Role

ANY = "0.0.0.0"  # security groups and keys decide who gets in; the address changes with the host

log = logging.getLogger("apex")


def host_command(settings: HostSettings, role: Role, num_cores: int) -> list[str]:
    """The words after `apex`. Raises ConfigError for a role of another host, and for a TOML file that is refused."""
    require(role in settings.roles, f"this host has the roles {', '.join(settings.roles)}, not {role!r}")
    file = settings.etc / f"{role}.toml"
    if role == Role.LEARNER:
        return _learner(settings, file)
    joins = partial(role_command, role, learner=learner_address(settings), keys=settings.keys)
    if role == Role.REPLAY:
        shared = Role.LEARNER in settings.roles  # Terraform sizes only a replay host's own disk for snapshots.
        return list(joins(bind=ANY, snapshots=None if shared else settings.run / "checkpoints" / "replay"))
    if role == Role.ACTOR:
        # The learner's choice fits the learner's machine, not this one.
        config = load_toml(file) if file.exists() else Config()
        return list(
            joins(processes=config.actor.num_processes or num_cores, envs=config.actor.envs_per_process or None)
        )
    return list(joins())


def is_new(settings: HostSettings) -> bool:
    """Whether this host has no run yet: then its learner restores or begins one."""
    return not (settings.run / "manifest.json").exists()


def _learner(settings: HostSettings, file: Path) -> list[str]:
    """Continues the run of this host; begins one where there is none."""
    run = settings.run
    if not is_new(settings):
        return list(learner_command(run_folder=run))
    if run.exists():  # Its creation was interrupted; a run is never created over an existing folder.
        aside = run.with_name(f"{run.name}.unfinished-{os.getpid()}")
        os.replace(run, aside)
        log.error("%s has no manifest: moved it to %s; the run begins anew", run, aside)
    return [
        *learner_command(config=file),
        *("--run.name", settings.cluster, "--run.folder", str(settings.runs)),
        *("--transport.bind", ANY, "--transport.keys", str(settings.keys)),
    ]
