"""The output of `apex cluster list`: a table of clusters and the problems of each."""

from collections.abc import Mapping
from datetime import UTC, datetime

from apex.cloud.cluster.inventory import Cluster, problems
from apex.types import PROGRAMS


def show(clusters: Mapping[str, Cluster], now: datetime, region: str) -> str:
    """Returns a table with the hosts in service / desired of each cluster, then addresses of curves, then problems."""
    if not clusters:
        return f"no cluster in {region}. For another region use --region"
    rows: list[tuple[str, ...]] = [("name", *PROGRAMS, "up since")]
    for name, cluster in clusters.items():
        sizes = {role: f"{group.in_service}/{group.desired}" for role, group in cluster.groups.items()}
        since = cluster.hosts[0].since if cluster.hosts else now
        hours = max(0.0, (now - since).total_seconds() / 3600)  # AWS's clock may be ahead.
        age = f"{since.astimezone(UTC):%Y-%m-%d %H:%M} UTC ({hours:.1f} h)"
        rows.append((name, *(sizes.get(role, "-") for role in PROGRAMS), age if cluster.hosts else "-"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for name, cluster in clusters.items():
        learners = [host for host in cluster.hosts if host.role == "learner" and host.public]
        lines += [f"{name}: curves at http://{host.public}:6006" for host in learners]
        lines += [f"{name}: {sentence}" for sentence in problems(cluster)]
    return "\n".join(lines)
