"""What Terraform makes is listed by `apex cluster`, and `terraform destroy` leaves nothing of it but the bucket."""

from __future__ import annotations

import emulator
import pytest
from conftest import NAME, Cluster

from apex.cloud.cluster.command import main

# Looked up one kind at a time: the emulator's list of tags has those of what is gone, too.
KINDS = (
    "internet_gateways",
    "launch_templates",
    "network_interfaces",
    "route_tables",
    "security_groups",
    "subnets",
    "volumes",
    "vpc_endpoints",
    "vpcs",
)


def test_what_terraform_made_is_listed(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in emulator.environment(cluster.endpoint).items():
        monkeypatch.setenv(name, value)
    assert main(["list"]) == 0
    head, found, curves = capsys.readouterr().out.splitlines()  # and no problem
    assert head.split()[1:5] == ["learner", "replay", "actor", "evaluator"]
    assert found.split()[:5] == [NAME, "1/1", "-", "3/3", "1/1"]
    assert (
        curves.removeprefix(f"{NAME}: curves at ") == cluster.terraform.run("output", "-raw", "tensorboard_url").stdout
    )


def test_destroy_leaves_the_bucket_and_nothing_else(cluster: Cluster) -> None:
    s3 = emulator.client("s3", cluster.endpoint)
    s3.put_object(Bucket=emulator.BUCKET, Key=f"{NAME}/best/weights.safetensors", Body=b"weights")
    assert tagged(cluster.endpoint), "before it there is nothing to be found: this test finds nothing out"
    cluster.terraform.run("destroy", "-auto-approve", "-input=false", "-no-color")
    assert tagged(cluster.endpoint) == []
    assert s3.list_objects_v2(Bucket=emulator.BUCKET)["KeyCount"] == 1


def tagged(endpoint: str) -> list[str]:
    """All that bears the cluster's name, by whichever way it can be found."""
    ec2 = emulator.client("ec2", endpoint)
    only = [{"Name": "tag:Cluster", "Values": [NAME]}]
    found = {
        str(item)
        for kind in KINDS
        for item in getattr(ec2, f"describe_{kind}")(Filters=only)["".join(map(str.capitalize, kind.split("_")))]
        if item.get("State") != "deleted"
    }
    reservations = ec2.describe_instances(Filters=only)["Reservations"]
    instances = [instance for reservation in reservations for instance in reservation["Instances"]]
    found |= {item["InstanceId"] for item in instances if item["State"]["Name"] != "terminated"}
    iam = emulator.client("iam", endpoint)
    found |= {role["RoleName"] for role in iam.list_roles()["Roles"] if NAME in role["RoleName"]}
    profiles = iam.list_instance_profiles()["InstanceProfiles"]
    found |= {profile["InstanceProfileName"] for profile in profiles if NAME in profile["InstanceProfileName"]}
    groups = emulator.client("autoscaling", endpoint).describe_auto_scaling_groups()["AutoScalingGroups"]
    found |= {group["AutoScalingGroupName"] for group in groups if NAME in group["AutoScalingGroupName"]}
    logs = emulator.client("logs", endpoint).describe_log_groups(logGroupNamePrefix=f"/apex/{NAME}/")["logGroups"]
    found |= {group["logGroupName"] for group in logs}
    return sorted(found)
