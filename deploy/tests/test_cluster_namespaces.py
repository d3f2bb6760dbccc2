"""The cluster that Terraform applies, run: every instance is a machine in namespaces, with its address and its groups.

The hosts boot from their user data and run the units' own commands, from making keys to the learner's end. One run is
told, with a host that dies and another that is cut off; each test is a claim about it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import emulator
import namespaces
import pytest
from namespaced_cluster import NamespacedCluster
from namespaced_run import ADMIN, SOCKETS, SSH, STRANGER, TENSORBOARD, Told, tell
from rules import BOUND_BY, MAY_REACH
from terraform_program import Terraform

from apex.config import Config, TransportConfig, flatten
from apex.presets import PRESETS

NAME = "cartpole-1"
NUM_ACTORS, PER_HOST = 12, 4  # 3 hosts of 2 cores with 2 streams each
HEIRLESS_SECONDS = 30.0
NO_KNOBS = ("environment.id", "actor.num_actors")  # variables of their own

pytestmark = pytest.mark.skipif(bool(namespaces.missing()), reason=namespaces.missing())


def knobs() -> dict[str, dict[str, Any]]:
    """The preset as the variable `settings` has it: what differs from the defaults."""
    default, settings = flatten(Config()), {}
    for name, value in flatten(PRESETS["cartpole"].config).items():
        section, _, knob = name.partition(".")
        if value != default[name] and name not in NO_KNOBS:
            settings.setdefault(section, {})[knob] = value
    return settings


@pytest.fixture(scope="module")
def applied(scratch: Path, installed: tuple[dict[str, str], Path], endpoint: str) -> str:
    """The AWS, with the cluster."""
    settings, data = installed
    terraform = Terraform(scratch / "cartpole", {**settings, **emulator.environment(endpoint)}, data)
    terraform.set(
        name=NAME,
        admin_cidrs=[f"{ADMIN}/32"],
        bucket=emulator.BUCKET,
        environment="CartPole-v1",
        settings=knobs(),
        actor_instance_types=["c7i.large"],
        streams_per_core=2,
    )
    terraform.run("apply", "-auto-approve", "-input=false", "-no-color")
    return endpoint


@pytest.fixture(scope="module")
def told(applied: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    """The whole run. Every wait has a deadline, and whatever happens every machine ends."""
    cluster = NamespacedCluster(applied, tmp_path_factory.mktemp("hosts"))
    try:
        yield tell(cluster, emulator.client("ssm", applied), NAME)
    except BaseException:
        print(cluster.said())
        raise
    finally:
        cluster.close()


def test_it(told: Told) -> None:
    print(told)
