"""Which command a role is on a machine of a cluster, by its settings and its TOML file."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from apex.cloud.host.settings import ROLES, HostSettings
from apex.config import Config, load_toml
from apex.errors import require
from apex.runtime.atomic_files import COPY

log = logging.getLogger("apex")


def role_command(settings: HostSettings, role: str, num_cores: int) -> list[str]:
    """The words after `apex`. Raises ConfigError for what is no role, and for a TOML file that cannot be taken."""
    require(role in ROLES, f"there is no role {role!r}: {', '.join(ROLES)}")
    file = settings.etc / f"{role}.toml"
    if role == "learner":
        return _learner(settings, file)
    config = load_toml(file) if file.exists() else Config()
    join = ["--learner", settings.learner, "--keys", str(settings.keys)]
    if role == "replay":
        snapshots = settings.run / "checkpoints" / "replay"
        return [role, *join, "--bind", settings.replay, "--snapshots", str(snapshots)]
    if role == "actor":
        # What the learner would choose fits the learner's machine.
        return [role, *join, "--processes", str(config.actor.num_processes or num_cores), *_envs(config)]
    return [role, *join]


def is_new(settings: HostSettings) -> bool:
    """Whether this machine has no run yet, so that a learner begins one."""
    return not any((settings.run / name).exists() for name in ("manifest.json", f"manifest.json{COPY}"))


def _learner(settings: HostSettings, file: Path) -> list[str]:
    """A new run, or the one that is there: a program that is started again goes on with it."""
    run = settings.run
    if not is_new(settings):
        return ["learner", "--run-folder", str(run)]
    if run.exists():  # Its making was cut short, and a run is never made over a folder that is there.
        aside = run.with_name(f"{run.name}.unfinished-{os.getpid()}")
        os.replace(run, aside)
        log.error("%s has no manifest: it is now %s, and the run begins anew", run, aside)
    where = ["--run.name", settings.cluster, "--run.folder", str(settings.runs)]
    return [
        "learner",
        *("--config", str(file)),
        *where,
        *("--transport.bind", settings.learner),
        *("--transport.keys", str(settings.keys)),
    ]


def _envs(config: Config) -> list[str]:
    envs = config.actor.envs_per_process
    return ["--envs", str(envs)] if envs else []
