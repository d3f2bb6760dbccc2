"""The configuration, applied by the real provider to an emulated AWS: its changes and its rules."""

from __future__ import annotations

import json
from pathlib import Path

import emulator
import pytest
from conftest import ADMINS, NAME, Cluster
from rules import violations
from terraform_program import changes, resources, warnings

GROUP = 'aws_autoscaling_group.host["actor"]'

MUTATIONS = {
    "a port that is not the package's": (
        "security.tf", "port = 21003", "port = 51005", "actor cannot reach learner's port 21003"),
    "a port open to one more role": (
        "security.tf",
        '21634, at = "replay", open_to = ["learner"] }', '21634, at = "replay", open_to = ["learner", "actor"] }',
        "actor may reach learner's port 21004"),
    "TensorBoard for everybody": (
        "security.tf", "= each.value.cidr", '= "0.0.0.0/0"',
        "lets 0.0.0.0/0 in"),
    "a disk without encryption": (
        "hosts.tf", "encrypted             = true", "encrypted             = false", "disk that is not encrypted"),
    "the older metadata service": ("hosts.tf", '"required"', '"optional"', "answers IMDSv1"),
    "a policy for every resource": (
        "iam.tf", '[for role in each.value.roles : "${local.parameters}/keys/${role}/*"]', '["*"]',
        "PublishOwnKeys has Resource *"),
    "a learner that may end other clusters' hosts": (
        "iam.tf", '{ for key, value in merge(local.tags, { Role = kind }) : "aws:ResourceTag/${key}" => value }', "{}",
        "EndItself has Resource arn:aws:ec2:"),
    "a rule inside a group": (
        "security.tf", 'description = "Ape-X ${var.name}: ${each.key}"\n',
        'description = "Ape-X ${var.name}: ${each.key}"\n'
        '  ingress {\n from_port = 0\n to_port = 0\n protocol = "-1"\n cidr_blocks = ["0.0.0.0/0"]\n }\n',
        "has an inline rule"),
    "a key in user data": (
        "boot.tf", "APEX_BUCKET        = var.bucket", 'APEX_BUCKET = var.bucket, APEX_SECRET = sha256("")',
        "user data of learner has"),
    "a host without the cluster's tag": (
        "hosts.tf", ', Cluster = var.name }', " }", "is not tagged"),
    "a learner that is terminated with its disk": (
        "hosts.tf", '"stop"', '"terminate"', 'aws_launch_template.host["learner"] loses its uploads'),
    "a group that cannot end": (
        "hosts.tf", "min_size                  = 0", "min_size                  = 1", "cannot be set to 0"),
}  # fmt: skip


def test_a_second_plan_has_no_changes_and_keeps_every_rule(cluster: Cluster) -> None:
    second = cluster.terraform.plan()
    assert changes(second) == {}
    assert not second["applyable"], second.get("output_changes")
    assert violations(second, ADMINS) == []


def test_more_actor_hosts_raise_only_the_maximum_of_the_group(cluster: Cluster) -> None:
    plan = cluster.terraform.plan("-refresh=false", "-var=actor_hosts=24")
    assert changes(plan) == {GROUP: {"max_size": (3, 24)}}
    assert any("384" in message for message in warnings(plan))


def test_ignored_changes_are_named(cluster: Cluster) -> None:
    ignored = {"availability_zone": "us-east-1b", "num_actors": "512", "image_commit": "fedcba9", "region": "eu-west-1"}
    plan = cluster.terraform.plan(*(f"-var={name}={value}" for name, value in ignored.items()))
    assert changes(plan) == {}
    for name, value in ignored.items():
        assert any(f"{name} = {value} has no effect" in message for message in warnings(plan)), warnings(plan)


def test_the_module_refuses_another_region_of_the_provider(cluster: Cluster, tmp_path: Path) -> None:
    moved = cluster.terraform.copy(tmp_path / "moved")
    root = moved.folder / "main.tf"
    root.write_text(root.read_text().replace("region = terraform_data.region.input", 'region = "eu-west-1"'))
    error = " ".join(moved.run("plan", may_fail=True).stderr.replace("│", " ").split())
    assert "This cluster is in us-east-1, but the provider uses eu-west-1" in error


def test_the_second_type_is_used_where_the_first_has_no_capacity(cluster: Cluster) -> None:
    pages = emulator.client("ec2", cluster.endpoint).describe_instances(
        Filters=[{"Name": "tag:Role", "Values": ["learner"]}, {"Name": "tag:Cluster", "Values": [NAME]}]
    )
    (learner,) = (instance for page in pages["Reservations"] for instance in page["Instances"])
    assert (learner["InstanceType"], learner["State"]["Name"]) == ("g5.2xlarge", "running")


