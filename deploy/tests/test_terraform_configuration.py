"""The configuration alone: its validation, what it refuses before any request to AWS, and the bucket."""

from __future__ import annotations

from pathlib import Path

import emulator
from conftest import Planned
from terraform_program import ROOT, Terraform

Installed = tuple[dict[str, str], Path]


def test_the_tests_of_terraform_pass(installed: Installed, tmp_path: Path) -> None:
    settings, data = installed
    terraform = Terraform(tmp_path / "copy", {**settings, **emulator.environment("http://127.0.0.1:9")}, data)
    terraform.run("validate")
    output = terraform.run("test").stdout
    assert output.splitlines()[-1].startswith("Success!"), output


def test_a_missing_bucket_is_refused_at_plan(planned: Planned) -> None:
    options = ("-target=data.aws_s3_bucket.checkpoints", "-var=bucket=nobody-has-made-it")
    done = planned.terraform.run("plan", *options, may_fail=True)
    assert done.returncode == 1
    assert "nobody-has-made-it" in done.stderr


def test_the_bucket_is_made_once_and_resists_destroy(installed: Installed, endpoint: str, tmp_path: Path) -> None:
    settings, data = installed
    environment = {**settings, **emulator.environment(endpoint)}
    bucket = Terraform(tmp_path / "bucket", environment, data, source=ROOT / "bucket")
    bucket.set(bucket="apex-weights-of-mine")
    parts = ("public_access_block", "versioning", "server_side_encryption_configuration", "policy")
    names = {"policy": "tls_only"}  # all but the lifecycle rules, for which the provider waits a minute
    targets = [f"-target=aws_s3_bucket_{part}.{names.get(part, 'checkpoints')}" for part in parts]
    bucket.run("validate")
    bucket.run("apply", "-auto-approve", *targets)
    done = bucket.run("destroy", "-auto-approve", may_fail=True)
    assert done.returncode == 1
    assert "prevent_destroy" in done.stderr
    versioning = emulator.client("s3", endpoint).get_bucket_versioning(Bucket="apex-weights-of-mine")
    assert versioning["Status"] == "Enabled"
