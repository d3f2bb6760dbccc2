"""A run without progress: its learner's host is replaced once, then the cluster ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.exceptions import ClientError
from msgspec import to_builtins
from test_host import BEGUN, hosts_of, launch, machine, metadata_service, replace_program

from apex.cloud.host import command as host_command
from apex.cloud.host import stall
from apex.cloud.host.settings import HostSettings
from apex.facts import INTERRUPTED, EndReason
from apexreplay.errors import FINISHED
from apexreplay.files.atomic_files import seal
from apexreplay.process.lifecycle import Stop

LIMIT = 3_600.0
END = "start --no-block apex-end.service"


class Cluster:
    """A cluster in the emulated AWS whose hosts check their progress at the times of `clock`."""

    def __init__(self, aws: Callable[[str], Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        aws("s3").create_bucket(Bucket="weights")
        launch()
        self.client, self.clock = aws, 60.0
        monkeypatch.setenv("RUNTIME_DIRECTORY", str(folder))
        self._folder, self._record = folder, replace_program(monkeypatch, folder, "systemctl", "")
        monkeypatch.setattr(stall, "time", SimpleNamespace(monotonic=lambda: self.clock))

    def learner(self, name: str, begun: str = BEGUN) -> HostSettings:
        """Returns the settings of a learner's host, which is the one that its group has now."""
        return machine(self._folder, "learner", "replay", name=name, begun=begun)

    @property
    def record(self) -> Path:
        """The record of the host, which is lost when it boots."""
        return self._folder / stall.RECORD

    @property
    def host(self) -> str:
        (host,) = hosts_of("learner")
        return host

    def check(self, settings: HostSettings, after: float = 0.0) -> str:
        """Checks after this number of seconds; returns "Healthy", "Unhealthy" or END."""
        self.clock += after
        with metadata_service(own=self.host) as metadata:
            assert host_command.check_stall(settings, self.client, metadata, Stop()) == FINISHED
        if self._record.exists():
            return self._record.read_text().strip()
        state = self.client("autoscaling").describe_auto_scaling_instances(InstanceIds=[self.host])
        return str(state["AutoScalingInstances"][0]["HealthStatus"]).capitalize()

    def replace(self) -> None:
        """Does what the group does with an unhealthy host. The next one has just booted."""
        self.client("ec2").terminate_instances(InstanceIds=[self.host])
        self.record.unlink()
        self.clock = 60.0


@pytest.fixture
def cluster(aws: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(aws, tmp_path, monkeypatch)


def save(settings: HostSettings, update: int) -> None:
    """Makes a checkpoint."""
    path = settings.run / f"checkpoints/{update:09d}"
    path.mkdir(parents=True)
    (path / "manifest.json").write_text("{}")


def test_a_learner_that_never_starts_is_replaced_once_and_then_ends(cluster: Cluster) -> None:
    first = cluster.learner("first")
    assert [cluster.check(first, after) for after in (0, LIMIT - 1, 1)] == ["Healthy", "Healthy", "Unhealthy"]
    # Until the group has replaced it, a minute or two.
    assert cluster.check(first, 60) == "Unhealthy"
    cluster.replace()
    second = cluster.learner("second")
    assert [cluster.check(second, after) for after in (0, LIMIT - 1, 1)] == ["Healthy", "Healthy", END]


def test_a_run_with_updates_goes_on(cluster: Cluster) -> None:
    learner = cluster.learner("first")
    for update in range(0, 1_000, 100):
        save(learner, update)
        assert cluster.check(learner, LIMIT - 1) == "Healthy"


def test_a_host_may_be_replaced_again_after_an_update(cluster: Cluster) -> None:
    """The second host restores update 1 and makes update 2; the third one restores that and makes none."""
    answers = []
    for name, updates in (("first", (1,)), ("second", (1, 2)), ("third", (2,))):
        learner = cluster.learner(name)
        for update in updates:
            save(learner, update)
            cluster.check(learner, 60)
        answers.append(cluster.check(learner, LIMIT))
        cluster.replace()
    assert answers == ["Unhealthy", "Unhealthy", END]


def test_a_host_that_its_group_does_not_replace_ends_after_twice_the_time(cluster: Cluster) -> None:
    learner = cluster.learner("first")
    assert [cluster.check(learner, after) for after in (0, LIMIT, LIMIT - 1, 1)] == ["Healthy", *2 * ["Unhealthy"], END]


def test_a_host_without_its_bucket_ends_after_twice_the_time(cluster: Cluster) -> None:
    learner = cluster.learner("first")
    cluster.check(learner)
    cluster.client("s3").delete_bucket(Bucket="weights")
    with pytest.raises(ClientError, match="bucket"):
        cluster.check(learner, LIMIT)
    assert cluster.check(learner, LIMIT) == END


def test_a_mark_of_an_earlier_cluster_of_this_name_does_not_count(cluster: Cluster) -> None:
    for begun in ("2025-01-02T03:04:05Z", BEGUN):
        learner = cluster.learner(begun[:4], begun)
        cluster.check(learner)
        assert cluster.check(learner, LIMIT) == "Unhealthy"
        cluster.replace()


def test_a_host_that_has_rebooted_counts_from_its_boot(cluster: Cluster) -> None:
    learner = cluster.learner("first")
    cluster.check(learner, LIMIT)
    cluster.clock = 60.0
    cluster.record.unlink()
    assert [cluster.check(learner, after) for after in (0, LIMIT - 1, 1)] == ["Healthy", "Healthy", "Unhealthy"]


def test_a_stall_of_0_minutes_means_never(cluster: Cluster) -> None:
    learner = dataclasses.replace(cluster.learner("first"), stall_minutes=0)
    assert [cluster.check(learner, after) for after in (0, 100 * LIMIT)] == ["Healthy", "Healthy"]


@pytest.mark.parametrize(("end", "answer"), [(EndReason("updates", 9), "Healthy"), (INTERRUPTED, "Unhealthy")])
def test_a_run_that_waits_for_its_last_evaluation_goes_on(cluster: Cluster, end: EndReason, answer: str) -> None:
    learner = cluster.learner("first")
    save(learner, 9)
    cluster.check(learner)
    (learner.run / "end.json").write_bytes(seal(to_builtins(end)))
    assert cluster.check(learner, LIMIT) == answer


def test_the_record_is_not_on_a_disk() -> None:
    """A disk that fills after a checkpoint would hide the stall."""
    unit = (Path(__file__).parents[1] / "units/apex-stall.service").read_text()
    assert "\nRuntimeDirectory=apex-stall\nRuntimeDirectoryPreserve=yes\n" in unit
