"""The configuration alone: its validation, what it refuses before any request to AWS, and the bucket."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import emulator
from setting_kinds import FILE, as_json
from terraform_program import CLUSTER, ROOT, Terraform


def test_the_tests_of_terraform_pass(installed: tuple[dict[str, str], Path], tmp_path: Path) -> None:
    settings, data = installed
    nothing = {**settings, **emulator.environment("http://127.0.0.1:9")}
    output = Terraform(tmp_path / "module", nothing, data, source=ROOT / CLUSTER).run("test").stdout
    assert output.splitlines()[-1].startswith("Success!"), output


def test_settings_json_has_the_settings_of_the_package() -> None:
    assert FILE.read_text() == as_json(), "run deploy/tests/setting_kinds.py"


WRONG = {
    "settings": {
        "actor": {"num_actors": 8},
        "learner": {"batch_sizee": 512, "optimizer": "1e5", "batch_size": "2.5"},
        "network": {"dueling": "True"},
        "transport": {"control_port": 1},
    },
    "availability_zone": "us-east-1z",
    "actor_instance_types": ["t3.nano", "c7gn.4xlarge"],
    "learner_instance_types": ["g6.2xlarge", "c7i.4xlarge"],
    "replay_host": "own",
    "replay_instance_type": "t3.medium",
    "num_actors": 3,
    "ssh_key_name": "nobody-has-made-it",
    "instance_profiles": {"evaluator": "nobody-has-made-it"},
    "bucket": "apex-test-elsewhere",
}
REFUSALS = (
    "settings: actor.num_actors = 8 is not a setting; learner.batch_size = 2.5 must be int; learner.batch_sizee = 512",
    "learner.optimizer = 1e5 must be rmsprop|adam; network.dueling = True must be true|false; transport.control_port",
    "actor and evaluator and learner and replay: no instance type of this kind is offered in us-east-1z",
    "actor_instance_types must all have the same number of cores",
    "An actor host needs about 1344 MiB of memory for 32 streams, but the smallest of actor_instance_types has 512 MiB",
    "learner_instance_types must have an NVIDIA GPU, as g6.2xlarge has. Without one: c7i.4xlarge.",
    "a host with 5723 MiB of memory, but the host of the replay server has 4096 MiB",
    "num_actors = 3, but 3 actor hosts run 96 actors",
    "data.aws_key_pair.ssh",
    'data.aws_iam_instance_profile.given["evaluator"]',
    "The bucket apex-test-elsewhere is not in us-east-1.",
    "x86-64 instance types, such as c7i.2xlarge. Others: c7gn.4xlarge.",
)


def test_wrong_values_are_refused_at_plan(configured: Terraform, endpoint: str, tmp_path: Path) -> None:
    s3 = emulator.client("s3", endpoint, "eu-west-1")
    s3.create_bucket(Bucket=WRONG["bucket"], CreateBucketConfiguration={"LocationConstraint": "eu-west-1"})
    wrong = configured.copy(tmp_path / "wrong")
    wrong.set(**{"name": "wrong", "admin_cidrs": ["203.0.113.7/32"], **WRONG})
    error = wrong.refusal("plan")
    assert [refusal for refusal in REFUSALS if refusal not in error] == [], error


def test_a_missing_image_is_refused_with_the_command_that_builds_it(configured: Terraform) -> None:
    error = configured.refusal("plan", "-var=image_commit=deadbee")
    for kind in ("cpu", "gpu"):
        assert (
            f"no {kind} image of commit deadbee in us-east-1. Build both images of this commit there with pack" in error
        )


def test_a_missing_bucket_is_refused_at_plan(configured: Terraform) -> None:
    options = ("-target=module.cluster.data.aws_s3_bucket.checkpoints", "-var=bucket=nobody-has-made-it")
    assert "nobody-has-made-it" in configured.refusal("plan", *options)


def test_the_bucket_is_made_once_and_resists_destroy(
    new_terraform: Callable[..., Terraform], endpoint: str, tmp_path: Path
) -> None:
    bucket = new_terraform(tmp_path / "bucket", source=ROOT / "bucket")
    bucket.set(bucket="apex-weights-of-mine")
    parts = ("public_access_block", "versioning", "server_side_encryption_configuration", "policy")
    names = {"policy": "tls_only"}  # all but the lifecycle rules, for which the provider waits a minute
    targets = [f"-target=aws_s3_bucket_{part}.{names.get(part, 'checkpoints')}" for part in parts]
    bucket.run("apply", "-auto-approve", *targets)
    assert "prevent_destroy" in bucket.refusal("destroy", "-auto-approve")
    versioning = emulator.client("s3", endpoint).get_bucket_versioning(Bucket="apex-weights-of-mine")
    assert versioning["Status"] == "Enabled"
