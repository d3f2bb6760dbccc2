"""What would still bill: of one cluster, or of all that was made for any. Weights and images are kept on purpose."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from apex.cloud.cluster.aws import PROJECT, Aws, AwsError, NotReachedError, only, plural, tags
from apex.cloud.cluster.inventory import GONE
from apex.cloud.cluster.prices import HOURS, Prices

GIB = 2**30


class Finding(NamedTuple):
    """A thing that costs money, or will."""

    kind: str
    name: str
    cluster: str  # "" for what no cluster owns
    detail: str
    hour: float | None  # US dollars; None for what the table of prices lacks
    kept: bool = False  # on purpose


class Audit(NamedTuple):
    """What was found, and where nobody could look."""

    findings: list[Finding]
    blind: list[str]

    @property
    def is_clean(self) -> bool:
        """Whether nothing bills but what is kept on purpose, as far as everything could be looked at."""
        return not self.blind and all(finding.kept for finding in self.findings)


class Auditor:
    """Looks in one region. Buckets are looked at where they are tagged, and where they are named in `buckets`."""

    def __init__(self, aws: Aws, prices: Prices, cluster: str | None, buckets: Sequence[str] = ()) -> None:
        self._aws = aws
        self._prices = prices
        self._cluster = cluster
        self._buckets = buckets
        self._only = only(cluster)

    def run(self) -> Audit:
        """Looks at each kind, also when another cannot be looked at."""
        looks: dict[str, Callable[[], Iterator[Finding]]] = {
            "auto-scaling groups": self._groups,
            "instances": self._instances,
            "volumes": self._volumes,
            "addresses": self._addresses,
            "NAT gateways": self._nat_gateways,
            "endpoints": self._endpoints,
            "log groups": self._log_groups,
            "images and snapshots": self._images,
            "buckets": self._weights,
        }
        findings: list[Finding] = []
        blind: list[str] = []
        for what, find in looks.items():
            try:
                findings += find()
            except NotReachedError:
                raise
            except AwsError as error:
                blind.append(f"{what} were not looked at: {error}")
        return Audit(findings, blind)

    def _groups(self) -> Iterator[Finding]:
        pages = self._aws.pages("autoscaling", "describe_auto_scaling_groups", "AutoScalingGroups", Filters=self._only)
        for item in pages:
            if item["DesiredCapacity"]:
                detail = f"starts instances until there are {item['DesiredCapacity']}"
                yield Finding("group", item["AutoScalingGroupName"], _owner(item), detail, 0.0)

    def _instances(self) -> Iterator[Finding]:
        for reservation in self._aws.pages("ec2", "describe_instances", "Reservations", Filters=self._only):
            for item in reservation["Instances"]:
                state = item["State"]["Name"]
                if state in GONE:
                    continue
                spot = item.get("InstanceLifecycle") == "spot"
                hour = self._prices.host(item["InstanceType"], spot=spot, public=bool(item.get("PublicIpAddress")))
                detail = f"{item['InstanceType']}{', spot' if spot else ''}, {state}"
                if state == "stopped":  # Its volumes bill on.
                    hour = 0.0
                    if tags(item).get("Role") == "learner":
                        detail += ", and its disk has what could not be uploaded: start it again"
                yield Finding("instance", item["InstanceId"], _owner(item), detail, hour)

    def _volumes(self) -> Iterator[Finding]:
        for item in self._aws.pages("ec2", "describe_volumes", "Volumes", Filters=self._only):
            if item["State"] not in ("deleting", "deleted"):
                hour = item["Size"] * self._prices.disk_gb_month / HOURS
                yield Finding("volume", item["VolumeId"], _owner(item), f"{item['Size']} GB, {item['State']}", hour)

    def _addresses(self) -> Iterator[Finding]:
        for item in self._aws.call("ec2", "describe_addresses", Filters=self._only)["Addresses"]:
            yield Finding("address", item["PublicIp"], _owner(item), "", self._prices.address_hour)

    def _nat_gateways(self) -> Iterator[Finding]:
        for item in self._aws.pages("ec2", "describe_nat_gateways", "NatGateways", Filter=self._only):
            if item["State"] in ("pending", "available"):
                yield Finding(
                    "NAT gateway", item["NatGatewayId"], _owner(item), item["State"], self._prices.nat_gateway_hour
                )

    def _endpoints(self) -> Iterator[Finding]:
        for item in self._aws.pages("ec2", "describe_vpc_endpoints", "VpcEndpoints", Filters=self._only):
            if item["VpcEndpointType"] != "Gateway" and item["State"].lower() not in ("deleting", "deleted"):
                hour = self._prices.endpoint_hour * max(1, len(item.get("SubnetIds", [])))
                yield Finding("endpoint", item["VpcEndpointId"], _owner(item), item["ServiceName"], hour)

    def _log_groups(self) -> Iterator[Finding]:
        prefix = f"/apex/{self._cluster}/" if self._cluster else "/apex/"
        for item in self._aws.pages("logs", "describe_log_groups", "logGroups", logGroupNamePrefix=prefix):
            size = item.get("storedBytes", 0)
            hour = size / GIB * self._prices.log_gb_month / HOURS
            name = item["logGroupName"]
            yield Finding("log group", name, name.split("/")[2], _size(size), hour)

    def _images(self) -> Iterator[Finding]:
        """New clusters are started from images, which bill by their snapshots; other snapshots serve nothing."""
        owners = ["self"]
        of_images = set()
        for item in self._aws.pages("ec2", "describe_images", "Images", Owners=owners, Filters=self._only):
            disks = [disk["Ebs"] for disk in item.get("BlockDeviceMappings", []) if "Ebs" in disk]
            of_images |= {disk.get("SnapshotId") for disk in disks}
            size = sum(disk.get("VolumeSize", 0) for disk in disks)
            hour = size * self._prices.snapshot_gb_month / HOURS
            detail = f"{item.get('Name', '')}, at most {size} GB of snapshots"
            yield Finding("image", item["ImageId"], _owner(item), detail, hour, kept=True)
        pages = self._aws.pages("ec2", "describe_snapshots", "Snapshots", OwnerIds=owners, Filters=self._only)
        for item in pages:
            if item["SnapshotId"] not in of_images:
                hour = item["VolumeSize"] * self._prices.snapshot_gb_month / HOURS
                detail = f"at most {item['VolumeSize']} GB, of no image"
                yield Finding("snapshot", item["SnapshotId"], _owner(item), detail, hour)

    def _weights(self) -> Iterator[Finding]:
        """By cluster: the first part of a file's path. Older versions of files bill as newer ones do."""
        tagged = self._aws.pages(
            "resourcegroupstaggingapi",
            "get_resources",
            "ResourceTagMappingList",
            ResourceTypeFilters=["s3"],
            TagFilters=[{"Key": "Project", "Values": [PROJECT]}],
        )
        names = dict.fromkeys([*(item["ResourceARN"].rpartition(":")[2] for item in tagged), *self._buckets])
        for bucket in names:
            sizes: dict[str, int] = {}
            prefix = f"{self._cluster}/" if self._cluster else ""
            pages = self._aws.pages("s3", "list_object_versions", "Versions", Bucket=bucket, Prefix=prefix)
            for item in pages:
                owner, slash, _ = item["Key"].partition("/")
                folder = owner + slash
                sizes[folder] = sizes.get(folder, 0) + item["Size"]
            for folder, size in sizes.items():
                hour = size / GIB * self._prices.bucket_gb_month / HOURS
                yield Finding(
                    "weights",
                    f"s3://{bucket}/{folder}",
                    folder.rstrip("/"),
                    f"{_size(size)} with old versions",
                    hour,
                    True,
                )


