"""The mirror of a cluster's run: objects in the cluster's bucket, s3://BUCKET/CLUSTER/.

Does not use fsspec: a host of a cluster may not delete objects, and may list only those of its cluster.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from apex.cloud.host.settings import HostSettings
from apex.runs.mirror.mirror import GROWING, THREADS, Mirror

# Tags for the lifecycle rules of deploy/terraform/bucket.
EXPIRES = {"Key": "Kind", "Value": "checkpoint"}  # The bucket deletes the object after some days.
REPLACED_OFTEN = "Kind=curve"  # The bucket deletes old versions of the object after a day.
SENT = "sent.json"  # file in HOME: the state of the mirror


class BucketObjects:
    """The objects of one cluster in its bucket: see `apex.runs.mirror.objects.Objects`."""

    def __init__(self, s3: Any, bucket: str, cluster: str) -> None:
        self._s3 = s3
        self._bucket = bucket
        self._cluster = cluster

    def __str__(self) -> str:
        return f"s3://{self._bucket}/{self._cluster}"

    def names(self) -> list[str]:
        """See `Objects`."""
        prefix = self._key("")
        pages = self._s3.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=prefix)
        return [item["Key"].removeprefix(prefix) for page in pages for item in page.get("Contents", [])]

    def has(self, name: str) -> bool:
        """See `Objects`. Lists, because S3 answers "forbidden" for a missing object to a host that may not list all."""
        key = self._key(name)
        found = self._s3.list_objects_v2(Bucket=self._bucket, Prefix=key, MaxKeys=1).get("Contents", [])
        return any(item["Key"] == key for item in found)

    def read(self, name: str) -> bytes:
        """See `Objects`."""
        return bytes(self._s3.get_object(Bucket=self._bucket, Key=self._key(name))["Body"].read())

    def write(self, name: str, data: bytes) -> None:
        """See `Objects`."""
        self._s3.put_object(Bucket=self._bucket, Key=self._key(name), Body=data)

    def upload(self, path: Path, name: str) -> None:
        """See `Objects`."""
        extra = {"Tagging": REPLACED_OFTEN} if name.startswith(GROWING) else None
        self._s3.upload_file(str(path), self._bucket, self._key(name), ExtraArgs=extra)

    def download(self, name: str, path: Path) -> None:
        """See `Objects`."""
        self._s3.download_file(self._bucket, self._key(name), str(path))

    def delete(self, names: list[str]) -> None:
        """See `Objects`. The bucket deletes objects with the tag by age."""
        with ThreadPoolExecutor(THREADS) as pool:  # A new host names all checkpoints that the bucket still has.
            list(pool.map(self._expire, names))

    def _expire(self, name: str) -> None:
        self._s3.put_object_tagging(Bucket=self._bucket, Key=self._key(name), Tagging={"TagSet": [EXPIRES]})

    def _key(self, name: str) -> str:
        return f"{self._cluster}/{name}"


def run_mirror(s3: Any, settings: HostSettings) -> Mirror:
    """Returns the mirror of the cluster's run on this host."""
    return Mirror(BucketObjects(s3, settings.bucket, settings.cluster), settings.run, settings.home / SENT)
