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


def test_without_a_learner_the_cluster_moves_to_the_next_zone(cluster: Cluster) -> None:
    scaling = emulator.client("autoscaling", cluster.endpoint)
    scaling.set_desired_capacity(AutoScalingGroupName=f"apex-{NAME}-learner", DesiredCapacity=0)
    plan = cluster.terraform.plan()
    assert changes(plan)["aws_subnet.this[0]"]["availability_zone"] == ("us-east-1a", "us-east-1b")
    replaced = [item["type"] for item in plan["resource_changes"] if item["change"]["actions"] == ["delete", "create"]]
    assert (replaced.count("aws_autoscaling_group"), replaced.count("aws_autoscaling_schedule")) == (3, 3)


def test_destroy_removes_everything_except_the_bucket(cluster: Cluster) -> None:
    s3 = emulator.client("s3", cluster.endpoint)
    s3.put_object(Bucket=emulator.BUCKET, Key=f"{NAME}/best/weights.safetensors", Body=b"weights")
    assert emulator.left_of(NAME, cluster.endpoint), "nothing exists before, so this test checks nothing"
    cluster.terraform.run("destroy", "-auto-approve", "-var=region=eu-west-1")  # has no effect
    assert emulator.left_of(NAME, cluster.endpoint) == []
    assert s3.list_objects_v2(Bucket=emulator.BUCKET)["KeyCount"] == 1
