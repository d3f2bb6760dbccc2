"""What `apex cluster list` prints: clusters side by side, and what is wrong with each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from apex.cloud.cluster.inventory import SINGLE, Cluster, Cost, cost, hours, problems
from apex.cloud.cluster.prices import Prices

HEADINGS = ("name", *SINGLE, "actors", "up since", "USD an hour", "USD so far")


def show(clusters: Mapping[str, Cluster], prices: Prices, now: datetime, region: str) -> str:
    """A line for each cluster, then a line for each thing worth knowing."""
    if not clusters:
        return f"no cluster in {region}. Another region: --region"
    costs = {name: cost(cluster, prices, now) for name, cluster in clusters.items()}
    lines = columns([HEADINGS, *(_row(cluster, costs[cluster.name], now) for cluster in clusters.values())])
    for name, cluster in clusters.items():
        lines += [f"{name}: curves at http://{host.public}:6006" for host in cluster.of("evaluator") if host.public]
        lines += [f"{name}: {sentence}" for sentence in problems(cluster)]
        if costs[name].unpriced:
            lines.append(f"{name}: no price of {', '.join(costs[name].unpriced)}: it costs more than is shown")
    hour = sum(bill.hour for bill in costs.values())
    about = f"about {hour:.2f} USD an hour in {region}; so far: by the hosts that are there now"
    return "\n".join([*lines, "", about, f"({prices.source()})"])


def as_json(clusters: Mapping[str, Cluster], prices: Prices, now: datetime, region: str) -> dict[str, Any]:
    """The same for programs; times in ISO 8601, costs in US dollars."""
    return {
        "region": region,
        "prices": prices.source(),
        "clusters": [_object(cluster, cost(cluster, prices, now)) for cluster in clusters.values()],
    }


def columns(rows: Iterable[Iterable[str]]) -> list[str]:
    """Rows of text, aligned."""
    table = [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]


def _row(cluster: Cluster, bill: Cost, now: datetime) -> list[str]:
    group, since = cluster.group, cluster.since
    return [
        cluster.name,
        *("+".join(host.state for host in cluster.of(role)) or "-" for role in SINGLE),
        f"{group.in_service} of {group.desired}, at most {group.most}" if group else "-",
        f"{since.astimezone(UTC):%Y-%m-%d %H:%M} UTC ({hours(since, now):.1f} h)" if since else "-",
        f"{bill.hour:.2f}" + ("+" if bill.unpriced else ""),
        f"{bill.so_far:.2f}" + ("+" if bill.unpriced else ""),
    ]


def _object(cluster: Cluster, bill: Cost) -> dict[str, Any]:
    return {
        "name": cluster.name,
        "up_since": cluster.since.isoformat() if cluster.since else None,
        "hosts": [{**host._asdict(), "since": host.since.isoformat()} for host in cluster.hosts],
        "actors": cluster.group._asdict() if cluster.group else None,
        "usd_an_hour": round(bill.hour, 4),
        "usd_so_far": round(bill.so_far, 2),
        "unpriced": bill.unpriced,
        "problems": problems(cluster),
    }
