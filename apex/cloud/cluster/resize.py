"""How many actor hosts a cluster has: the desired size of their group, within the bounds that Terraform set."""

from __future__ import annotations

from apex.cloud.cluster.aws import Aws
from apex.cloud.cluster.inventory import Cluster
from apex.errors import ConfigError, require


def resize(aws: Aws, cluster: Cluster, num_hosts: int) -> str:
    """Sets the size and returns what to tell the user. Raises ConfigError for a size that the group may not have."""
    group = cluster.group
    if group is None:
        raise ConfigError(f"{cluster.name} has no group of actor hosts: terraform apply or destroy has not finished")
    require(not group.status, f"the group {group.name} cannot be resized: {group.status}")
    require(num_hosts >= group.least, f"--actors must be >= {group.least}, got {num_hosts}")
    require(
        num_hosts <= group.most,
        f"--actors must be <= {group.most} in {cluster.name}, got {num_hosts}: "
        f"set actor_hosts = {num_hosts} in terraform.tfvars, run terraform apply, then repeat this command",
    )
    name, size = group.name, num_hosts
    aws.call(
        "autoscaling", "set_desired_capacity", AutoScalingGroupName=name, DesiredCapacity=size, HonorCooldown=False
    )
    return f"{cluster.name}: desired actor hosts {num_hosts}, {group.desired} before; {group.in_service} in service"
