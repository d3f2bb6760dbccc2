"""What deploy/terraform/ray creates for `ray up`, and what Ray's own code makes of its file on an emulated AWS."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import emulator
import pytest
from conftest import ADMINS
from terraform_program import ROOT, Terraform

yaml = pytest.importorskip("yaml", reason="needs PyYAML, of the extra cloud")
pytestmark = pytest.mark.xdist_group("ray")
REFUSED = """
run "r%d" {
  command = plan
  variables { admin_cidrs = ["%s"] }
  expect_failures = [var.admin_cidrs]
}
"""


@pytest.fixture(scope="module")
def applied(new_terraform: Callable[..., Terraform], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terraform]:
    folder = tmp_path_factory.mktemp("deploy")
    shutil.copytree(ROOT.parent / "ray", folder / "ray")
    terraform = new_terraform(folder / "terraform/ray", source=ROOT / "ray")
    terraform.set(admin_cidrs=sorted(ADMINS))
    terraform.run("apply", "-auto-approve")
    yield terraform
    terraform.run("destroy", "-auto-approve")


def groups(endpoint: str) -> list[dict[str, Any]]:
    return list(emulator.client("ec2", endpoint).describe_security_groups()["SecurityGroups"])


def owned(endpoint: str) -> tuple[list[str], list[str]]:
    """Returns all roles and all security groups."""
    roles = emulator.client("iam", endpoint).list_roles()["Roles"]
    return sorted(role["RoleName"] for role in roles), sorted(group["GroupId"] for group in groups(endpoint))


def attached(endpoint: str) -> list[dict[str, str]]:
    """Returns the policies of the head beside its own, such as AmazonEC2FullAccess."""
    iam = emulator.client("iam", endpoint)
    return list(iam.list_attached_role_policies(RoleName="apex-ray")["AttachedPolicies"])


def test_only_the_hosts_and_ssh_of_admins_are_let_in(applied: Terraform, endpoint: str) -> None:
    (group,) = [group for group in groups(endpoint) if group["GroupName"] == "apex-ray"]
    inside, ssh = sorted(group["IpPermissions"], key=lambda rule: rule["IpProtocol"])
    assert (inside["IpRanges"], [pair["GroupId"] for pair in inside["UserIdGroupPairs"]]) == ([], [group["GroupId"]])
    assert (ssh["FromPort"], ssh["ToPort"], ssh["UserIdGroupPairs"]) == (22, 22, [])
    assert {entry["CidrIp"] for entry in ssh["IpRanges"]} == ADMINS


def test_a_wide_or_malformed_network_is_refused(applied: Terraform) -> None:
    """`terraform test` fails unless each of the runs is refused."""
    wrong = ("0.0.0.0/0", "203.0.113.0/15", "203.0.113.7", "::/0")
    (applied.folder / "refused.tftest.hcl").write_text("".join(REFUSED % each for each in enumerate(wrong)))
    assert "4 passed, 0 failed" in applied.run("test").stdout


def test_the_head_may_change_only_hosts_of_its_cluster(applied: Terraform, endpoint: str) -> None:
    iam = emulator.client("iam", endpoint)
    assert attached(endpoint) == []
    (name,) = iam.list_role_policies(RoleName="apex-ray")["PolicyNames"]
    statements = iam.get_role_policy(RoleName="apex-ray", PolicyName=name)["PolicyDocument"]["Statement"]
    allowed = {action for statement in statements for action in statement["Action"]}
    changes = {"ec2:RunInstances", "ec2:CreateTags", "ec2:TerminateInstances"}
    assert allowed == {"ec2:DescribeInstances", "iam:CreateServiceLinkedRole", *changes}
    for statement in statements:
        if "Condition" not in statement:
            assert statement["Action"] in (["ec2:DescribeInstances"], ["ec2:RunInstances"])
            assert not [arn for arn in statement["Resource"] if ":instance/" in arn]
            assert statement["Resource"] != ["*"] or not changes & set(statement["Action"])
        else:
            ((_, conditions),) = statement["Condition"].items()
            assert conditions in (
                {"aws:RequestTag/ray-cluster-name": "apex"},
                {"aws:ResourceTag/ray-cluster-name": "apex"},
                {"ec2:CreateAction": "RunInstances"},
                {"iam:AWSServiceName": "spot.amazonaws.com"},
            )
            assert ("ec2:CreateAction" in conditions) == (statement["Action"] == ["ec2:CreateTags"])


def test_ray_starts_hosts_with_this_role_and_group_and_creates_no_other(
    applied: Terraform, endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    util = pytest.importorskip("ray.autoscaler._private.util", reason="needs Ray: pip install 'ray[default]'")
    from ray.autoscaler._private.aws.node_provider import AWSNodeProvider

    before = owned(endpoint)
    for name, value in {**emulator.environment(endpoint), "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)  # Ray creates a key pair for SSH, and saves it in HOME.
    config = yaml.safe_load(applied.run("output", "-raw", "cluster_file").stdout)
    config = AWSNodeProvider.fillout_available_node_types_resources(util.prepare_config(config))
    util.validate_config(config)
    config = AWSNodeProvider.bootstrap_config(config)
    kinds = config["available_node_types"]
    assert (kinds["head"]["resources"]["CPU"], kinds["head"]["resources"]["GPU"]) == (8, 1)
    assert kinds["actors"]["resources"]["CPU"] == 8

    provider, ec2 = AWSNodeProvider(config["provider"], "apex"), emulator.client("ec2", endpoint)
    for name, kind in kinds.items():
        (host,) = provider.create_node(kind["node_config"], {}, 1)
        reservation = ec2.describe_instances(InstanceIds=[host])["Reservations"][0]
        instance = reservation["Instances"][0]
        assert {"Key": "ray-cluster-name", "Value": "apex"} in instance["Tags"]
        assert [group["GroupName"] for group in instance["SecurityGroups"]] == ["apex-ray"]
        profile = instance.get("IamInstanceProfile", {}).get("Arn", "")
        assert profile.endswith("/apex-ray") if name == "head" else not profile
        behaviour = "instanceInitiatedShutdownBehavior"
        found = ec2.describe_instance_attribute(InstanceId=host, Attribute=behaviour)
        assert found["InstanceInitiatedShutdownBehavior"] == {"Value": "terminate"}
        ec2.terminate_instances(InstanceIds=[host])

    assert owned(endpoint) == before
    assert attached(endpoint) == []
