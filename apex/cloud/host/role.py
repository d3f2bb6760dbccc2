"""Which command a role is on a machine of a cluster, by its settings and its TOML file."""

from __future__ import annotations

import logging
import os
from functools import partial
from pathlib import Path

from apex.cloud.host.settings import HostSettings
from apex.config import Config, load_toml
from apex.config.role_command import learner_command, role_command
from apex.errors import require
from apex.types import PROGRAMS, Role

log = logging.getLogger("apex")


def host_command(settings: HostSettings, role: str, num_cores: int) -> list[str]:
    """The words after `apex`. Raises ConfigError for what is no role, and for a TOML file that cannot be taken."""
    require(role in PROGRAMS, f"there is no role {role!r}: {', '.join(PROGRAMS)}")
    file = settings.etc / f"{role}.toml"
    if role == "learner":
        return _learner(settings, file)
    config = load_toml(file) if file.exists() else Config()
    joins = partial(role_command, Role(role), learner=settings.learner, keys=settings.keys)
    if role == Role.REPLAY:
        return list(joins(bind=settings.replay, snapshots=settings.run / "checkpoints" / "replay"))
    if role == Role.ACTOR:
        # The learner's choice fits the learner's machine, not this one.
        return list(joins(processes=config.actor.num_processes or num_cores, envs=config.actor.envs_per_process))
    return list(joins())


def is_new(settings: HostSettings) -> bool:
    """Whether this machine has no run yet, so that a learner begins one."""
    return not (settings.run / "manifest.json").exists()


def _learner(settings: HostSettings, file: Path) -> list[str]:
    """A new run, or the one that is there: a program that is started again goes on with it."""
    run = settings.run
    if not is_new(settings):
        return list(learner_command(run_folder=run))
    if run.exists():  # Its making was cut short, and a run is never made over a folder that is there.
        aside = run.with_name(f"{run.name}.unfinished-{os.getpid()}")
        os.replace(run, aside)
        log.error("%s has no manifest: it is now %s, and the run begins anew", run, aside)
    where = ["--run.name", settings.cluster, "--run.folder", str(settings.runs)]
    return [
        *learner_command(config=file),
        *where,
        *("--transport.bind", settings.learner),
        *("--transport.keys", str(settings.keys)),
    ]
