"""`apex cluster` lists what Terraform has made, and `terraform destroy` removes all of it except the bucket."""

from __future__ import annotations

import emulator
import pytest
from conftest import NAME, Cluster
from terraform_program import changes

from apex.cloud.cluster.command import main


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


def test_an_apply_without_capacity_fails_and_the_next_changes_the_zone(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with learner_spot: a plan after an apply that did not wait would move the zone too."""
    cluster.terraform.edit("hosts.tf", '"10m"', '"5s"')
    scaling, ec2 = (emulator.client(service, cluster.endpoint) for service in ("autoscaling", "ec2"))
    group = f"apex-{NAME}-learner"
    scaling.set_desired_capacity(AutoScalingGroupName=group, DesiredCapacity=0)
    types = ("g6.2xlarge", "g5.2xlarge")
    monkeypatch.setattr(emulator, "NO_CAPACITY", {(each, "us-east-1b") for each in types})
    apply = ("apply", "-auto-approve", "-var=learner_spot=true")
    assert "timeout while waiting" in cluster.terraform.run(*apply, may_fail=True).stderr
    (subnet,) = ec2.describe_subnets(Filters=[{"Name": "tag:Cluster", "Values": [NAME]}])["Subnets"]
    assert subnet["AvailabilityZone"] == "us-east-1b"
    cluster.terraform.run(*apply)
    (found,) = scaling.describe_auto_scaling_groups(AutoScalingGroupNames=[group])["AutoScalingGroups"]
    assert [host["AvailabilityZone"] for host in found["Instances"]] == ["us-east-1c"]
    assert changes(cluster.terraform.plan("-var=learner_spot=true")) == {}


def test_destroy_removes_everything_except_the_bucket(cluster: Cluster) -> None:
    s3 = emulator.client("s3", cluster.endpoint)
    s3.put_object(Bucket=emulator.BUCKET, Key=f"{NAME}/best/weights.safetensors", Body=b"weights")
    assert emulator.left_of(NAME, cluster.endpoint), "nothing exists before, so this test checks nothing"
    cluster.terraform.run("destroy", "-auto-approve", "-var=region=eu-west-1")  # has no effect
    assert emulator.left_of(NAME, cluster.endpoint) == []
    assert s3.list_objects_v2(Bucket=emulator.BUCKET)["KeyCount"] == 1
