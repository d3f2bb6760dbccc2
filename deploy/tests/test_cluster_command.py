"""`apex cluster` on an emulated AWS with two clusters, tagged like Terraform's.

The name of one is a prefix of the other's: pong, pong-1. Changes to one must not affect the other.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import boto3
import pytest
from emulator import REGION

from apex.cloud.cluster.aws import Aws
from apex.cloud.cluster.command import main

Apex = Callable[..., tuple[int, list[str], str]]
ROLES = ("learner", "evaluator", "actor")  # the replay server shares the learner's host

client = cache(partial(boto3.client, region_name=REGION))  # by service


@pytest.fixture
def apex(aws: Callable[[str], Any], capsys: pytest.CaptureFixture[str]) -> Apex:
    """Returns `apex cluster` with two clusters; a call returns its status, its lines and its errors."""
    launch("pong-1")
    launch("pong")

    def apex(*arguments: str) -> tuple[int, list[str], str]:
        status = main([*arguments], open_aws=lambda region: Aws(REGION, aws))
        out, err = capsys.readouterr()
        return status, out.splitlines(), err

    return apex


def tagged(cluster: str, role: str, *kinds: str) -> list[dict[str, Any]]:
    values = {"Project": "apex-zeromq", "Cluster": cluster, "Role": role}
    tags = [{"Key": key, "Value": value} for key, value in values.items()]
    return [{"ResourceType": kind, "Tags": tags} for kind in kinds] if kinds else tags


def make_network(cluster: str) -> str:
    """Returns the subnet."""
    ec2 = client("ec2")
    vpc = ec2.create_vpc(CidrBlock="10.77.0.0/20", TagSpecifications=tagged(cluster, "network", "vpc"))["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.77.0.0/20", AvailabilityZone="us-east-1a")
    return str(subnet["Subnet"]["SubnetId"])


def launch(cluster: str) -> dict[str, str]:
    """Creates the groups of a cluster; returns a host of each group."""
    subnet, image = make_network(cluster), client("ec2").describe_images()["Images"][0]["ImageId"]
    for role in ROLES:
        name, specifications = f"apex-{cluster}-{role}", tagged(cluster, role, "instance")
        data = {"ImageId": image, "InstanceType": "c7i.2xlarge", "TagSpecifications": specifications}
        client("ec2").create_launch_template(LaunchTemplateName=name, LaunchTemplateData=data)
        client("autoscaling").create_auto_scaling_group(
            AutoScalingGroupName=name,
            MinSize=0,
            MaxSize=6 if role == "actor" else 1,
            DesiredCapacity=3 if role == "actor" else 1,
            VPCZoneIdentifier=subnet,
            LaunchTemplate={"LaunchTemplateName": name, "Version": "$Latest"},
            Tags=[{**tag, "PropagateAtLaunch": True} for tag in tagged(cluster, role)],
        )
    return {role: hosts_of(cluster, role)[0] for role in ROLES}


def hosts_of(cluster: str, role: str) -> list[str]:
    name = f"apex-{cluster}-{role}"
    (group,) = client("autoscaling").describe_auto_scaling_groups(AutoScalingGroupNames=[name])["AutoScalingGroups"]
    return [item["InstanceId"] for item in group["Instances"]]


def test_two_clusters_are_listed_side_by_side(apex: Apex) -> None:
    make_network("half")  # an incomplete cluster
    status, lines, _ = apex("list")
    assert status == 0
    assert [line.split()[:5] for line in lines[:4]] == [
        ["name", "learner", "replay", "actor", "evaluator"],
        ["half", "-", "-", "-", "-"],
        ["pong", "1/1", "-", "3/3", "1/1"],
        ["pong-1", "1/1", "-", "3/3", "1/1"],
    ]
    problem, *curves = lines[4:]
    assert "half" in problem
    assert "terraform destroy" in problem
    assert all("curves at" in line for line in curves)
    # Stopped hosts and ended runs are reported.
    scaling, (learner,) = client("autoscaling"), hosts_of("pong", "learner")
    scaling.detach_instances(
        AutoScalingGroupName="apex-pong-learner", InstanceIds=[learner], ShouldDecrementDesiredCapacity=True
    )
    client("ec2").stop_instances(InstanceIds=[learner])
    scaling.set_desired_capacity(AutoScalingGroupName="apex-pong-actor", DesiredCapacity=0)
    lines = apex("list")[1]
    assert any(line.startswith(f"pong: learner {learner} is stopped") for line in lines)
    empty = [line for line in lines if line.startswith("pong:") and line.endswith(" 0")]
    assert [re.search("actor|learner", line)[0] for line in empty] == ["actor", "learner"]
