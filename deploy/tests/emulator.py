"""An AWS on loopback: moto's server in this process, with corrections where its answers differ from those of AWS.

Each correction prevents a difference for which Terraform would plan changes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import boto3
from botocore import xform_name
from moto.autoscaling.models import FakeAutoScalingGroup
from moto.ec2.models.instances import InstanceBackend
from moto.ec2.models.launch_templates import LaunchTemplate
from moto.ec2.models.security_groups import SecurityGroupRule
from moto.server import ThreadedMotoServer
from moto.servicequotas.models import ServiceQuotasBackend
from moto.servicequotas.responses import ServiceQuotasResponse

_create_version = LaunchTemplate.create_version
_run_instances = InstanceBackend.run_instances
_set_groups = InstanceBackend.modify_instance_security_groups
_update_group = FakeAutoScalingGroup.update
_launch = FakeAutoScalingGroup.replace_autoscaling_group_instances

REGION = "us-east-1"
BUCKET = "apex-test-checkpoints"
COMMIT = "0123abc"  # owner of the images
# Resources are queried by kind, because the emulator's list of tags still has deleted ones.
KINDS = (
    "InternetGateways LaunchTemplates NetworkInterfaces RouteTables SecurityGroups Subnets Volumes VpcEndpoints Vpcs"
)
NO_CAPACITY: set[tuple[str, str]] = set()  # instance types that cannot be launched now, and the zone


def environment(endpoint: str) -> dict[str, str]:
    """Returns the environment in which programs use `endpoint` as AWS. The credentials are fake."""
    return {
        "AWS_ACCESS_KEY_ID": "emulated",
        "AWS_SECRET_ACCESS_KEY": "emulated",
        "AWS_DEFAULT_REGION": REGION,
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_MAX_ATTEMPTS": "2",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "NO_PROXY": "127.0.0.1",
    }


@contextmanager
def emulated_aws() -> Iterator[str]:
    """Runs the emulator on a free loopback port; yields its address."""
    _mend()
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # It would log a line for each request.
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
    finally:
        server.stop()


def client(service: str, endpoint: str, region: str = REGION) -> Any:
    """Returns a boto3 client of the emulator."""
    keys = {"aws_access_key_id": "emulated", "aws_secret_access_key": "emulated"}
    return boto3.client(service, endpoint_url=endpoint, region_name=region, **keys)


def furnish(endpoint: str) -> None:
    """Creates the prerequisites of a cluster: the bucket, and images as deploy/packer registers them."""
    client("s3", endpoint).create_bucket(Bucket=BUCKET)
    register_images(endpoint, COMMIT)


def register_images(endpoint: str, commit: str, kinds: tuple[str, ...] = ("cpu", "gpu")) -> list[str]:
    """Registers images of a commit as deploy/packer does; returns their ids."""
    ec2, images = client("ec2", endpoint), []
    disk = {"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 16, "Encrypted": True}}
    for kind in kinds:
        image = ec2.register_image(
            Name=f"apex-{kind}-{commit}", Architecture="x86_64", RootDeviceName="/dev/sda1", BlockDeviceMappings=[disk]
        )["ImageId"]
        tags = {"Project": "apex-zeromq", "Role": kind, "Commit": commit}
        ec2.create_tags(Resources=[image], Tags=[{"Key": key, "Value": value} for key, value in tags.items()])
        images.append(image)
    return images


def left_of(cluster: str, endpoint: str) -> list[str]:
    """Returns everything with the cluster's name, found in every possible way."""
    ec2 = client("ec2", endpoint)
    only = [{"Name": "tag:Cluster", "Values": [cluster]}]
    listed = [
        item for kind in KINDS.split() for item in getattr(ec2, f"describe_{xform_name(kind)}")(Filters=only)[kind]
    ]
    found = {str(item) for item in listed if item.get("State") != "deleted"}
    reservations = ec2.describe_instances(Filters=only)["Reservations"]
    instances = [instance for reservation in reservations for instance in reservation["Instances"]]
    found |= {item["InstanceId"] for item in instances if item["State"]["Name"] != "terminated"}
    iam, scaling, logs = (client(service, endpoint) for service in ("iam", "autoscaling", "logs"))
    named = [
        *(role["RoleName"] for role in iam.list_roles()["Roles"]),
        *(profile["InstanceProfileName"] for profile in iam.list_instance_profiles()["InstanceProfiles"]),
        *(group["AutoScalingGroupName"] for group in scaling.describe_auto_scaling_groups()["AutoScalingGroups"]),
        *(group["logGroupName"] for group in logs.describe_log_groups()["logGroups"]),
    ]
    return sorted(found | {name for name in named if cluster in name})


def _mend() -> None:
    # The description of a rule for another group is stored beside that group's id.
    SecurityGroupRule.description = property(
        lambda rule: rule.ip_range.get("Description") or rule.source_group.get("Description")
    )

    # Tags of a template are not part of the instances that it launches, but moto adds them.
    def create_version(self: Any, data: dict[str, Any], description: str, original: Any = _create_version) -> Any:
        kinds = data.get("TagSpecifications", [])
        data["TagSpecifications"] = [kind for kind in kinds if kind["ResourceType"] != "launch-template"]
        return original(self, data, description)

    LaunchTemplate.create_version = create_version

    # The groups of an instance are those of its first interface, also if the request names them there.
    def run_instances(self: Any, *arguments: Any, original: Any = _run_instances, **options: Any) -> Any:
        reservation = original(self, *arguments, **options)
        for instance in reservation.instances:
            instance.security_groups = instance.security_groups or list(instance.nics[0].group_set)
        return reservation

    InstanceBackend.run_instances = run_instances

    # A request that changes another attribute of an instance names no groups, which moto reads as an empty list.
    def set_groups(self: Any, instance: str, groups: list[str], original: Any = _set_groups) -> Any:
        return original(self, instance, groups) if groups else self.get_instance(instance)

    InstanceBackend.modify_instance_security_groups = set_groups

    # A request that changes another attribute of a group keeps its policy.
    def update_group(self: Any, *arguments: Any, original: Any = _update_group, **options: Any) -> None:
        kept = self.mixed_instances_policy
        original(self, *arguments, **options)
        self.mixed_instances_policy = self.mixed_instances_policy or kept

    FakeAutoScalingGroup.update = update_group

    # moto has only quotas of VPCs. This account may have 8 vCPUs of each family.
    ServiceQuotasBackend.get_service_quota = lambda self, service_code, quota_code: {
        "ServiceCode": service_code,
        "QuotaCode": quota_code,
        "QuotaName": quota_code,
        "Value": 8.0,
    }
    ServiceQuotasResponse.get_aws_default_service_quota = ServiceQuotasResponse.get_service_quota

    # A group launches the first of its types that has capacity, and none if all lack it.
    def launch(self: Any, count: int, tags: dict[str, str], original: Any = _launch) -> None:
        policy = self.mixed_instances_policy or {"LaunchTemplate": {}}
        types = [each["InstanceType"] for each in policy["LaunchTemplate"].get("Overrides") or []]
        found = [each for each in types if (each, self.availability_zones[0]) not in NO_CAPACITY]
        before = len(self.instance_states)
        if found or not types:
            original(self, count, tags)
        for state in self.instance_states[before:] if found else []:
            state.instance.instance_type = found[0]

    FakeAutoScalingGroup.replace_autoscaling_group_instances = launch
