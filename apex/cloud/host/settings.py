"""What a machine of a cluster knows of itself: `/etc/apex/cluster.env`, as its first boot wrote it. No secret in it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from apex.errors import ConfigError, require
from apex.types import PROGRAMS

ETC = Path("/etc/apex")
HOME = Path("/var/lib/apex")

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")  # it stands in paths, parameters and object names


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSettings:
    """One machine's place in its cluster."""

    cluster: str  # the run's name, too
    role: str
    region: str
    bucket: str  # where checkpoints and curves go
    learner: str  # private address
    replay: str  # private address
    actor_group: str  # auto-scaling group of the actor machines
    etc: Path = ETC
    home: Path = HOME

    def __post_init__(self) -> None:
        require(bool(_NAME.fullmatch(self.cluster)), f"APEX_CLUSTER must be a-z, 0-9 and -, got {self.cluster!r}")
        require(self.role in PROGRAMS, f"APEX_ROLE must be one of {', '.join(PROGRAMS)}, got {self.role!r}")

    @property
    def keys(self) -> Path:
        """The folder of this machine's keys."""
        return self.home / "keys"

    @property
    def runs(self) -> Path:
        """Where run folders are."""
        return self.home / "runs"

    @property
    def run(self) -> Path:
        """The folder of this cluster's run."""
        return self.runs / self.cluster

    @property
    def parameters(self) -> str:
        """Where the cluster's parameters are in the parameter store."""
        return f"/apex/{self.cluster}"


def read_settings(etc: Path = ETC, home: Path = HOME) -> HostSettings:
    """Reads `cluster.env`; raises ConfigError for what is missing there."""
    path = etc / "cluster.env"
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}, which the first boot of a machine writes: {error}") from error
    values: dict[str, str] = {}
    for line in lines:
        name, equals, value = line.strip().partition("=")
        if equals and not name.startswith("#"):
            values[name.strip()] = value.strip().strip("\"'")
    names = ("cluster", "role", "region", "bucket", "learner", "replay", "actor_group")
    missing = [f"APEX_{name.upper()}" for name in names if not values.get(f"APEX_{name.upper()}")]
    require(not missing, f"{path} does not say {', '.join(missing)}")
    return HostSettings(**{name: values[f"APEX_{name.upper()}"] for name in names}, etc=etc, home=home)
