"""The clusters of a region, found by their tags, and what is wrong with each."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import NamedTuple

from apex.cloud.cluster.aws import OURS, Aws, Item, tags
from apex.errors import ConfigError
from apex.types import Role

SINGLE = (Role.LEARNER, Role.REPLAY, Role.EVALUATOR)  # roles with one host each
UP = ("pending", "running")
GONE = ("shutting-down", "terminated")  # EC2 lists such instances for an hour


class ClusterHost(NamedTuple):
    """An instance."""

    id: str
    role: str
    type: str
    state: str  # EC2's name of it, or "impaired": it runs, and EC2's own checks fail
    since: datetime
    spot: bool
    private: str
    public: str


class AutoScalingGroup(NamedTuple):
    """The auto-scaling group of the actor hosts."""

    name: str
    desired: int
    least: int
    most: int
    in_service: int
    status: str  # "", or what AWS is doing to it: "Delete in progress"
    trouble: str  # why it has fewer hosts than desired, as AWS says


class Cluster(NamedTuple):
    """One cluster."""

    name: str
    hosts: list[ClusterHost]  # the oldest first
    group: AutoScalingGroup | None

    def of(self, role: str) -> list[ClusterHost]:
        """The hosts of a role."""
        return [host for host in self.hosts if host.role == role]

    @property
    def since(self) -> datetime | None:
        """When the oldest host was started."""
        return self.hosts[0].since if self.hosts else None


def find_clusters(aws: Aws) -> dict[str, Cluster]:
    """All clusters by name, in alphabetical order; also those of which only the network exists."""
    hosts: dict[str, list[ClusterHost]] = {}
    for cluster, host in sorted(_hosts(aws), key=lambda found: (found[1].since, found[1].id)):
        hosts.setdefault(cluster, []).append(host)
    pages = aws.pages("autoscaling", "describe_auto_scaling_groups", "AutoScalingGroups", Filters=OURS)
    groups = {tags(item).get("Cluster", ""): _group(aws, item) for item in pages}
    networks = {tags(item).get("Cluster", "") for item in aws.pages("ec2", "describe_vpcs", "Vpcs", Filters=OURS)}
    names = sorted({*hosts, *groups, *networks} - {""})
    return {name: Cluster(name, hosts.get(name, []), groups.get(name)) for name in names}


def require_cluster(aws: Aws, name: str) -> Cluster:
    """The cluster of that name; raises ConfigError, which lists the clusters, where there is none."""
    clusters = find_clusters(aws)
    if name in clusters:
        return clusters[name]
    known = f"the region has {', '.join(clusters)}" if clusters else "the region has none"
    raise ConfigError(f"no cluster {name!r} in {aws.region}; {known}. For another region use --region")


def problems(cluster: Cluster) -> list[str]:
    """What is wrong, one sentence each."""
    group = cluster.group
    if not cluster.hosts and (group is None or not group.desired):
        return ["nothing runs: the run has ended, or the cluster is incomplete. Remove it with terraform destroy"]
    found = []
    for role in SINGLE:
        if (count := len(cluster.of(role))) != 1:
            found.append(f"{count} {role} hosts instead of one" if count else f"no {role} host")
    found += [f"{host.role} {host.id} is {host.state}{_hint(host)}" for host in cluster.hosts if host.state not in UP]
    if group is None:
        found.append("no group of actor hosts")
    elif group.status:
        found.append(f"the group of actor hosts: {group.status}")
    elif not group.desired:
        found.append("the group of actor hosts has size 0: no experience arrives")
    elif group.in_service < group.desired:
        why = f": {group.trouble}" if group.trouble else ""
        found.append(f"{group.in_service} of {group.desired} actor hosts in service{why}")
    return found


def _hint(host: ClusterHost) -> str:
    """A learner's host that has finished terminates itself; it is stopped where the last upload has failed."""
    is_left = host.role == "learner" and host.state == "stopped"
    return ": its disk holds files that could not be uploaded. Start it again to upload them" if is_left else ""


def _hosts(aws: Aws) -> Iterator[tuple[str, ClusterHost]]:
    """Each instance with its cluster's name."""
    impaired = {
        item["InstanceId"]
        for item in aws.pages("ec2", "describe_instance_status", "InstanceStatuses")
        if "impaired" in (item["InstanceStatus"]["Status"], item["SystemStatus"]["Status"])
    }
    for reservation in aws.pages("ec2", "describe_instances", "Reservations", Filters=OURS):
        for item in reservation["Instances"]:
            if (state := item["State"]["Name"]) not in GONE:
                yield (
                    tags(item).get("Cluster", ""),
                    ClusterHost(
                        id=item["InstanceId"],
                        role=tags(item).get("Role", ""),
                        type=item["InstanceType"],
                        state="impaired" if item["InstanceId"] in impaired else state,
                        since=item["LaunchTime"],
                        spot=item.get("InstanceLifecycle") == "spot",
                        private=item.get("PrivateIpAddress") or "",
                        public=item.get("PublicIpAddress") or "",
                    ),
                )


def _group(aws: Aws, item: Item) -> AutoScalingGroup:
    in_service = sum(
        host["LifecycleState"] == "InService" and host["HealthStatus"] == "Healthy" for host in item["Instances"]
    )
    return AutoScalingGroup(
        name=item["AutoScalingGroupName"],
        desired=item["DesiredCapacity"],
        least=item["MinSize"],
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
