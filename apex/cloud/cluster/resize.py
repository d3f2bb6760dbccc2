"""How many actor hosts a cluster has: the desired size of their group, within the bounds that Terraform set."""

from __future__ import annotations

from apex.cloud.cluster.aws import Aws, plural
from apex.cloud.cluster.inventory import Cluster
from apex.errors import ConfigError, require


def resize(aws: Aws, cluster: Cluster, num_hosts: int) -> str:
    """Sets it, and says what it was; as often as you like. Raises ConfigError for what the group may not have."""
    group = cluster.group
    if group is None:
        raise ConfigError(f"{cluster.name} has no group of actors: it is half made, or half removed")
    require(not group.status, f"the group {group.name} cannot be set: {group.status}")
    require(num_hosts >= group.least, f"--actors must be at least {group.least}, got {num_hosts}")
    require(
        num_hosts <= group.most,
        f"{cluster.name} may have {plural(group.most, 'actor host')} at most, got {num_hosts}: "
        f"set actor_hosts = {num_hosts} in terraform.tfvars and run terraform apply, then this again",
    )
    if num_hosts == group.desired:
        return f"{cluster.name}: {plural(num_hosts, 'actor host')} wanted, as before; {group.in_service} in service"
    aws.call(
        "autoscaling",
        "set_desired_capacity",
        AutoScalingGroupName=group.name,
        DesiredCapacity=num_hosts,
        HonorCooldown=False,
    )
    return f"{cluster.name}: {plural(num_hosts, 'actor host')} wanted, {group.desired} before"
