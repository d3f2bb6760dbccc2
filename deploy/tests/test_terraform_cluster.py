"""The configuration, applied by the real provider to an emulated AWS: its changes, its rules and its end."""

from __future__ import annotations

import json
from pathlib import Path

import emulator
import pytest
from conftest import ADMINS, NAME, Cluster
from rules import violations
from terraform_program import changes, resources, warnings

from apex.cloud.cluster.command import main

pytestmark = pytest.mark.xdist_group("cluster")  # They share one cluster, so one process runs them all.
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
    "a learner that can let its best policies expire": (
        "iam.tf", "checkpoints/?????????/*", "checkpoints/*", "LetExpire can let checkpoints/best.safetensors expire"),
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
    """Neither newer images nor a group of another size is a change."""
    ec2, scaling = emulator.client("ec2", cluster.endpoint), emulator.client("autoscaling", cluster.endpoint)
    newer = emulator.register_images(cluster.endpoint, "fedcba9")
    scaling.set_desired_capacity(AutoScalingGroupName=f"apex-{NAME}-actor", DesiredCapacity=0)
    try:
        second = cluster.terraform.plan()
    finally:
        for image in newer:
            ec2.deregister_image(ImageId=image)
        scaling.set_desired_capacity(AutoScalingGroupName=f"apex-{NAME}-actor", DesiredCapacity=3)
    assert newer[1] in str(second["prior_state"]), "Terraform does not see the newer image, so this test checks nothing"
    assert changes(second) == {}
    assert not second["applyable"], second.get("output_changes")
    assert violations(second, ADMINS) == []


def test_ignored_changes_are_named(cluster: Cluster) -> None:
    ignored = {"availability_zone": "us-east-1b", "num_actors": "512", "image_commit": "fedcba9", "region": "eu-west-1"}
    plan = cluster.terraform.plan(*(f"-var={name}={value}" for name, value in ignored.items()))
    assert changes(plan) == {}
    for name, value in ignored.items():
        assert any(f"{name} = {value} has no effect" in message for message in warnings(plan)), warnings(plan)


def test_more_hosts_on_demand_change_only_the_group(cluster: Cluster) -> None:
    plan = cluster.terraform.plan("-refresh=false", "-var=actor_hosts=24", "-var=spot=false")
    assert any("384" in message for message in warnings(plan))
    found = changes(plan)
    assert set(found) == {GROUP}
    assert set(found[GROUP]) == {"max_size", "mixed_instances_policy", "capacity_rebalance"}
    assert found[GROUP]["max_size"] == (3, 24)
    before, after = (policy[0]["instances_distribution"][0] for policy in found[GROUP]["mixed_instances_policy"])
    assert before["on_demand_percentage_above_base_capacity"] == 0
    assert {**before, "on_demand_percentage_above_base_capacity": 100} == after


def test_more_hours_replace_nothing(cluster: Cluster) -> None:
    plan, kinds = cluster.terraform.plan("-refresh=false", "-var=max_hours=48"), {}
    for address, names in changes(plan).items():
        kinds.setdefault(address.partition("[")[0], set()).update(names)
    assert kinds == {
        "aws_ssm_parameter.max_hours": {"value", "version"},  # The hosts read this value.
        "aws_autoscaling_schedule.end": {"start_time"},
        # for hosts that are created later
        "aws_launch_template.host": {"default_version", "latest_version", "user_data"},
        "aws_autoscaling_group.host": {"mixed_instances_policy"},  # version of the template
    }
    actions = {tuple(item["change"]["actions"]) for item in plan["resource_changes"] if item["mode"] == "managed"}
    assert actions == {("no-op",), ("update",)}


def test_the_module_refuses_another_region_of_the_provider(cluster: Cluster, tmp_path: Path) -> None:
    moved = cluster.terraform.copy(tmp_path / "moved")
    root = moved.folder / "main.tf"
    root.write_text(root.read_text().replace("region = terraform_data.region.input", 'region = "eu-west-1"'))
    assert "This cluster is in us-east-1, but the provider uses eu-west-1" in moved.refusal("plan")


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
    assert "timeout while waiting" in cluster.terraform.refusal(*apply)
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
