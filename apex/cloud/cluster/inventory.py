"""Which clusters there are in a region, by tag, and what is wrong with them."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable
from datetime import datetime
from typing import NamedTuple

from apex.cloud.cluster.aws import Aws, Item, only, plural, tags
from apex.cloud.cluster.prices import HOURS, Prices
from apex.errors import ConfigError
from apex.types import Role

SINGLE = (Role.LEARNER, Role.REPLAY, Role.EVALUATOR)  # roles with one host each
UP = ("pending", "running")
GONE = ("shutting-down", "terminated")  # EC2 goes on showing them for an hour

_BUCKET = re.compile(r"APEX_BUCKET=([a-z0-9.-]+)")


class ClusterHost(NamedTuple):
    """An instance that is there."""

    id: str
    role: str
    type: str
    state: str  # EC2's word, or "impaired": it runs, and EC2's own checks fail
    since: datetime
    spot: bool
    private: str
    public: str


class Disk(NamedTuple):
    """A volume of a host."""

    gigabytes: int
    since: datetime


class AutoScalingGroup(NamedTuple):
    """The auto-scaling group of the actor hosts."""

    name: str
    desired: int
    least: int
    most: int
    in_service: int
    status: str  # "", or what AWS is doing to it: "Delete in progress"
    trouble: str  # why it has fewer than it wants, as AWS says


class Cluster(NamedTuple):
    """All that a cluster's owner asks about."""

    name: str
    hosts: list[ClusterHost]
    disks: list[Disk]
    group: AutoScalingGroup | None

    def of(self, role: str) -> list[ClusterHost]:
        """The hosts of a role."""
        return [host for host in self.hosts if host.role == role]

    @property
    def since(self) -> datetime | None:
        """When the oldest host that is there was started."""
        return min((host.since for host in self.hosts), default=None)


class Cost(NamedTuple):
    """US dollars, about."""

    hour: float
    so_far: float  # of what is there now: hosts that were replaced are not in it
    unpriced: list[str]  # instance types that the table lacks


def find_clusters(aws: Aws) -> dict[str, Cluster]:
    """By name, in its order; also those of which only the network is there."""
    hosts, disks, groups = _hosts(aws), _disks(aws), _groups(aws)
    networks = {tags(item).get("Cluster", "") for item in aws.pages("ec2", "describe_vpcs", "Vpcs", Filters=only(None))}
    names = sorted({*hosts, *groups, *networks} - {""})
    return {name: Cluster(name, hosts.get(name, []), disks.get(name, []), groups.get(name)) for name in names}


def require_cluster(aws: Aws, name: str) -> Cluster:
    """Raises ConfigError, with what there is, for a name that nothing bears."""
    clusters = find_clusters(aws)
    if name in clusters:
        return clusters[name]
    there = f"there are {', '.join(clusters)}" if clusters else "there is none"
    raise ConfigError(f"there is no cluster {name!r} in {aws.region}; {there}. Another region: --region")


def find_bucket(aws: Aws, cluster: Cluster) -> str:
    """Where its learner puts checkpoints, as that host was told at its first boot; "" where none can say."""
    for host in cluster.of("learner"):
        answer = aws.call("ec2", "describe_instance_attribute", InstanceId=host.id, Attribute="userData")
        text = base64.b64decode(answer.get("UserData", {}).get("Value") or "").decode(errors="replace")
        if found := _BUCKET.search(text):
            return found[1]
    return ""


def problems(cluster: Cluster) -> list[str]:
    """What its owner should know of, a sentence each."""
    group = cluster.group
    if not cluster.hosts and (group is None or not group.desired):
        return [f"nothing runs: it is over, or half made. terraform destroy, or apex cluster kill {cluster.name}"]
    found = []
    for role in SINGLE:
        hosts = cluster.of(role)
        if len(hosts) != 1:
            found.append(f"{plural(len(hosts), f'{role} host')}, and there should be one" if hosts else f"no {role}")
    found += [f"{host.role} {host.id} is {host.state}{_hint(host)}" for host in cluster.hosts if host.state not in UP]
    if group is None:
        found.append("no group of actors")
    elif group.status:
        found.append(f"the group of actors: {group.status}")
    elif not group.desired:
        found.append("the group of actors is at 0: nobody explores")
    elif group.in_service < group.desired:
        why = f": {group.trouble}" if group.trouble else ""
        found.append(f"{group.in_service} of {plural(group.desired, 'actor host')} in service{why}")
    return found


