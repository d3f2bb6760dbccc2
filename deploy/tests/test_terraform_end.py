"""How clusters end: `apex cluster` removes a second one beside the first, and Terraform destroys the first."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import emulator
import pytest
from conftest import ADMINS, NAME, Cluster
from terraform_program import Terraform

from apex.cloud.cluster.command import main

OTHER = f"{NAME}-b"

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


def listed(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()  # what was said before
    assert main(["list", "--json"]) == 0
    return {item["name"]: item for item in json.loads(capsys.readouterr().out)["clusters"]}


@pytest.fixture(scope="session")
def coming(installed: tuple[dict[str, str], Path], endpoint: str, scratch: Path) -> Iterator[Future[Terraform]]:
    """The second cluster, brought up while the first one is: an apply mostly waits, by the provider's own clock."""
    settings, data = installed
    terraform = Terraform(scratch / "other", {**settings, **emulator.environment(endpoint)}, data)
    # On demand, as all of the emulator's hosts are; and it keeps one scheduled action of a name, whatever its group.
    terraform.set(
        name=OTHER,
        admin_cidrs=sorted(ADMINS),
        bucket=emulator.BUCKET,
        actor_hosts=2,
        spot=False,
        end_schedule=False,
    )

    def apply() -> Terraform:
        terraform.run("apply", "-auto-approve", "-input=false", "-no-color")
        return terraform

    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(apply)


@pytest.mark.timeout(600)  # Two clusters come up.
def test_what_terraform_made_is_listed_and_removed_and_its_destroy_then_ends_well(
    coming: Future[Terraform],
    cluster: Cluster,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terraform = coming.result()
    for name, value in emulator.environment(cluster.endpoint).items():
        monkeypatch.setenv(name, value)

    found = listed(capsys)
    assert {name: item["problems"] for name, item in found.items()} == {NAME: [], OTHER: []}
    assert sorted(host["role"] for host in found[OTHER]["hosts"]) == [
        "actor",
        "actor",
        "evaluator",
        "learner",
        "replay",
    ]
    planned = terraform.run("output", "-raw", "cost").stdout
    assert found[OTHER]["usd_an_hour"] == pytest.approx(float(planned.split()[1]), abs=0.03), planned  # one table

    assert main(["kill", OTHER, "--yes"]) == 0
    said = capsys.readouterr().out
    assert f"s3://{emulator.BUCKET}/{OTHER}/" in said
    assert set(listed(capsys)) == {NAME}
    assert main(["audit", OTHER]) == 0, capsys.readouterr().out

    made = [
        item["address"]
        for item in json.loads(terraform.run("show", "-json").stdout)["values"]["root_module"]["resources"]
    ]
    assert made, "the state names nothing: destroy has nothing to find out"
    terraform.run("destroy", "-auto-approve", "-input=false", "-no-color")
    assert listed(capsys)[NAME]["hosts"] == found[NAME]["hosts"]


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