def test_actions_that_have_run_are_not_made_again(cluster: Cluster, tmp_path: Path) -> None:
    """After max_hours: AWS has removed the actions, so a refresh removes them from the state."""
    later = cluster.terraform.copy(tmp_path / "later")
    path = later.folder / "terraform.tfstate"
    (run,) = (
        item for item in resources(cluster.first_plan["planned_values"]) if item["address"] == "terraform_data.run"
    )
    state = json.loads(path.read_text().replace(run["values"]["input"]["begun"], "2020-01-01T00:00:00Z"))
    state["resources"] = [item for item in state["resources"] if item["type"] != "aws_autoscaling_schedule"]
    path.write_text(json.dumps(state))
    found = changes(later.plan("-refresh=false"))
    assert 'aws_launch_template.host["learner"]' in found, "the state has another begin, so this test checks nothing"
    assert not [address for address in found if address.startswith("aws_autoscaling_schedule")]


def test_spot_changes_only_the_group(cluster: Cluster) -> None:
    found = changes(cluster.terraform.plan("-refresh=false", "-var=spot=false"))
    assert set(found) == {GROUP}
    assert set(found[GROUP]) == {"mixed_instances_policy", "capacity_rebalance"}
    before, after = (policy[0]["instances_distribution"][0] for policy in found[GROUP]["mixed_instances_policy"])
    key = "on_demand_percentage_above_base_capacity"
    assert (before[key], after[key]) == (0, 100)
    assert {**before, key: 100} == after


def test_more_hours_replace_nothing(cluster: Cluster) -> None:
    plan = cluster.terraform.plan("-refresh=false", "-var=max_hours=48")
    found = changes(plan)
    assert "aws_ssm_parameter.max_hours" in found
    assert {address.split(".")[0] for address in found} == {
        "aws_ssm_parameter",  # The hosts read this value.
        "aws_autoscaling_schedule",
        "aws_launch_template",  # for hosts that are created later
        "aws_autoscaling_group",  # version of the template
    }
    actions = {tuple(item["change"]["actions"]) for item in plan["resource_changes"] if item["mode"] == "managed"}
    assert actions == {("no-op",), ("update",)}


def test_neither_newer_images_nor_a_scaled_group_is_a_change(cluster: Cluster) -> None:
    ec2, scaling = emulator.client("ec2", cluster.endpoint), emulator.client("autoscaling", cluster.endpoint)
    newer = emulator.register_images(cluster.endpoint, "fedcba9")
    scaling.set_desired_capacity(AutoScalingGroupName=f"apex-{NAME}-actor", DesiredCapacity=0)
    try:
        plan = cluster.terraform.plan()
    finally:
        for image in newer:
            ec2.deregister_image(ImageId=image)
        scaling.set_desired_capacity(AutoScalingGroupName=f"apex-{NAME}-actor", DesiredCapacity=3)
    assert newer[1] in str(plan["prior_state"]), "Terraform does not see the newer image, so this test checks nothing"
    assert changes(plan) == {}


def test_both_images_are_of_one_commit(cluster: Cluster, tmp_path: Path) -> None:
    """A newer CPU image that was built alone is not used, nor a GPU image that is not available."""
    ec2 = emulator.client("ec2", cluster.endpoint)
    newer = emulator.register_images(cluster.endpoint, "fedcba9")
    ec2.disable_image(ImageId=newer[1])
    fresh = cluster.terraform.copy(tmp_path / "fresh")
    (fresh.folder / "terraform.tfstate").unlink()
    try:
        plan = fresh.plan()
    finally:
        for image in newer:
            ec2.deregister_image(ImageId=image)
    templates = [item for item in resources(plan["planned_values"]) if item["type"] == "aws_launch_template"]
    used = [item["values"]["image_id"] for item in templates]
    images = ec2.describe_images(ImageIds=used)["Images"]
    tags = [{tag["Key"]: tag["Value"] for tag in image["Tags"]} for image in images]
    assert {tag["Role"] for tag in tags} == {"cpu", "gpu"}
    assert {tag["Commit"] for tag in tags} == {emulator.COMMIT}


@pytest.fixture(scope="module")
def found_in_mutant(cluster: Cluster, scratch: Path) -> list[str]:
    """Returns the violations in a copy with all mutations, which are independent of one another."""
    mutant = cluster.terraform.copy(scratch / "mutant")
    for file, old, new, _ in MUTATIONS.values():
        mutant.edit(file, old, new)
    return violations(mutant.plan("-refresh=false"), ADMINS)


@pytest.mark.parametrize("what", MUTATIONS)
def test_the_rules_notice(what: str, found_in_mutant: list[str]) -> None:
    assert any(MUTATIONS[what][3] in violation for violation in found_in_mutant), found_in_mutant


def test_hosts_are_destroyed_before_their_way_to_the_bucket(cluster: Cluster) -> None:
    configured = cluster.first_plan["configuration"]["root_module"]["module_calls"]["cluster"]["module"]["resources"]
    (group,) = (item for item in configured if item["address"] == "aws_autoscaling_group.host")
    way = {
        item["address"]
        for item in configured
        if item["type"] in ("aws_route", "aws_route_table_association", "aws_vpc_endpoint", "aws_iam_role_policy")
        or item["address"] == "aws_vpc_security_group_egress_rule.aws"
    } - {"aws_iam_role_policy.flow_logs"}
    assert set(group["depends_on"]) == way
    values = [item["values"] for item in resources(cluster.first_plan["planned_values"]) if item["address"] == GROUP]
    assert not values[0]["force_delete"], "Terraform does not wait for the hosts' last upload"