def show(audit: Audit, prices: Prices, where: str) -> str:
    """A line for each finding, what bills first; then the sums."""
    bills = [finding for finding in audit.findings if not finding.kept]
    kept = [finding for finding in audit.findings if finding.kept]
    lines = [_line(finding) for finding in bills]
    lines += [f"{_line(finding)}, kept on purpose" for finding in kept]
    lines += audit.blind
    if bills:
        unpriced = sorted({finding.detail.split(",")[0] for finding in bills if finding.hour is None})
        more = f", and what {', '.join(unpriced)} cost, of which the table has no price" if unpriced else ""
        lines.append(f"{plural(len(bills), 'thing')} {where} would bill: {_sum(bills)}{more}")
    elif not audit.blind:
        lines.append(f"nothing {where} bills" + (" but what is kept on purpose" if kept else ""))
    if kept:
        lines.append(f"kept on purpose: {_sum(kept)}")
    return "\n".join([*lines, f"({prices.source()})"])


def _line(finding: Finding) -> str:
    words = [finding.kind, finding.name]
    if finding.cluster and finding.kind != "weights":
        words.append(f"of {finding.cluster}")
    return " ".join(words) + (f": {finding.detail}" if finding.detail else "")


def _sum(findings: Sequence[Finding]) -> str:
    hour = sum(finding.hour or 0.0 for finding in findings)
    return f"about {hour:.2f} USD an hour, {hour * HOURS:.2f} USD a month"


def _owner(item: dict[str, object]) -> str:
    return tags(item).get("Cluster", "")


def _size(num_bytes: int) -> str:
    for unit, size in (("GB", GIB), ("MB", 2**20)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"
