"""examples/complete: two clusters by for_each in subnets of one VPC that exists already."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import emulator
import pytest
from terraform_program import Terraform, changes

from apex.cloud.cluster.command import main

NAMES = ("run-one", "run-two")


def test_two_clusters_in_one_network_are_made_changed_and_destroyed(
    new_terraform: Callable[..., Terraform],
    endpoint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    example = new_terraform(tmp_path / "tree", data=tmp_path / "data", inside="examples/complete")
    (example.folder / "backend_override.tf").write_text('terraform {\n  backend "local" {}\n}\n')
    example.run("init")
    ec2 = emulator.client("ec2", endpoint)
    vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
    public, private = (
        ec2.create_subnet(VpcId=vpc, CidrBlock=block, AvailabilityZone="us-east-1b")["Subnet"]["SubnetId"]
        for block in ("10.0.0.0/24", "10.0.1.0/24")
    )
    ec2.modify_subnet_attribute(SubnetId=public, MapPublicIpOnLaunch={"Value": True})
    common = {"subnet_ids": [public], "private_subnet_ids": [private]}
    common |= {"admin_cidrs": ["203.0.113.7/32"], "bucket": emulator.BUCKET}
    runs = {name: {"environment": "ALE/Pong-v5"} for name in NAMES}
    example.set(**common, runs=runs)
    example.run("apply", "-auto-approve")
    pages = ec2.describe_instances(Filters=[{"Name": "tag:Cluster", "Values": [*NAMES]}])["Reservations"]
    for host in (host for page in pages for host in page["Instances"]):
        is_learner = {"Key": "Role", "Value": "learner"} in host["Tags"]
        assert (host["SubnetId"], "PublicIpAddress" in host) == (public if is_learner else private, is_learner)

    runs["run-two"]["actor_hosts"] = 4
    example.set(**common, runs=runs)
    assert set(changes(example.plan())) == {'module.cluster["run-two"].aws_autoscaling_group.host["actor"]'}
    example.run("apply", "test.tfplan")
    plan = example.plan()
    assert not changes(plan)
    assert not plan["applyable"], "an output changes"
    for name, value in emulator.environment(endpoint).items():
        monkeypatch.setenv(name, value)
    assert main(["list"]) == 0
    rows = [line.split()[:5] for line in capsys.readouterr().out.splitlines()[1:3]]
    assert rows == [[name, "1/1", "-", "3/3", "-"] for name in NAMES]

    assert all(emulator.left_of(name, endpoint) for name in NAMES), "nothing exists before, so this test checks nothing"
    example.run("destroy", "-auto-approve")
    assert [emulator.left_of(name, endpoint) for name in NAMES] == [[], []]
