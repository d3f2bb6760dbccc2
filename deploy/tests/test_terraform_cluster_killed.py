"""A second cluster that Terraform made, as `apex cluster` sees and removes it, beside the first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import emulator
import pytest
from conftest import ADMINS, NAME, Cluster
from terraform_program import Terraform

from apex.cluster import main

OTHER = f"{NAME}-b"


def listed(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()  # what was said before
    assert main(["list", "--json"]) == 0
    return {item["name"]: item for item in json.loads(capsys.readouterr().out)["clusters"]}


@pytest.mark.timeout(600)  # beside the cluster that all tests share, the time of another
def test_what_terraform_made_is_listed_and_removed_and_its_destroy_then_ends_well(
    cluster: Cluster,
    installed: tuple[dict[str, str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings, data = installed
    words = emulator.environment(cluster.endpoint)
    for name, value in words.items():
        monkeypatch.setenv(name, value)
    terraform = Terraform(tmp_path / "other", {**settings, **words}, data)
    # On demand, as all of the emulator's hosts are; and it keeps one scheduled action of a name, whatever its group.
    terraform.set(
        name=OTHER,
        admin_cidrs=sorted(ADMINS),
        bucket=emulator.BUCKET,
        actor_hosts=2,
        spot=False,
        end_schedule=False,
    )
    terraform.run("apply", "-auto-approve", "-input=false", "-no-color")

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
