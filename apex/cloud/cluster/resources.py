"""What a cluster consists of in AWS, kind by kind in the order in which it can be removed, found by tag or exact path.

Every finder tells what is still there, and every remover may be called again on what is already going.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from apex.cloud.cluster.aws import PROJECT, Aws, AwsError, Item, only, tags
from apex.types import PROGRAMS

NOT_THERE = {"NoSuchEntity", "NotFoundException", "ResourceNotFoundException"}


class ResourceKind(NamedTuple):
    """One kind of things of a cluster."""

    name: str  # of one of them
    find: Callable[[Aws, str], Iterator[str]]  # AWS, cluster -> what AWS calls each
    remove: Callable[[Aws, str], None]


def _ec2(
    operation: str, key: str, name: str, gone: tuple[str, ...] = (), filters: str = "Filters"
) -> Callable[[Aws, str], Iterator[str]]:
    """Finds what EC2 describes, by tag; `gone` are states that mean that it is there no more."""

    def find(aws: Aws, cluster: str) -> Iterator[str]:
        for item in aws.pages("ec2", operation, key, **{filters: only(cluster)}):
            if item.get("State") not in gone:
                yield item[name]

    return find


def _groups(aws: Aws, cluster: str) -> Iterator[str]:
    pages = aws.pages("autoscaling", "describe_auto_scaling_groups", "AutoScalingGroups", Filters=only(cluster))
    return (item["AutoScalingGroupName"] for item in pages)


def _remove_group(aws: Aws, name: str) -> None:
    aws.call("autoscaling", "update_auto_scaling_group", AutoScalingGroupName=name, MinSize=0, DesiredCapacity=0)
    aws.call("autoscaling", "delete_auto_scaling_group", AutoScalingGroupName=name, ForceDelete=True)


def _instances(aws: Aws, cluster: str) -> Iterator[str]:
    for reservation in aws.pages("ec2", "describe_instances", "Reservations", Filters=only(cluster)):
        for item in reservation["Instances"]:
            if item["State"]["Name"] != "terminated":
                yield item["InstanceId"]


def _addresses(aws: Aws, cluster: str) -> Iterator[str]:
    return (item["AllocationId"] for item in aws.call("ec2", "describe_addresses", Filters=only(cluster))["Addresses"])


def _remove_address(aws: Aws, name: str) -> None:
    for item in aws.call("ec2", "describe_addresses", AllocationIds=[name])["Addresses"]:
        if item.get("AssociationId"):
            aws.call("ec2", "disassociate_address", AssociationId=item["AssociationId"])
    aws.call("ec2", "release_address", AllocationId=name)


def _remove_endpoint(aws: Aws, name: str) -> None:
    _check(aws.call("ec2", "delete_vpc_endpoints", VpcEndpointIds=[name]))


def _remove_flow_log(aws: Aws, name: str) -> None:
    _check(aws.call("ec2", "delete_flow_logs", FlowLogIds=[name]))


def _check(answer: Item) -> None:
    """These calls report success, and tell in it what did not succeed."""
    for failure in answer.get("Unsuccessful", []):
        error = failure.get("Error", {})
        raise AwsError(f"{error.get('Message', '')} ({error.get('Code', '')})", str(error.get("Code", "")))


def _security_groups(aws: Aws, cluster: str) -> Iterator[str]:
    for item in aws.pages("ec2", "describe_security_groups", "SecurityGroups", Filters=only(cluster)):
        if item["GroupName"] != "default":  # goes with its network, and not before
            yield item["GroupId"]


def _remove_security_group(aws: Aws, name: str) -> None:
    """Its rules first: groups that name one another cannot be removed."""
    this = [{"Name": "group-id", "Values": [name]}]
    rules = list(aws.pages("ec2", "describe_security_group_rules", "SecurityGroupRules", Filters=this))
    for operation, out in (("revoke_security_group_ingress", False), ("revoke_security_group_egress", True)):
        if ids := [rule["SecurityGroupRuleId"] for rule in rules if rule["IsEgress"] is out]:
            aws.call("ec2", operation, GroupId=name, SecurityGroupRuleIds=ids)
    aws.call("ec2", "delete_security_group", GroupId=name)


def _remove_gateway(aws: Aws, name: str) -> None:
    for item in aws.call("ec2", "describe_internet_gateways", InternetGatewayIds=[name])["InternetGateways"]:
        for attachment in item["Attachments"]:
            aws.call("ec2", "detach_internet_gateway", InternetGatewayId=name, VpcId=attachment["VpcId"])
    aws.call("ec2", "delete_internet_gateway", InternetGatewayId=name)


def _remove_route_table(aws: Aws, name: str) -> None:
    for item in aws.call("ec2", "describe_route_tables", RouteTableIds=[name])["RouteTables"]:
        for association in item["Associations"]:
            if not association.get("Main"):
                aws.call("ec2", "disassociate_route_table", AssociationId=association["RouteTableAssociationId"])
    aws.call("ec2", "delete_route_table", RouteTableId=name)


def _parameters(aws: Aws, cluster: str) -> Iterator[str]:
    pages = aws.pages("ssm", "get_parameters_by_path", "Parameters", Path=f"/apex/{cluster}", Recursive=True)
    return (item["Name"] for item in pages)


def _log_groups(aws: Aws, cluster: str) -> Iterator[str]:
    pages = aws.pages("logs", "describe_log_groups", "logGroups", logGroupNamePrefix=f"/apex/{cluster}/")
    return (item["logGroupName"] for item in pages)


def _alarms(aws: Aws, cluster: str) -> Iterator[str]:
    for item in aws.pages("cloudwatch", "describe_alarms", "MetricAlarms", AlarmNamePrefix=f"apex-{cluster}-"):
        answer = aws.call("cloudwatch", "list_tags_for_resource", ResourceARN=item["AlarmArn"])
        if _is_of(answer, cluster):  # The prefix of pong is that of pong-1, too.
            yield item["AlarmName"]


def _budgets(aws: Aws, cluster: str) -> Iterator[str]:
    name = f"apex-{cluster}"
    try:
        if _there(aws, "budgets", "describe_budget", AccountId=_account(aws), BudgetName=name):
            yield name
    except AwsError as error:
        if not error.denied:  # Who may not look at budgets has not made one.
            raise


def _remove_budget(aws: Aws, name: str) -> None:
    aws.call("budgets", "delete_budget", AccountId=_account(aws), BudgetName=name)


def _account(aws: Aws) -> str:
    return str(aws.call("sts", "get_caller_identity")["Account"])


def _profiles(aws: Aws, cluster: str) -> Iterator[str]:
    for name in (f"apex-{cluster}-{role}" for role in PROGRAMS):
        answer = _there(aws, "iam", "get_instance_profile", InstanceProfileName=name)
        if answer and _is_of(answer["InstanceProfile"], cluster):
            yield name


def _remove_profile(aws: Aws, name: str) -> None:
    profile = aws.call("iam", "get_instance_profile", InstanceProfileName=name)["InstanceProfile"]
    for role in profile["Roles"]:
        aws.call("iam", "remove_role_from_instance_profile", InstanceProfileName=name, RoleName=role["RoleName"])
    aws.call("iam", "delete_instance_profile", InstanceProfileName=name)


def _roles(aws: Aws, cluster: str) -> Iterator[str]:
    for name in (f"apex-{cluster}-{role}" for role in (*PROGRAMS, "flow-logs")):
        answer = _there(aws, "iam", "get_role", RoleName=name)
        if answer and _is_of(answer["Role"], cluster):
            yield name


def _remove_role(aws: Aws, name: str) -> None:
    for policy in aws.call("iam", "list_role_policies", RoleName=name)["PolicyNames"]:
        aws.call("iam", "delete_role_policy", RoleName=name, PolicyName=policy)
    for attached in aws.call("iam", "list_attached_role_policies", RoleName=name)["AttachedPolicies"]:
        aws.call("iam", "detach_role_policy", RoleName=name, PolicyArn=attached["PolicyArn"])
    aws.call("iam", "delete_role", RoleName=name)


def _there(aws: Aws, service: str, operation: str, **arguments: str) -> Item | None:
    try:
        return aws.call(service, operation, **arguments)
    except AwsError as error:
        if error.code in NOT_THERE:
            return None
        raise


def _is_of(item: Item, cluster: str) -> bool:
    tag = tags(item)
    return (tag.get("Project"), tag.get("Cluster")) == (PROJECT, cluster)


def _one(service: str, operation: str, argument: str, many: bool = False) -> Callable[[Aws, str], None]:
    """Removes by one call."""

    def remove(aws: Aws, name: str) -> None:
        aws.call(service, operation, **{argument: [name] if many else name})

    return remove


# Hosts first, and nothing else before they have ended: until then they need their roles, logs and network.
HOSTS = (
    ResourceKind("auto-scaling group", _groups, _remove_group),
    ResourceKind("instance", _instances, _one("ec2", "terminate_instances", "InstanceIds", many=True)),
)
REST = (
    ResourceKind(
        "launch template",
        _ec2("describe_launch_templates", "LaunchTemplates", "LaunchTemplateId"),
        _one("ec2", "delete_launch_template", "LaunchTemplateId"),
    ),
    ResourceKind(
        "volume",
        _ec2("describe_volumes", "Volumes", "VolumeId", gone=("deleting", "deleted")),
        _one("ec2", "delete_volume", "VolumeId"),
    ),
    ResourceKind("address", _addresses, _remove_address),
    ResourceKind(
        "flow log",
        _ec2("describe_flow_logs", "FlowLogs", "FlowLogId", filters="Filter"),
        _remove_flow_log,
    ),
    ResourceKind(
        "endpoint",
        _ec2("describe_vpc_endpoints", "VpcEndpoints", "VpcEndpointId", gone=("deleted", "Deleted")),
        _remove_endpoint,
    ),
    ResourceKind(
        "NAT gateway",
        _ec2("describe_nat_gateways", "NatGateways", "NatGatewayId", gone=("deleted",), filters="Filter"),
        _one("ec2", "delete_nat_gateway", "NatGatewayId"),
    ),
    ResourceKind(
        "network interface",
        _ec2("describe_network_interfaces", "NetworkInterfaces", "NetworkInterfaceId"),
        _one("ec2", "delete_network_interface", "NetworkInterfaceId"),
    ),
    ResourceKind("security group", _security_groups, _remove_security_group),
    ResourceKind("subnet", _ec2("describe_subnets", "Subnets", "SubnetId"), _one("ec2", "delete_subnet", "SubnetId")),
    ResourceKind(
        "internet gateway",
        _ec2("describe_internet_gateways", "InternetGateways", "InternetGatewayId"),
        _remove_gateway,
    ),
    ResourceKind("route table", _ec2("describe_route_tables", "RouteTables", "RouteTableId"), _remove_route_table),
    ResourceKind("network", _ec2("describe_vpcs", "Vpcs", "VpcId"), _one("ec2", "delete_vpc", "VpcId")),
    ResourceKind("parameter", _parameters, _one("ssm", "delete_parameter", "Name")),
    ResourceKind("log group", _log_groups, _one("logs", "delete_log_group", "logGroupName")),
    ResourceKind("alarm", _alarms, _one("cloudwatch", "delete_alarms", "AlarmNames", many=True)),
    ResourceKind("budget", _budgets, _remove_budget),
    ResourceKind("instance profile", _profiles, _remove_profile),
    ResourceKind("role", _roles, _remove_role),
)
