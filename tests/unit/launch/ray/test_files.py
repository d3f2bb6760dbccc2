"""The files of deploy/ray, as far as they can be checked without a cloud."""

from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml", reason="needs PyYAML, which Ray brings")
ROOT = Path(__file__).parents[4]
FILES = ROOT / "deploy" / "ray"
(RAY,) = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("ray==")]


@pytest.mark.parametrize("name", ["local.yaml", "aws.yaml"])
def test_ray_takes_a_file_for_ray_up(name):
    util = pytest.importorskip("ray.autoscaler._private.util", reason="needs Ray")
    config = util.prepare_config(yaml.safe_load((FILES / name).read_text()))
    util.validate_config(config)
    # Ray's own commands would install packages with the system's pip, which Ubuntu 24.04 refuses.
    assert not [
        command for command in config["head_setup_commands"] + config["worker_setup_commands"] if "pip" in command
    ]
    commands = "\n".join(config["head_start_ray_commands"] + config["worker_start_ray_commands"])
    assert commands.count("RAY_AUTH_MODE=token") == 2
    assert commands.count("--object-store-memory") == 2


def test_a_file_for_aws_uses_what_is_in_the_image():
    config = yaml.safe_load((FILES / "aws.yaml").read_text())
    install = (ROOT / "deploy" / "packer" / "install.sh").read_text()
    (home,) = [line.partition("=")[2] for line in install.splitlines() if line.startswith("home=")]
    assert 'deploy/install.sh" "$home/venv"' in install  # makes the virtual environment there
    assert '"${python[@]}" packages aws,ray\n' in install
    commands = " ".join(config["head_start_ray_commands"] + config["worker_start_ray_commands"]).split()
    assert {word for word in commands if word.endswith("/ray")} == {f"{home}/venv/bin/ray"}
    unit = config["setup_commands"][-1].split()[-1]
    assert (ROOT / "deploy/units" / f"{unit.partition('@')[0]}@.service").exists()


def test_a_rayjob_has_a_token_and_a_folder_for_runs_in_every_container():
    job = yaml.safe_load((FILES / "rayjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert job["spec"]["entrypoint"].startswith("apex train --engine ray ")
    assert " --device cuda " in job["spec"]["entrypoint"]  # never on the CPU of a GPU's node
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert f"ray=={cluster['rayVersion']}" == RAY  # The operator refuses authOptions without a version.
    workers = cluster["workerGroupSpecs"]
    assert not any(
        key in group for group in workers for key in ("minReplicas", "maxReplicas")
    )  # There is no autoscaler.
    pods = [group["template"]["spec"] for group in (cluster["headGroupSpec"], *workers)]
    for pod in pods:
        (container,) = pod["containers"]
        mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert set(mounted) == {volume["name"] for volume in pod["volumes"]}
        assert mounted["runs"] in job["spec"]["entrypoint"].split()
    head = pods[0]
    claims = [
        volume["persistentVolumeClaim"]["claimName"]
        for volume in head["volumes"]
        if len(volume) == 2 and "persistentVolumeClaim" in volume
    ]
    claim = yaml.safe_load((ROOT / "deploy/kubernetes/volume/claim.yaml").read_text())
    assert claims == [claim["metadata"]["name"]]
    assert f"USER {head['securityContext']['fsGroup']}\n" in (ROOT / "Dockerfile").read_text()