def _hint(host: ClusterHost) -> str:
    """A learner's host that is done terminates itself; it is stopped where the last upload has failed."""
    is_left = host.role == "learner" and host.state == "stopped"
    return ": its disk has what could not be uploaded. Start it again, and it uploads" if is_left else ""


def cost(cluster: Cluster, prices: Prices, now: datetime) -> Cost:
    """By what runs; disks count whether their host runs or not."""
    hour, so_far, unpriced = 0.0, 0.0, set()
    for host in cluster.hosts:
        if host.state == "stopped":
            continue
        price = prices.host(host.type, spot=host.spot, public=bool(host.public))
        if price is None:
            unpriced.add(host.type)
        else:
            hour += price
            so_far += price * hours(host.since, now)
    for disk in cluster.disks:
        price = disk.gigabytes * prices.disk_gb_month / HOURS
        hour += price
        so_far += price * hours(disk.since, now)
    return Cost(hour, so_far, sorted(unpriced))


def hours(since: datetime, now: datetime) -> float:
    """Never less than 0: clocks differ."""
    return max(0.0, (now - since).total_seconds() / 3600)


def _hosts(aws: Aws) -> dict[str, list[ClusterHost]]:
    items = [
        item
        for reservation in aws.pages("ec2", "describe_instances", "Reservations", Filters=only(None))
        for item in reservation["Instances"]
        if item["State"]["Name"] not in GONE
    ]
    impaired = _impaired(aws) if items else set()
    found: dict[str, list[ClusterHost]] = {}
    for item in sorted(items, key=lambda item: (item["LaunchTime"], item["InstanceId"])):
        tag = tags(item)
        host = ClusterHost(
            id=item["InstanceId"],
            role=tag.get("Role", ""),
            type=item["InstanceType"],
            state="impaired" if item["InstanceId"] in impaired else item["State"]["Name"],
            since=item["LaunchTime"],
            spot=item.get("InstanceLifecycle") == "spot",
            private=item.get("PrivateIpAddress") or "",
            public=item.get("PublicIpAddress") or "",
        )
        found.setdefault(tag.get("Cluster", ""), []).append(host)
    return found


def _impaired(aws: Aws) -> set[str]:
    return {
        item["InstanceId"]
        for item in aws.pages("ec2", "describe_instance_status", "InstanceStatuses")
        if "impaired" in (item["InstanceStatus"]["Status"], item["SystemStatus"]["Status"])
    }


def _disks(aws: Aws) -> dict[str, list[Disk]]:
    found: dict[str, list[Disk]] = {}
    for item in aws.pages("ec2", "describe_volumes", "Volumes", Filters=only(None)):
        found.setdefault(tags(item).get("Cluster", ""), []).append(Disk(item["Size"], item["CreateTime"]))
    return found


def _groups(aws: Aws) -> dict[str, AutoScalingGroup]:
    pages = aws.pages("autoscaling", "describe_auto_scaling_groups", "AutoScalingGroups", Filters=only(None))
    return {tags(item).get("Cluster", ""): _group(aws, item) for item in pages}


def _group(aws: Aws, item: Item) -> AutoScalingGroup:
    in_service = _in_service(item["Instances"])
    trouble = ""
    if in_service < item["DesiredCapacity"]:
        trouble = _trouble(aws, item["AutoScalingGroupName"])
    return AutoScalingGroup(
        name=item["AutoScalingGroupName"],
        desired=item["DesiredCapacity"],
        least=item["MinSize"],
        most=item["MaxSize"],
        in_service=in_service,
        status=item.get("Status") or "",
        trouble=trouble,
    )


def _in_service(instances: Iterable[Item]) -> int:
    return sum(item["LifecycleState"] == "InService" and item["HealthStatus"] == "Healthy" for item in instances)


def _trouble(aws: Aws, group: str) -> str:
    """What its newest activity failed of, such as no spot capacity, or a quota."""
    answer = aws.call("autoscaling", "describe_scaling_activities", AutoScalingGroupName=group, MaxRecords=1)
    for activity in answer["Activities"]:
        if activity["StatusCode"] in ("Failed", "Cancelled"):
            return str(activity.get("StatusMessage") or activity.get("Description") or "")
    return ""
