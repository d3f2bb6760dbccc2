"""`apex cluster` on an emulated AWS: two clusters side by side, tagged as Terraform's.

Their names are one another's prefixes: pong, pong-1. What is done to one must leave the other unchanged.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from moto import mock_aws

from apex.cloud.cluster.aws import Aws
from apex.cloud.cluster.command import main

REGION = "us-east-1"
ROLES = ("replay", "learner", "evaluator", "actor")


def client(service: str) -> Any:
    return boto3.client(service, region_name=REGION)


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "emulated")
    with mock_aws():
        yield


def tagged(cluster: str, role: str, *kinds: str) -> list[dict[str, Any]]:
    words = {"Project": "apex-zeromq", "Cluster": cluster, "Role": role}
    tags = [{"Key": key, "Value": value} for key, value in words.items()]
    return [{"ResourceType": kind, "Tags": tags} for kind in kinds] if kinds else tags


def make_network(cluster: str) -> str:
    """Returns the subnet."""
    ec2 = client("ec2")
    vpc = ec2.create_vpc(CidrBlock="10.77.0.0/20", TagSpecifications=tagged(cluster, "network", "vpc"))["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.77.0.0/20", AvailabilityZone="us-east-1a")
    return str(subnet["Subnet"]["SubnetId"])


def launch(cluster: str, num_hosts: int = 3, most: int = 6) -> None:
    """The hosts that Terraform makes, and what they log."""
    ec2, subnet = client("ec2"), make_network(cluster)
    image = ec2.describe_images()["Images"][0]["ImageId"]
    for role in ROLES:
        client("logs").create_log_group(logGroupName=f"/apex/{cluster}/{role}")
    for role in ("replay", "learner", "evaluator"):
        launched = ec2.run_instances(
            ImageId=image,
            InstanceType="c7i.xlarge",
            MinCount=1,
            MaxCount=1,
            SubnetId=subnet,
            TagSpecifications=tagged(cluster, role, "instance"),
        )
        write_log(cluster, role, launched["Instances"][0]["InstanceId"])
    template = ec2.create_launch_template(
        LaunchTemplateName=f"apex-{cluster}-actors",
        LaunchTemplateData={
            "ImageId": image,
            "InstanceType": "c7i.2xlarge",
            "TagSpecifications": tagged(cluster, "actor", "instance"),
        },
    )["LaunchTemplate"]["LaunchTemplateId"]
    client("autoscaling").create_auto_scaling_group(
        AutoScalingGroupName=f"apex-{cluster}-actors",
        MinSize=0,
        MaxSize=most,
        DesiredCapacity=num_hosts,
        VPCZoneIdentifier=subnet,
        LaunchTemplate={"LaunchTemplateId": template, "Version": "$Latest"},
        Tags=[{**tag, "PropagateAtLaunch": True} for tag in tagged(cluster, "actor")],
    )
    for host in actor_hosts(cluster):
        write_log(cluster, "actor", host)


def write_log(cluster: str, role: str, host: str) -> None:
    """Two lines, a second after those of the role before it."""
    logs, group = client("logs"), f"/apex/{cluster}/{role}"
    logs.create_log_stream(logGroupName=group, logStreamName=host)
    now = int(time.time() * 1000) - 60_000 + 1000 * ROLES.index(role)
    events = [{"timestamp": now + 4000 * i, "message": f"{role} says {i}\x1b[2J"} for i in range(2)]
    logs.put_log_events(logGroupName=group, logStreamName=host, logEvents=events)


def actor_hosts(cluster: str) -> set[str]:
    name = f"apex-{cluster}-actors"
    groups = client("autoscaling").describe_auto_scaling_groups(AutoScalingGroupNames=[name])
    return {item["InstanceId"] for group in groups["AutoScalingGroups"] for item in group["Instances"]}


def apex(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main([*words], open_aws=lambda region: Aws(REGION, client))
    out, err = capsys.readouterr()
    return status, out, err


def listed(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    status, out, _ = apex(capsys, "list", "--json")
    assert status == 0
    return {item["name"]: item for item in json.loads(out)["clusters"]}


def test_two_clusters_are_listed_side_by_side(aws: None, capsys: pytest.CaptureFixture[str]) -> None:
    launch("pong-1")
    launch("pong")
    clusters = listed(capsys)
    assert {name: cluster["problems"] for name, cluster in clusters.items()} == {"pong": [], "pong-1": []}
    assert {host["role"] for host in clusters["pong"]["hosts"]} == set(ROLES)
    _, table, _ = apex(capsys, "list")
    assert [line.split()[0] for line in table.splitlines()[:3]] == ["name", "pong", "pong-1"]
    assert "3 of 3, at most 6" in table


def test_a_host_that_is_gone_or_stopped_is_a_problem(aws: None, capsys: pytest.CaptureFixture[str]) -> None:
    launch("pong")
    hosts = {host["role"]: host["id"] for host in listed(capsys)["pong"]["hosts"]}
    client("ec2").terminate_instances(InstanceIds=[hosts["evaluator"], hosts["actor"]])
    client("ec2").stop_instances(InstanceIds=[hosts["learner"]])
    assert listed(capsys)["pong"]["problems"] == [  # The group has replaced the actor host.
        "no evaluator host",
        f"learner {hosts['learner']} is stopped: its disk holds files that could not be uploaded. "
        "Start it again to upload them",
    ]


def test_the_lines_of_all_hosts_come_by_time(aws: None, capsys: pytest.CaptureFixture[str]) -> None:
    launch("pong-1")
    launch("pong")
    status, log, _ = apex(capsys, "tail", "pong", "--since", "1h")
    lines = log.splitlines()
    assert status == 0
    assert len(lines) == 12
    assert lines == sorted(lines, key=lambda line: line[:20])
    assert [line.split()[2] for line in lines[:2]] == ["replay", "learner"]
    assert "\x1b" not in log
    assert apex(capsys, "tail", "pong", "--since", "1s") == (0, "", "")
    only = apex(capsys, "tail", "pong", "--since", "1h", "--role", "actor")[1].splitlines()
    assert {line.split()[3] for line in only} == actor_hosts("pong")


def test_one_cluster_is_resized_within_its_bound(aws: None, capsys: pytest.CaptureFixture[str]) -> None:
    launch("pong-1")
    launch("pong")
    status, said, _ = apex(capsys, "resize", "pong", "--actors", "5")
    assert (status, said) == (0, "pong: desired actor hosts 5, 3 before; 3 in service\n")
    assert len(actor_hosts("pong")) == 5
    status, _, err = apex(capsys, "resize", "pong", "--actors", "7")
    assert status == 2
    assert "set actor_hosts = 7 in terraform.tfvars" in err
    assert len(actor_hosts("pong-1")) == 3


def test_an_incomplete_cluster_is_listed(aws: None, capsys: pytest.CaptureFixture[str]) -> None:
    make_network("half")
    assert "Remove it with terraform destroy" in listed(capsys)["half"]["problems"][0]
