"""One emulated AWS with one cluster for all tests, which make changes in copies only."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import boto3
import emulator
import pytest
from moto import mock_aws
from terraform_program import Plan, Terraform, install

NAME = "pong-1"
ADMINS = {"203.0.113.7/32", "198.51.100.0/24"}


class Cluster(NamedTuple):
    """A cluster that was applied, which takes a minute."""

    terraform: Terraform
    endpoint: str
    first_plan: Plan


aws_client = cache(partial(boto3.client, region_name=emulator.REGION))  # A client takes long to create.


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Returns clients of an empty AWS inside this process."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "emulated")
    with mock_aws():
        yield aws_client


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("terraform")


@pytest.fixture(scope="session")
def installed(scratch: Path) -> tuple[dict[str, str], Path]:
    """Terraform's environment, and its folder with the provider."""
    assert shutil.which("terraform"), "these tests need terraform: deploy/test.sh leaves them out where there is none"
    data = Path(os.environ.get("APEX_TF_DATA", scratch / "data"))
    return install(data, scratch), data


@pytest.fixture(scope="session")
def endpoint() -> Iterator[str]:
    with emulator.emulated_aws() as endpoint:
        emulator.furnish(endpoint)
        yield endpoint


@pytest.fixture(scope="session")
def new_terraform(installed: tuple[dict[str, str], Path], endpoint: str) -> Callable[..., Terraform]:
    """Returns a function that copies a configuration, whose AWS is the emulator, into a folder."""
    settings, data = installed
    return partial(Terraform, environment={**settings, **emulator.environment(endpoint)}, data=data)


@pytest.fixture(scope="session")
def configured(scratch: Path, new_terraform: Callable[..., Terraform]) -> Terraform:
    """The variables of the cluster, which tests change in copies only."""
    terraform = new_terraform(scratch / "cluster")
    terraform.set(
        name=NAME,
        admin_cidrs=sorted(ADMINS),
        bucket=emulator.BUCKET,
        environment="ALE/Breakout-v5",
        settings={
            "learner": {"batch_size": 256, "optimizer": "adam", "learning_rate": 0.0001},
            "run": {"stop_score": 18},
        },
    )
    return terraform


@pytest.fixture(scope="session")
def cluster(configured: Terraform, endpoint: str) -> Cluster:
    """Applied once. The learner's first type has no capacity."""
    first_plan = configured.plan()
    if keep := os.environ.get("APEX_KEEP_PLAN"):  # for checkov
        Path(keep).write_text(json.dumps(first_plan))
    emulator.NO_CAPACITY.add(("g6.2xlarge", "us-east-1a"))
    configured.run("apply", "test.tfplan")
    return Cluster(configured, endpoint, first_plan)
