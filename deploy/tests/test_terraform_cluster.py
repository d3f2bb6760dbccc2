"""The configuration, applied by the real provider to an emulated AWS: what it changes, leaves, and keeps to."""

from __future__ import annotations

from pathlib import Path

import emulator
import pytest
from conftest import ADMINS, NAME, Cluster
from rules import violations
from terraform_program import Plan, changes

GROUP = "aws_autoscaling_group.actors"

MUTATIONS = {
    "a port that is not the package's": (
        "security.tf", "port = 51003", "port = 51005", "actor cannot reach replay's port 51003"),
    "a door open to one role more": (
        "security.tf", 'at = "learner", open_to = ["replay"] }', 'at = "learner", open_to = ["replay", "actor"] }',
        "actor may reach learner's port 52002"),
    "TensorBoard for everybody": (
        "security.tf", "= each.value.cidr", '= "0.0.0.0/0"',
        "lets 0.0.0.0/0 in"),
    "a plain disk": (
        "actors.tf", "encrypted             = true", "encrypted             = false", "disk that is not encrypted"),
    "the older metadata service": ("replay.tf", '"required"', '"optional"', "answers IMDSv1"),
    "a policy for every resource": (
        "iam.tf", 'resources = ["${local.keys}/${each.key}/*"]', 'resources = ["*"]', "PublishOwnKey has Resource *"),
    "a learner that ends anybody's hosts": (
        "iam.tf", 'only     = { for key, value in local.tags : "aws:ResourceTag/${key}" => value }', "only     = {}",
        "EndHosts has Resource arn:aws:ec2:"),
    "a rule inside a group": (
        "security.tf", 'description = "Ape-X ${var.name}: ${each.key}"\n',
        'description = "Ape-X ${var.name}: ${each.key}"\n'
        '  ingress {\n from_port = 0\n to_port = 0\n protocol = "-1"\n cidr_blocks = ["0.0.0.0/0"]\n }\n',
        "has a rule of its own"),
    "a key in user data": (
        "boot.tf", "APEX_BUCKET      = var.bucket", 'APEX_BUCKET      = var.bucket, APEX_SECRET = sha256("")',
        "user data of learner has"),
    "a host that nobody would find": (
        "locals.tf", ', Cluster = var.name }', " }", "is not tagged"),
    "a learner whose disk goes with it": (
        "learner.tf", '"stop"', '"terminate"', "aws_instance.learner loses what it has not uploaded"),
    "a group that cannot end": (
        "actors.tf", "min_size                  = 0", "min_size                  = 1", "cannot be set to 0"),
}  # fmt: skip


def look(plan: Plan) -> list[str]:
    return violations(plan, ADMINS)


@pytest.fixture(scope="module")
def second(cluster: Cluster) -> Plan:
    return cluster.terraform.plan()


def test_a_second_plan_has_no_changes(second: Plan) -> None:
    assert changes(second) == {}
    assert not second["applyable"], second.get("output_changes")


def test_the_plan_keeps_every_rule(second: Plan) -> None:
    assert look(second) == []


def test_more_actor_hosts_raise_the_bound_of_the_group_and_nothing_else(cluster: Cluster) -> None:
    plan = cluster.terraform.plan("-refresh=false", "-var=actor_hosts=24")
    assert changes(plan) == {GROUP: {"max_size": (3, 24)}}
    assert any("this run has num_actors = 384" in text for text in complaints(plan))


def test_spot_or_not_is_a_matter_of_the_group_alone(cluster: Cluster) -> None:
    found = changes(cluster.terraform.plan("-refresh=false", "-var=spot=false"))
    assert set(found) == {GROUP}
    assert set(found[GROUP]) == {"mixed_instances_policy", "capacity_rebalance"}
    before, after = (policy[0]["instances_distribution"][0] for policy in found[GROUP]["mixed_instances_policy"])
    key = "on_demand_percentage_above_base_capacity"
    assert (before[key], after[key]) == (0, 100)
    assert {**before, key: 100} == after


def test_neither_a_newer_image_nor_a_scaled_group_is_a_change(cluster: Cluster) -> None:
    ec2, scaling = emulator.client("ec2", cluster.endpoint), emulator.client("autoscaling", cluster.endpoint)
    newer = ec2.register_image(Name="apex-cpu-2", Architecture="x86_64", RootDeviceName="/dev/xvda")["ImageId"]
    ec2.create_tags(Resources=[newer], Tags=emulator.tags("cpu"))
    scaling.set_desired_capacity(AutoScalingGroupName=f"apex-{NAME}-actors", DesiredCapacity=0)
    try:
        plan = cluster.terraform.plan()
    finally:
        ec2.deregister_image(ImageId=newer)
        scaling.set_desired_capacity(AutoScalingGroupName=f"apex-{NAME}-actors", DesiredCapacity=3)
    assert newer in str(plan["prior_state"]), "Terraform has not seen the newer image: this test finds nothing out"
    assert changes(plan) == {}


@pytest.fixture(scope="module")
def found_in_mutant(cluster: Cluster, scratch: Path) -> list[str]:
    """What breaks a rule in a copy with all mutations at once: they do not touch one another."""
    mutant = cluster.terraform.copy(scratch / "mutant")
    for file, old, new, _ in MUTATIONS.values():
        mutant.edit(file, old, new)
    return look(mutant.plan("-refresh=false"))


@pytest.mark.parametrize("what", MUTATIONS)
def test_the_rules_notice(what: str, found_in_mutant: list[str]) -> None:
    assert any(MUTATIONS[what][3] in violation for violation in found_in_mutant), found_in_mutant


def test_the_learner_is_destroyed_before_its_way_to_the_bucket(cluster: Cluster) -> None:
    configured = cluster.first_plan["configuration"]["root_module"]["resources"]
    (learner,) = (item for item in configured if item["address"] == "aws_instance.learner")
    way = {
        item["address"]
        for item in configured
        if item["type"] in ("aws_route", "aws_route_table_association", "aws_vpc_endpoint", "aws_iam_role_policy")
        or item["address"] == "aws_vpc_security_group_egress_rule.aws"
    } - {"aws_iam_role_policy.flow_logs"}
    assert set(learner["depends_on"]) == way


def test_without_the_ladder_a_bound_would_restart_the_learner(cluster: Cluster, tmp_path: Path) -> None:
    mutant = cluster.terraform.copy(tmp_path / "mutant")
    mutant.edit("boot.tf", "    ignore_changes = [input]\n", "")
    assert "aws_instance.learner" in changes(mutant.plan("-refresh=false", "-var=actor_hosts=24"))


def complaints(plan: Plan) -> list[str]:
    return [
        problem["message"]
        for check in plan["checks"]
        for i in check["instances"] or []
        for problem in i.get("problems") or []
    ]
