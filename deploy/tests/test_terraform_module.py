"""examples/complete: two clusters by for_each in subnets of one VPC that exists already."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import emulator
import pytest
from terraform_program import Terraform, changes

NAMES = ("run-one", "run-two")


def make_subnets(endpoint: str) -> tuple[str, str]:
    """Returns a subnet with public addresses and one without, in one VPC."""
    ec2 = emulator.client("ec2", endpoint)
    vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
    blocks = ("10.0.0.0/24", "10.0.1.0/24")
    made = [
        ec2.create_subnet(VpcId=vpc, CidrBlock=block, AvailabilityZone="us-east-1b")["Subnet"]["SubnetId"]
        for block in blocks
    ]
    ec2.modify_subnet_attribute(SubnetId=made[0], MapPublicIpOnLaunch={"Value": True})
    return made[0], made[1]


@pytest.fixture(scope="module")
def example(
    installed: tuple[dict[str, str], Path], endpoint: str, tmp_path_factory: pytest.TempPathFactory
) -> Terraform:
    """The example with a state on this machine, and its variables."""
    settings, _ = installed
    scratch = tmp_path_factory.mktemp("module")
    environment = {**settings, **emulator.environment(endpoint)}
    example = Terraform(scratch / "tree", environment, scratch / "data", inside="examples/complete")
    (example.folder / "backend_override.tf").write_text('terraform {\n  backend "local" {}\n}\n')
    example.run("init")
    return example


def test_two_clusters_in_one_network_are_made_changed_and_destroyed(example: Terraform, endpoint: str) -> None:
    public, private = make_subnets(endpoint)
    common = {"subnet_ids": [public], "private_subnet_ids": [private]}
    common |= {"admin_cidrs": ["203.0.113.7/32"], "bucket": emulator.BUCKET}
    runs: dict[str, dict[str, Any]] = {name: {"environment": "ALE/Pong-v5"} for name in NAMES}
    example.set(**common, runs=runs)
    example.run("apply", "-auto-approve")
    assert unchanged(example)
    hosts = {(host["role"], host["subnet"], bool(host["public"])) for host in hosts_of(NAMES, endpoint)}
    assert hosts == {("learner", public, True), ("actor", private, False)}

    runs["run-two"]["actor_hosts"] = 4
    example.set(**common, runs=runs)
    plan = example.plan()
    assert set(changes(plan)) == {'module.cluster["run-two"].aws_autoscaling_group.host["actor"]'}
    example.run("apply", "test.tfplan")
    assert unchanged(example)

    made = {name: emulator.left_of(name, endpoint) for name in NAMES}
    assert all(made.values()), "nothing exists before, so this test checks nothing"
    example.run("destroy", "-auto-approve")
    assert {name: emulator.left_of(name, endpoint) for name in NAMES} == {"run-one": [], "run-two": []}


def unchanged(terraform: Terraform) -> bool:
    """Returns whether a plan has no changes, also of outputs."""
    plan = terraform.plan()
    return not changes(plan) and not plan["applyable"]


def hosts_of(names: tuple[str, ...], endpoint: str) -> list[dict[str, Any]]:
    """Returns role, subnet and public address of the hosts of these clusters."""
    pages = emulator.client("ec2", endpoint).describe_instances(Filters=[{"Name": "tag:Cluster", "Values": [*names]}])
    return [
        {
            "role": {tag["Key"]: tag["Value"] for tag in host["Tags"]}["Role"],
            "subnet": host["SubnetId"],
            "public": host.get("PublicIpAddress"),
        }
        for page in pages["Reservations"]
        for host in page["Instances"]
    ]
