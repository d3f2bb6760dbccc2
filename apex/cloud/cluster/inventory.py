"""The clusters of a region, found by their tags, and what is wrong with each."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from apex.cloud.cluster.aws import OURS, Aws, Item, tags
from apex.errors import ConfigError

UP = ("pending", "running")
GONE = ("shutting-down", "terminated")  # EC2 lists such instances for an hour


class ClusterHost(NamedTuple):
    """An instance."""

    id: str
    role: str
    state: str  # EC2's name of it
    since: datetime
    public: str  # address


class AutoScalingGroup(NamedTuple):
    """The auto-scaling group of one kind of hosts."""

    name: str
    desired: int
    most: int
    in_service: int
    status: str  # "", or what AWS is doing to it: "Delete in progress"
    trouble: str  # why it has fewer hosts than desired, as AWS says


class Cluster(NamedTuple):
    """One cluster."""

    name: str
    hosts: list[ClusterHost]  # the oldest first
    groups: dict[str, AutoScalingGroup]  # by role


def find_clusters(aws: Aws) -> dict[str, Cluster]:
    """All clusters by name, in alphabetical order; also those of which only the network exists."""
    instances = [
        (tags(item), item)
        for reservation in aws.pages("ec2", "describe_instances", "Reservations", Filters=OURS)
        for item in reservation["Instances"]
        if item["State"]["Name"] not in GONE
    ]
    pages = aws.pages("autoscaling", "describe_auto_scaling_groups", "AutoScalingGroups", Filters=OURS)
    groups = [(tags(item), item) for item in pages]
    networks = [tags(item) for item in aws.pages("ec2", "describe_vpcs", "Vpcs", Filters=OURS)]
    names = sorted({tag["Cluster"] for tag in (*networks, *(tag for tag, _ in (*instances, *groups)))})
    clusters = {name: Cluster(name, [], {}) for name in names}
    for tag, item in sorted(instances, key=lambda found: found[1]["LaunchTime"]):
        role, public = tag.get("Role", ""), item.get("PublicIpAddress", "")
        host = ClusterHost(item["InstanceId"], role, item["State"]["Name"], item["LaunchTime"], public)
        clusters[tag["Cluster"]].hosts.append(host)
    for tag, item in groups:
        clusters[tag["Cluster"]].groups[tag.get("Role", "")] = _group(aws, item)
    return clusters


def require_cluster(aws: Aws, name: str) -> Cluster:
    """The cluster of that name; raises ConfigError, which lists the clusters, where there is none."""
    clusters = find_clusters(aws)
    if name in clusters:
        return clusters[name]
    known = f"the region has {', '.join(clusters)}" if clusters else "the region has none"
    raise ConfigError(f"no cluster {name!r} in {aws.region}; {known}. For another region use --region")


def problems(cluster: Cluster) -> list[str]:
    """What is wrong, one sentence each."""
    if not cluster.hosts and not any(group.desired for group in cluster.groups.values()):
        return ["nothing runs: the run has ended, or the cluster is incomplete. Remove it with terraform destroy"]
    found = []
    for host in cluster.hosts:
        if host.state not in UP:  # A learner's host that is done terminates itself, unless an upload has failed.
            hint = ": its disk holds files that could not be uploaded. Start it again to upload them"
            is_left = host.role == "learner" and host.state == "stopped"
            found.append(f"{host.role} {host.id} is {host.state}{hint if is_left else ''}")
    for role, group in sorted(cluster.groups.items()):
        if group.status:
            found.append(f"the group of {role} hosts: {group.status}")
        elif not group.desired:
            found.append(f"the group of {role} hosts has size 0")
        elif group.in_service < group.desired:
            why = f": {group.trouble}" if group.trouble else ""
            found.append(f"{group.in_service} of {group.desired} {role} hosts in service{why}")
    return found


def _group(aws: Aws, item: Item) -> AutoScalingGroup:
    hosts = [(host["LifecycleState"], host["HealthStatus"]) for host in item["Instances"]]
    in_service = hosts.count(("InService", "Healthy"))
    return AutoScalingGroup(
        name=item["AutoScalingGroupName"],
        desired=item["DesiredCapacity"],
        most=item["MaxSize"],
        in_service=in_service,
        status=item.get("Status") or "",
        trouble=_trouble(aws, item["AutoScalingGroupName"]) if in_service < item["DesiredCapacity"] else "",
    )


def _trouble(aws: Aws, group: str) -> str:
    """Why the group's newest activity failed, such as no spot capacity, or a quota."""
    answer = aws.call("autoscaling", "describe_scaling_activities", AutoScalingGroupName=group, MaxRecords=1)
    for activity in answer["Activities"]:
        if activity["StatusCode"] in ("Failed", "Cancelled"):
            return str(activity.get("StatusMessage") or activity.get("Description") or "")
    return ""
