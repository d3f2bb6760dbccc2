"""`apex cluster` on an emulated AWS: two clusters side by side, shaped and tagged as Terraform's, and a half-made one.

Their names are one another's prefixes: pong, pong-1. What happens to one must leave the other as it was.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import cache
from typing import Any

import boto3
import pytest

from apex.cloud.cluster.aws import open_aws
from apex.cloud.cluster.command import main

BUCKET = "apex-weights"
ROLES = ("replay", "learner", "evaluator", "actor")
SECONDS = 60  # that the emulator may take to start
DESCRIBED = (  # by EC2
    ("Vpcs", "VpcId", "describe_vpcs"),
    ("Subnets", "SubnetId", "describe_subnets"),
    ("InternetGateways", "InternetGatewayId", "describe_internet_gateways"),
    ("RouteTables", "RouteTableId", "describe_route_tables"),
    ("VpcEndpoints", "VpcEndpointId", "describe_vpc_endpoints"),
    ("SecurityGroups", "GroupId", "describe_security_groups"),
    ("LaunchTemplates", "LaunchTemplateId", "describe_launch_templates"),
    ("Volumes", "VolumeId", "describe_volumes"),
    ("Addresses", "AllocationId", "describe_addresses"),
    ("NetworkInterfaces", "NetworkInterfaceId", "describe_network_interfaces"),
)


client, open_aws = cache(boto3.client), cache(open_aws)  # Making a client takes longer than asking it.


@pytest.fixture(scope="module")
def aws() -> Iterator[None]:
    """An AWS of this module's own, in a process of its own; boto3 finds it by its standard variables."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    address = f"http://127.0.0.1:{port}"
    words = {
        "AWS_ACCESS_KEY_ID": "emulated",
        "AWS_SECRET_ACCESS_KEY": "emulated",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": address,
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_PROXY": "127.0.0.1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in words.items():
            patch.setenv(name, value)
        emulator = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            _await(address)
            client("s3").create_bucket(Bucket=BUCKET)
            client("s3").put_bucket_tagging(
                Bucket=BUCKET, Tagging={"TagSet": [{"Key": "Project", "Value": "apex-zeromq"}]}
            )
            yield
        finally:
            emulator.kill()
            emulator.wait()


def _await(address: str) -> None:
    until = time.monotonic() + SECONDS
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while True:
        try:
            opener.open(f"{address}/moto-api/", timeout=5).close()
        except OSError:
            assert time.monotonic() < until, "the emulator does not answer"
            time.sleep(0.1)
        else:
            return


def tagged(cluster: str, role: str, *kinds: str) -> list[dict[str, Any]]:
    words = {"Project": "apex-zeromq", "Cluster": cluster, "Role": role}
    tags = [{"Key": key, "Value": value} for key, value in words.items()]
    return [{"ResourceType": kind, "Tags": tags} for kind in kinds] if kinds else tags


def network(cluster: str) -> tuple[str, str, dict[str, str]]:
    """VPC, subnet and the roles' security groups; also the gateways and the tables that belong to them."""
    ec2 = client("ec2")
    tags = lambda kind: tagged(cluster, "network", kind)  # noqa: E731
    vpc = ec2.create_vpc(CidrBlock="10.77.0.0/20", TagSpecifications=tags("vpc"))["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(
        VpcId=vpc, CidrBlock="10.77.0.0/20", AvailabilityZone="us-east-1a", TagSpecifications=tags("subnet")
    )["Subnet"]["SubnetId"]
    gateway = ec2.create_internet_gateway(TagSpecifications=tags("internet-gateway"))["InternetGateway"][
        "InternetGatewayId"
    ]
    ec2.attach_internet_gateway(InternetGatewayId=gateway, VpcId=vpc)
    table = ec2.create_route_table(VpcId=vpc, TagSpecifications=tags("route-table"))["RouteTable"]["RouteTableId"]
    ec2.associate_route_table(RouteTableId=table, SubnetId=subnet)
    ec2.create_vpc_endpoint(
        VpcId=vpc,
        VpcEndpointType="Gateway",
        ServiceName="com.amazonaws.us-east-1.s3",
        RouteTableIds=[table],
        TagSpecifications=tags("vpc-endpoint"),
    )
    groups = {
        role: ec2.create_security_group(
            GroupName=f"apex-{cluster}-{role}",
            Description=role,
            VpcId=vpc,
            TagSpecifications=tagged(cluster, role, "security-group"),
        )["GroupId"]
        for role in ROLES
    }
    for a, b in (("replay", "learner"), ("learner", "replay")):  # They name one another.
        rule = {"IpProtocol": "tcp", "FromPort": 52001, "ToPort": 52001, "UserIdGroupPairs": [{"GroupId": groups[b]}]}
        ec2.authorize_security_group_ingress(GroupId=groups[a], IpPermissions=[rule])
    return vpc, subnet, groups


def launch(cluster: str, num_hosts: int = 3, most: int = 6) -> None:
    """What deploy/terraform makes of it, and what its hosts then make: keys, log lines, weights."""
    ec2, iam, logs = client("ec2"), client("iam"), client("logs")
    _, subnet, groups = network(cluster)
    image = ec2.describe_images()["Images"][0]["ImageId"]
    told = f"#cloud-config\nAPEX_CLUSTER={cluster}\nAPEX_BUCKET={BUCKET}\nAPEX_MAX_HOURS=24\n"
    for role in ROLES:
        name = f"apex-{cluster}-{role}"
        iam.create_role(RoleName=name, AssumeRolePolicyDocument="{}", Tags=tagged(cluster, role))
        policy = {"Version": "2012-10-17", "Statement": [{"Effect": "Deny", "Action": "s3:*", "Resource": "*"}]}
        iam.put_role_policy(RoleName=name, PolicyName=role, PolicyDocument=json.dumps(policy))
        iam.create_instance_profile(InstanceProfileName=name, Tags=tagged(cluster, role))
        iam.add_role_to_instance_profile(InstanceProfileName=name, RoleName=name)
        logs.create_log_group(logGroupName=f"/apex/{cluster}/{role}")
    for role, kind in {"replay": "r7i.2xlarge", "learner": "g6.2xlarge", "evaluator": "c7i.xlarge"}.items():
        host = ec2.run_instances(
            ImageId=image,
            InstanceType=kind,
            MinCount=1,
            MaxCount=1,
            SubnetId=subnet,
            SecurityGroupIds=[groups[role]],
            UserData=told,
            BlockDeviceMappings=[{"DeviceName": "/dev/xvda", "Ebs": {"VolumeSize": 100, "DeleteOnTermination": True}}],
            TagSpecifications=tagged(cluster, role, "instance", "volume"),
        )["Instances"][0]["InstanceId"]
        tell(cluster, role, host)
    template = ec2.create_launch_template(
        LaunchTemplateName=f"apex-{cluster}-actors",
        TagSpecifications=tagged(cluster, "actor", "launch-template"),
        LaunchTemplateData={
            "ImageId": image,
            "InstanceType": "c7i.2xlarge",
            "SecurityGroupIds": [groups["actor"]],
            "TagSpecifications": tagged(cluster, "actor", "instance", "volume"),
        },
    )["LaunchTemplate"]["LaunchTemplateId"]
    client("autoscaling").create_auto_scaling_group(
        AutoScalingGroupName=f"apex-{cluster}-actors",
        MinSize=0,
        MaxSize=most,
        DesiredCapacity=num_hosts,
        VPCZoneIdentifier=subnet,
        LaunchTemplate={"LaunchTemplateId": template, "Version": "$Latest"},
        Tags=[{**tag, "PropagateAtLaunch": True} for tag in tagged(cluster, "actor")],
    )
    for host in actor_hosts(cluster):
        tell(cluster, "actor", host)
    client("s3").put_object(Bucket=BUCKET, Key=f"{cluster}/best/weights.safetensors", Body=b"x" * 2**20)


def tell(cluster: str, role: str, host: str) -> None:
    """A host's public key, and two lines of its log, a second after those of the host before it."""
    client("ssm").put_parameter(Name=f"/apex/{cluster}/keys/{role}/{host}", Value="0" * 64, Type="String")
    logs, group = client("logs"), f"/apex/{cluster}/{role}"
    logs.create_log_stream(logGroupName=group, logStreamName=host)
    now = int(time.time() * 1000) - 60_000 + 1000 * ROLES.index(role)
    events = [{"timestamp": now + 4000 * i, "message": f"{role} says {i}\x1b[2J"} for i in range(2)]
    logs.put_log_events(logGroupName=group, logStreamName=host, logEvents=events)


def actor_hosts(cluster: str) -> set[str]:
    name = f"apex-{cluster}-actors"
    groups = client("autoscaling").describe_auto_scaling_groups(AutoScalingGroupNames=[name])
    return {item["InstanceId"] for group in groups["AutoScalingGroups"] for item in group["Instances"]}


def inventory(cluster: str) -> list[str]:
    """All of a cluster that is there, found otherwise than `apex cluster` finds it: everything is asked for its tags.

    Not by describe_tags: the emulator never forgets the tags of what was removed.
    """
    ec2, iam = client("ec2"), client("iam")
    items = [
        (item[name], item)
        for key, name, operation in DESCRIBED
        for item in getattr(ec2, operation)()[key]
        if item.get("State") != "deleted"
    ]
    for reservation in ec2.describe_instances()["Reservations"]:
        items += [
            (item["InstanceId"], item) for item in reservation["Instances"] if item["State"]["Name"] != "terminated"
        ]
    groups = client("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"]
    items += [(item["AutoScalingGroupName"], item) for item in groups]
    for item in iam.list_roles()["Roles"]:
        items.append((f"role {item['RoleName']}", iam.get_role(RoleName=item["RoleName"])["Role"]))
    for item in iam.list_instance_profiles()["InstanceProfiles"]:
        name = item["InstanceProfileName"]
        items.append((f"profile {name}", iam.get_instance_profile(InstanceProfileName=name)["InstanceProfile"]))
    found = {
        name
        for name, item in items
        if {"Cluster": cluster}.items() <= {tag["Key"]: tag["Value"] for tag in item.get("Tags", [])}.items()
    }
    path = f"/apex/{cluster}/"
    pages = client("ssm").get_paginator("describe_parameters").paginate()
    found |= {item["Name"] for page in pages for item in page["Parameters"] if item["Name"].startswith(path)}
    logs = client("logs").describe_log_groups()["logGroups"]
    found |= {item["logGroupName"] for item in logs if item["logGroupName"].startswith(path)}
    return sorted(found)


def apex(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main([*words], open_aws=open_aws, ask=_nobody)
    out, err = capsys.readouterr()
    return status, out, err


def _nobody(question: str) -> str:
    raise EOFError


def listed(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    status, out, _ = apex(capsys, "list", "--json")
    assert status == 0
    return {item["name"]: item for item in json.loads(out)["clusters"]}


def test_two_clusters_from_launch_to_nothing(aws: None, capsys: pytest.CaptureFixture[str]) -> None:
    """One story, in the order in which an owner lives through it."""
    assert apex(capsys, "audit")[0] == 0
    launch("pong-1")
    launch("pong")
    other = inventory("pong-1")
    assert len(inventory("pong")) == len(other) == 38

    # Side by side, and nothing is wrong.
    clusters = listed(capsys)
    assert {name: cluster["problems"] for name, cluster in clusters.items()} == {"pong": [], "pong-1": []}
    assert clusters["pong"]["actors"]["in_service"] == 3
    # The emulator's hosts are all on demand.
    disks = sum(
        item["Size"]
        for item in client("ec2").describe_volumes(Filters=[{"Name": "tag:Cluster", "Values": ["pong"]}])["Volumes"]
    )
    public = sum(bool(host["public"]) for host in clusters["pong"]["hosts"])
    expected = 0.5292 + 0.9776 + 0.1785 + 3 * 0.357 + disks * 0.08 / 730 + 0.005 * public
    assert clusters["pong"]["usd_an_hour"] == pytest.approx(expected, abs=1e-3)
    _, table, _ = apex(capsys, "list")
    assert [line.split()[0] for line in table.splitlines()[:3]] == ["name", "pong", "pong-1"]
    assert "3 of 3, at most 6" in table

    # What they log, by time; the emulator's clock is this one.
    status, log, _ = apex(capsys, "tail", "pong", "--since", "1h")
    lines = log.splitlines()
    assert status == 0
    assert len(lines) == 12
    assert lines == sorted(lines, key=lambda line: line[:20])
    assert [line.split()[2] for line in lines[:2]] == ["replay", "learner"]
    assert "\x1b" not in log
    assert apex(capsys, "tail", "pong", "--since", "1s") == (0, "", "")
    only = apex(capsys, "tail", "pong", "--since", "1h", "--role", "actor")[1].splitlines()
    assert {line.split()[3] for line in only} == actor_hosts("pong")

    # More actors, as often as one likes, up to the bound.
    assert apex(capsys, "resize", "pong", "--actors", "5") == (0, "pong: 5 actor hosts wanted, 3 before\n", "")
    assert len(actor_hosts("pong")) == 5
    assert "as before" in apex(capsys, "resize", "pong", "--actors", "5")[1]
    status, _, err = apex(capsys, "resize", "pong", "--actors", "7")
    assert status == 2
    assert "set actor_hosts = 7 in terraform.tfvars" in err
    assert len(actor_hosts("pong-1")) == 3

    # A host goes, and its group replaces it.
    before = actor_hosts("pong")
    victim = sorted(before)[0]
    client("ec2").terminate_instances(InstanceIds=[victim])
    after = actor_hosts("pong")
    assert victim not in after
    assert len(after) == 5
    assert listed(capsys)["pong"]["problems"] == []

    # What has no replacement is missed.
    evaluator = next(host["id"] for host in listed(capsys)["pong"]["hosts"] if host["role"] == "evaluator")
    client("ec2").terminate_instances(InstanceIds=[evaluator])
    assert listed(capsys)["pong"]["problems"] == ["no evaluator"]

    # A learner that was done would be gone; one that is only off has what is nowhere else.
    learner = next(host["id"] for host in listed(capsys)["pong"]["hosts"] if host["role"] == "learner")
    client("ec2").stop_instances(InstanceIds=[learner])
    assert f"learner {learner} is stopped: its disk has what could not" in listed(capsys)["pong"]["problems"][1]
    bills = apex(capsys, "audit", "pong")[1]
    assert f"instance {learner} of pong: g6.2xlarge, stopped, and its disk has what could not be uploaded" in bills

    # It bills, and whoever asks is told; then it goes, and the other stays as it was.
    status, bills, _ = apex(capsys, "audit", "pong")
    assert status == 1
    assert f"weights s3://{BUCKET}/pong/: 1.0 MB with old versions, kept on purpose" in bills
    assert "pong-1" not in bills
    whole = inventory("pong")
    status, _, err = apex(capsys, "kill", "pong")
    assert (status, inventory("pong")) == (2, whole), "nobody typed its name"
    assert "--yes" in err
    status, said, err = apex(capsys, "kill", "pong", "--yes")
    assert status == 0, err
    assert f"the weights stay: s3://{BUCKET}/pong/" in said
    assert "terraform -chdir=deploy/terraform destroy" in said
    assert inventory("pong") == []
    assert inventory("pong-1") == other
    assert apex(capsys, "audit", "pong")[0] == 0
    status, said, _ = apex(capsys, "kill", "pong", "--yes")
    assert (status, said) == (0, "nothing of pong is in us-east-1; there is pong-1\n")
    status, _, err = apex(capsys, "resize", "pong", "--actors", "1")
    assert status == 2
    assert "there is no cluster 'pong' in us-east-1; there are pong-1" in err

    # And the other.
    assert apex(capsys, "audit")[0] == 1
    assert apex(capsys, "kill", "pong-1", "--yes")[0] == 0
    assert inventory("pong-1") == []
    status, said, _ = apex(capsys, "audit")
    assert status == 0
    assert "nothing in us-east-1 bills but what is kept on purpose" in said
    assert client("s3").list_objects_v2(Bucket=BUCKET)["KeyCount"] == 2


def test_a_half_made_cluster_is_seen_and_can_be_removed(aws: None, capsys: pytest.CaptureFixture[str]) -> None:
    """An apply that broke off, in a network with what Terraform's does not have, and a host's key without a host."""
    ec2 = client("ec2")
    _, subnet, _ = network("half")
    address = ec2.allocate_address(Domain="vpc", TagSpecifications=tagged("half", "network", "elastic-ip"))
    ec2.create_nat_gateway(
        SubnetId=subnet,
        AllocationId=address["AllocationId"],
        TagSpecifications=tagged("half", "network", "natgateway"),
    )
    ec2.create_network_interface(SubnetId=subnet, TagSpecifications=tagged("half", "actor", "network-interface"))
    ec2.create_volume(Size=10, AvailabilityZone="us-east-1a", TagSpecifications=tagged("half", "learner", "volume"))
    client("ssm").put_parameter(Name="/apex/half/keys/actor/i-0", Value="0" * 64, Type="String")
    client("cloudwatch").put_metric_alarm(
        AlarmName="apex-half-idle",
        MetricName="m",
        Namespace="n",
        Period=60,
        EvaluationPeriods=1,
        Threshold=1,
        ComparisonOperator="GreaterThanThreshold",
        Tags=tagged("half", "learner"),
    )
    assert "nothing runs: it is over, or half made" in listed(capsys)["half"]["problems"][0]
    status, bills, _ = apex(capsys, "audit", "half")
    assert status == 1
    assert {line.split()[0] for line in bills.splitlines()} >= {"volume", "address", "NAT"}
    assert apex(capsys, "kill", "half", "--yes")[0] == 0
    assert inventory("half") == []
    assert client("cloudwatch").describe_alarms()["MetricAlarms"] == []
    assert apex(capsys, "audit", "half")[0] == 0
