"""The settings of a cluster's host, read from /etc/apex/cluster.env, a file without secrets that first boot writes."""

import re
from dataclasses import dataclass
from pathlib import Path

from apex.types import PROGRAMS, Role
from apexreplay.errors import UsageError, require

ETC = Path("/etc/apex")
HOME = Path("/var/lib/apex")

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")  # used in paths, parameters and object names


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSettings:
    """The settings of one host of a cluster."""

    cluster: str  # name of the cluster and of its run
    roles: tuple[Role, ...]  # programs that run here; the first one names the host's group and sets its permissions
    region: str
    bucket: str  # bucket of checkpoints and curves
    begun: str  # time of the first terraform apply; distinguishes clusters with the same name
    stall_minutes: int  # minutes without a new update after which a learner's host is replaced; 0: never
    etc: Path = ETC
    home: Path = HOME

    def __post_init__(self) -> None:
        require(bool(_NAME.fullmatch(self.cluster)), f"APEX_CLUSTER may have a-z, 0-9 and - only, got {self.cluster!r}")

    @property
    def role(self) -> Role:
        """The role that names the host's auto-scaling group, its permissions and its log group."""
        return self.roles[0]

    @property
    def keys(self) -> Path:
        """The folder of this host's keys."""
        return self.home / "keys"

    @property
    def runs(self) -> Path:
        """The folder of run folders."""
        return self.home / "runs"

    @property
    def run(self) -> Path:
        """The folder of this cluster's run."""
        return self.runs / self.cluster

    @property
    def parameters(self) -> str:
        """The path of the cluster's parameters in the parameter store."""
        return f"/apex/{self.cluster}"

    def group(self, role: Role) -> str:
        """Returns the name of a role's auto-scaling group."""
        return f"apex-{self.cluster}-{role}"


def read_settings(etc: Path = ETC, home: Path = HOME) -> HostSettings:
    """Reads `cluster.env`. Raises UsageError if the file or a value is missing or invalid."""
    path = etc / "cluster.env"
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}, which the first boot writes: {error}") from error
    values = {name: value for name, equals, value in (line.partition("=") for line in lines) if equals}
    names = ("cluster", "roles", "region", "bucket", "begun", "stall_minutes")
    missing = [f"APEX_{name.upper()}" for name in names if not values.get(f"APEX_{name.upper()}")]
    require(not missing, f"{path} lacks {', '.join(missing)}")
    cluster, roles, region, bucket, begun, minutes = (values[f"APEX_{name.upper()}"] for name in names)
    known = set(roles.split(",")) <= set(PROGRAMS)
    require(known, f"APEX_ROLES must be a comma-separated list of {', '.join(PROGRAMS)}, got {roles!r}")
    require(minutes.isdecimal(), f"APEX_STALL_MINUTES must be a whole number, got {minutes!r}")
    own, stall = tuple(map(Role, roles.split(","))), int(minutes)
    return HostSettings(
        cluster=cluster, roles=own, region=region, bucket=bucket, begun=begun, stall_minutes=stall, etc=etc, home=home
    )
