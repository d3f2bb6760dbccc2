"""The output of `apex cluster list`: clusters side by side, and what is wrong with each."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from apex.cloud.cluster.inventory import SINGLE, Cluster, problems

HEADINGS = ("name", *SINGLE, "actors", "up since")


def show(clusters: Mapping[str, Cluster], now: datetime, region: str) -> str:
    """A line for each cluster, then the address of its curves, then its problems."""
    if not clusters:
        return f"no cluster in {region}. For another region use --region"
    rows = [HEADINGS, *(_row(cluster, now) for cluster in clusters.values())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for name, cluster in clusters.items():
        lines += [f"{name}: curves at http://{host.public}:6006" for host in cluster.of("evaluator") if host.public]
        lines += [f"{name}: {sentence}" for sentence in problems(cluster)]
    return "\n".join(lines)


def as_json(clusters: Mapping[str, Cluster], region: str) -> dict[str, Any]:
    """The same for programs; times in ISO 8601."""
    return {"region": region, "clusters": [_object(cluster) for cluster in clusters.values()]}


def _row(cluster: Cluster, now: datetime) -> tuple[str, ...]:
    group, since = cluster.group, cluster.since
    hours = max(0.0, (now - since).total_seconds() / 3600) if since else 0.0  # Clocks differ.
    return (
        cluster.name,
        *("+".join(host.state for host in cluster.of(role)) or "-" for role in SINGLE),
        f"{group.in_service} of {group.desired}, at most {group.most}" if group else "-",
        f"{since.astimezone(UTC):%Y-%m-%d %H:%M} UTC ({hours:.1f} h)" if since else "-",
    )


def _object(cluster: Cluster) -> dict[str, Any]:
    return {
        "name": cluster.name,
        "up_since": cluster.since.isoformat() if cluster.since else None,
        "hosts": [{**host._asdict(), "since": host.since.isoformat()} for host in cluster.hosts],
        "actors": cluster.group._asdict() if cluster.group else None,
        "problems": problems(cluster),
    }
