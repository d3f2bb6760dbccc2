"""`apex cluster` on an emulated AWS with two clusters, tagged like Terraform's.

The name of one is a prefix of the other's: pong, pong-1. Changes to one must not affect the other.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from moto import mock_aws

from apex.cloud.cluster.aws import Aws
from apex.cloud.cluster.command import main

REGION = "us-east-1"
ROLES = ("learner", "evaluator", "actor")  # the replay server shares the learner's host


def client(service: str) -> Any:
    return boto3.client(service, region_name=REGION)


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "emulated")
    with mock_aws():
        yield


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


def launch(cluster: str, most: int = 6) -> None:
    """Creates the groups of a cluster, and the logs of their hosts."""
    subnet, image = make_network(cluster), client("ec2").describe_images()["Images"][0]["ImageId"]
    for role in ROLES:
        client("logs").create_log_group(logGroupName=f"/apex/{cluster}/{role}")
        template = client("ec2").create_launch_template(
            LaunchTemplateName=f"apex-{cluster}-{role}",
            LaunchTemplateData={
                "ImageId": image,
                "InstanceType": "c7i.2xlarge",
                "TagSpecifications": tagged(cluster, role, "instance"),
            },
        )["LaunchTemplate"]["LaunchTemplateId"]
        client("autoscaling").create_auto_scaling_group(
            AutoScalingGroupName=f"apex-{cluster}-{role}",
            MinSize=0,
            MaxSize=most if role == "actor" else 1,
            DesiredCapacity=3 if role == "actor" else 1,
            VPCZoneIdentifier=subnet,
            LaunchTemplate={"LaunchTemplateId": template, "Version": "$Latest"},
            Tags=[{**tag, "PropagateAtLaunch": True} for tag in tagged(cluster, role)],
        )
        for host in hosts_of(cluster, role):
            write_log(cluster, role, host)


def write_log(cluster: str, role: str, host: str) -> None:
    """Writes two lines, a second after those of the previous role."""
    logs, group = client("logs"), f"/apex/{cluster}/{role}"
    logs.create_log_stream(logGroupName=group, logStreamName=host)
    now = int(time.time() * 1000) - 60_000 + 1000 * ROLES.index(role)
    events = [{"timestamp": now + 4000 * i, "message": f"{role} says {i}\x1b[2J"} for i in range(2)]
    logs.put_log_events(logGroupName=group, logStreamName=host, logEvents=events)


def hosts_of(cluster: str, role: str) -> list[str]:
    name = f"apex-{cluster}-{role}"
    (group,) = client("autoscaling").describe_auto_scaling_groups(AutoScalingGroupNames=[name])["AutoScalingGroups"]
    return [item["InstanceId"] for item in group["Instances"]]


def apex(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str], str]:
    status = main([*arguments], open_aws=lambda region: Aws(REGION, client))
    out, err = capsys.readouterr()
    return status, out.splitlines(), err


def test_two_clusters_are_listed_side_by_side(aws: None, capsys: pytest.CaptureFixture[str]) -> None:
    launch("pong-1")
    launch("pong")
    status, lines, _ = apex(capsys, "list")
    assert status == 0
    assert [line.split()[:5] for line in lines[:3]] == [
        ["name", "learner", "replay", "actor", "evaluator"],
        ["pong", "1/1", "-", "3/3", "1/1"],
        ["pong-1", "1/1", "-", "3/3", "1/1"],
    ]
    assert all("curves at" in line for line in lines[3:])  # no problems


def test_stopped_hosts_and_ended_runs_are_reported(aws: None, capsys: pytest.CaptureFixture[str]) -> None:
    launch("pong")
    scaling, (learner,) = client("autoscaling"), hosts_of("pong", "learner")
    scaling.detach_instances(
        AutoScalingGroupName="apex-pong-learner", InstanceIds=[learner], ShouldDecrementDesiredCapacity=True
    )
    client("ec2").stop_instances(InstanceIds=[learner])
    scaling.set_desired_capacity(AutoScalingGroupName="apex-pong-actor", DesiredCapacity=0)
    stopped, *empty = apex(capsys, "list")[1][-3:]
    assert stopped.startswith(f"pong: learner {learner} is stopped")
    assert [re.search("actor|learner", line)[0] for line in empty if line.endswith(" 0")] == ["actor", "learner"]


def test_the_lines_of_all_hosts_come_by_time(aws: None, capsys: pytest.CaptureFixture[str]) -> None:
    launch("pong-1")
    launch("pong")
    status, lines, _ = apex(capsys, "tail", "pong", "--since", "1h")
    assert status == 0
    assert len(lines) == 10
    assert lines == sorted(lines, key=lambda line: line[:20])
    assert [line.split()[2] for line in lines[:2]] == ["learner", "evaluator"]
    assert "\x1b" not in "".join(lines)
    assert apex(capsys, "tail", "pong", "--since", "1s") == (0, [], "")
    only = apex(capsys, "tail", "pong", "--since", "1h", "--role", "actor")[1]
    assert {line.split()[3] for line in only} == set(hosts_of("pong", "actor"))


def test_one_cluster_is_resized_within_its_bound(aws: None, capsys: pytest.CaptureFixture[str]) -> None:
    launch("pong-1")
    launch("pong")
    line = "pong: desired actor hosts 5 (before: 3); 3 in service"
    assert apex(capsys, "resize", "pong", "--actors", "5") == (0, [line], "")
    assert len(hosts_of("pong", "actor")) == 5
    assert apex(capsys, "resize", "pong", "--actors", "7")[0] == 2
    assert len(hosts_of("pong-1", "actor")) == 3


def test_an_incomplete_cluster_is_listed(aws: None, capsys: pytest.CaptureFixture[str]) -> None:
    make_network("half")
    assert "terraform destroy" in apex(capsys, "list")[1][-1]
