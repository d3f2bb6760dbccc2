"""`apex cluster` lists what Terraform has made, and `terraform destroy` removes all of it except the bucket."""

from __future__ import annotations

import emulator
import pytest
from botocore import xform_name
from conftest import NAME, Cluster
from terraform_program import changes

from apex.cloud.cluster.command import main

# Resources are queried by kind, because the emulator's list of tags still has deleted ones.
KINDS = (
    "InternetGateways LaunchTemplates NetworkInterfaces RouteTables SecurityGroups Subnets Volumes VpcEndpoints Vpcs"
)


def test_the_resources_of_terraform_are_listed(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in emulator.environment(cluster.endpoint).items():
        monkeypatch.setenv(name, value)
    assert main(["list"]) == 0
    head, found, curves = capsys.readouterr().out.splitlines()  # and no problem
    assert head.split()[1:5] == ["learner", "replay", "actor", "evaluator"]
    assert found.split()[:5] == [NAME, "1/1", "-", "3/3", "1/1"]
    assert curves.endswith(" " + cluster.terraform.run("output", "-raw", "tensorboard_url").stdout)


def test_without_a_learner_the_cluster_moves_to_the_next_zone(cluster: Cluster) -> None:
    scaling = emulator.client("autoscaling", cluster.endpoint)
    scaling.set_desired_capacity(AutoScalingGroupName=f"apex-{NAME}-learner", DesiredCapacity=0)
    plan = cluster.terraform.plan()
    assert changes(plan)["aws_subnet.this"]["availability_zone"] == ("us-east-1a", "us-east-1b")
    replaced = [item["type"] for item in plan["resource_changes"] if item["change"]["actions"] == ["delete", "create"]]
    assert (replaced.count("aws_autoscaling_group"), replaced.count("aws_autoscaling_schedule")) == (3, 3)


def test_destroy_removes_everything_except_the_bucket(cluster: Cluster) -> None:
    s3 = emulator.client("s3", cluster.endpoint)
    s3.put_object(Bucket=emulator.BUCKET, Key=f"{NAME}/best/weights.safetensors", Body=b"weights")
    assert tagged(cluster.endpoint), "nothing exists before, so this test checks nothing"
    cluster.terraform.run("destroy", "-auto-approve", "-var=region=eu-west-1")  # has no effect
    assert tagged(cluster.endpoint) == []
    assert s3.list_objects_v2(Bucket=emulator.BUCKET)["KeyCount"] == 1


def tagged(endpoint: str) -> list[str]:
    """Returns everything with the cluster's name, found in every possible way."""
    ec2 = emulator.client("ec2", endpoint)
    only = [{"Name": "tag:Cluster", "Values": [NAME]}]
    listed = [
        item for kind in KINDS.split() for item in getattr(ec2, f"describe_{xform_name(kind)}")(Filters=only)[kind]
    ]
    found = {str(item) for item in listed if item.get("State") != "deleted"}
    reservations = ec2.describe_instances(Filters=only)["Reservations"]
    instances = [instance for reservation in reservations for instance in reservation["Instances"]]
    found |= {item["InstanceId"] for item in instances if item["State"]["Name"] != "terminated"}
    iam, scaling, logs = (emulator.client(service, endpoint) for service in ("iam", "autoscaling", "logs"))
    named = [
        *(role["RoleName"] for role in iam.list_roles()["Roles"]),
        *(profile["InstanceProfileName"] for profile in iam.list_instance_profiles()["InstanceProfiles"]),
        *(group["AutoScalingGroupName"] for group in scaling.describe_auto_scaling_groups()["AutoScalingGroups"]),
        *(group["logGroupName"] for group in logs.describe_log_groups()["logGroups"]),
    ]
    return sorted(found | {name for name in named if NAME in name})
