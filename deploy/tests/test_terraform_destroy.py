"""What destroy leaves. Stands last among those that need the cluster up; first boot looks at its plan alone."""

from __future__ import annotations

import emulator
from conftest import NAME, Cluster


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
    gone = {
        instance["InstanceId"]
        for page in ec2.get_paginator("describe_instances").paginate()
        for reservation in page["Reservations"]
        for instance in reservation["Instances"]
        if instance["State"]["Name"] == "terminated"
    }
    only = [{"Name": "key", "Values": ["Cluster"]}, {"Name": "value", "Values": [NAME]}]
    found = {
        tag["ResourceId"] for page in ec2.get_paginator("describe_tags").paginate(Filters=only) for tag in page["Tags"]
    }
    tagging = emulator.client("resourcegroupstaggingapi", endpoint)
    pages = tagging.get_paginator("get_resources").paginate(TagFilters=[{"Key": "Cluster", "Values": [NAME]}])
    found |= {item["ResourceARN"].rpartition("/")[2] for page in pages for item in page["ResourceTagMappingList"]}
    iam = emulator.client("iam", endpoint)
    found |= {role["RoleName"] for role in iam.list_roles()["Roles"] if NAME in role["RoleName"]}
    profiles = iam.list_instance_profiles()["InstanceProfiles"]
    found |= {profile["InstanceProfileName"] for profile in profiles if NAME in profile["InstanceProfileName"]}
    groups = emulator.client("autoscaling", endpoint).describe_auto_scaling_groups()["AutoScalingGroups"]
    found |= {group["AutoScalingGroupName"] for group in groups if NAME in group["AutoScalingGroupName"]}
    logs = emulator.client("logs", endpoint).describe_log_groups(logGroupNamePrefix=f"/apex/{NAME}/")["logGroups"]
    found |= {group["logGroupName"] for group in logs}
    return sorted(found - gone)
