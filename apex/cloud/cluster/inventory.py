"""Finds the clusters of a region by their tags, and the problems of each cluster."""

from datetime import datetime
from typing import NamedTuple

from apex.cloud.cluster.aws import OURS, Aws, Item, tags

UP = ("pending", "running")
GONE = ("shutting-down", "terminated")  # EC2 still lists such instances for an hour


class ClusterHost(NamedTuple):
    """An EC2 instance of a cluster."""

    id: str
    role: str
    state: str  # EC2's name of the state, such as "running"
    since: datetime  # launch time
    public: str  # public address; "" if none


class AutoScalingGroup(NamedTuple):
    """The auto-scaling group of one kind of hosts."""

    desired: int
    in_service: int  # healthy hosts
    status: str  # AWS's status, such as "Delete in progress"; "" normally
    trouble: str  # AWS's reason why there are fewer hosts than desired; "" if there is none


class Cluster(NamedTuple):
    """One cluster."""

    name: str
    hosts: list[ClusterHost]  # oldest first
    groups: dict[str, AutoScalingGroup]  # by role


def find_clusters(aws: Aws) -> dict[str, Cluster]:
    """Returns all clusters by name, in alphabetical order, including clusters that have only a network."""
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


def problems(cluster: Cluster) -> list[str]:
    """Returns the problems of a cluster, each as a sentence."""
    if not cluster.hosts and not any(group.desired for group in cluster.groups.values()):
        return ["nothing runs: the run has ended, or the cluster is incomplete. To remove it, run terraform destroy"]
    found = []
    for host in cluster.hosts:
        if host.state not in UP:  # The learner's host terminates itself after a complete upload.
            hint = ": its disk holds files that could not be uploaded. Start the host again to upload them"
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
        desired=item["DesiredCapacity"],
        in_service=in_service,
        status=item.get("Status") or "",
        trouble=_trouble(aws, item["AutoScalingGroupName"]) if in_service < item["DesiredCapacity"] else "",
    )


def _trouble(aws: Aws, group: str) -> str:
    """Returns why the group's newest activity failed, as for missing spot capacity or a quota; "" if it succeeded."""
    newest = {"MaxItems": 1, "PageSize": 1}
    arguments = {"AutoScalingGroupName": group, "PaginationConfig": newest}
    for activity in aws.pages("autoscaling", "describe_scaling_activities", "Activities", **arguments):
        if activity["StatusCode"] in ("Failed", "Cancelled"):
            return str(activity.get("StatusMessage") or activity.get("Description") or "")
    return ""
