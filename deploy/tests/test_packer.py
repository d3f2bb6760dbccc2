"""The images: Packer builds both from the template on an emulated EC2; errors of the template are detected."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_host import replace_program

DEPLOY = Path(__file__).parents[1]
TEMPLATE = (DEPLOY / "packer/apex.pkr.hcl").read_text()
VARIABLES = ("-var", 'only_from=["198.51.100.0/24"]', "-var", "cpu_wheels=", "-var", "check_gpu=false")
BASES = {"cpu": ("ami-0deb000000000002b", "099720109477"), "gpu": ("ami-0d1a000000000001a", "898082745236")}
TYPES = {"cpu": "c7i.large", "gpu": "g6.xlarge"}
SECRET = re.compile(
    r"AKIA[0-9A-Z]{16}|\b(?:access_key|secret_key|password|token) *=|BEGIN [A-Z ]*PRIVATE KEY|\b[0-9a-f]{64}\b"
)
INIT_SECONDS = 180
# blocks of the template that need Packer 1.7: its plugins, and what these support
NEWER = re.compile(r"\n *# Only with packer >= 1\.7: begin\n(.*?)\n *# end\n", re.DOTALL)
MADE_HERE = {"build", ".terraform", ".terraform.lock.hcl", ".venv", "__pycache__"}  # not part of the tree
# replaces the provisioners' scripts if only the template is tested, and records that they ran
NOTE = '#!/usr/bin/env bash\necho "$(basename "$0") ${KIND-}" >>/var/lib/ran\n'
# Without Packer or root, these tests are skipped; pytest -rs shows the reason.
tools = pytest.mark.skipif(shutil.which("packer") is None, reason="packer is not installed")
machines = pytest.mark.skipif(
    shutil.which("packer") is None or os.geteuid() != 0 or shutil.which("unshare") is None,
    reason="a machine behind the emulator needs packer, and root for a changed root and a network of its own",
)

LOOKS = {
    "version": "/opt/apex/venv/bin/apex --version",
    "units": "systemd-analyze verify --man=no /etc/systemd/system/apex*.{service,timer}",
    "commit": "cat /opt/apex/COMMIT",
    "native": "cd /var/lib/apex && /opt/apex/venv/bin/apex doctor --preset cartpole | grep 'native loops'",
    "enabled": "cd /etc/systemd/system && ls *.wants | grep apex",
    "user": "stat -c '%U %a' /var/lib/apex /var/lib/apex/runs",
    "secrets": "find /opt/apex /etc/apex /var/lib/apex /etc/ssh -name '*.key_secret' -o -name 'ssh_host_*_key'; "
    "ls /tmp; "
    "cat /home/*/.ssh/authorized_keys",
    "ran": "cat /var/lib/ran",
    "boto3": "/opt/apex/venv/bin/python -c 'import boto3' && /opt/apex/venv/bin/apex host --help | head -1",
}


def has_plugins() -> bool:
    """Returns whether this Packer has `packer init`, and the marked blocks of the template."""
    output = subprocess.run(["packer", "version"], capture_output=True, text=True, check=True).stdout
    return tuple(map(int, re.findall(r"\d+", output)[:2])) >= (1, 7)


def for_this_packer(text: str) -> str:
    """Returns the template, without the marked blocks if Packer is too old for them."""
    return text if has_plugins() else NEWER.sub("\n", text)


def why_not(template: Path) -> str:
    """Returns why this Packer cannot use the template of that folder, or ""; fetches the required plugins."""
    if not has_plugins() or not any("required_plugins" in path.read_text() for path in template.glob("*.pkr.hcl")):
        return ""
    try:
        done = subprocess.run(["packer", "init", str(template)], capture_output=True, text=True, timeout=INIT_SECONDS)
    except subprocess.TimeoutExpired:
        return f"packer init has not fetched the template's plugins within {INIT_SECONDS} s"
    output = " ".join((done.stdout + done.stderr).split())[:300]
    return f"packer init cannot fetch the template's plugins: {output}" if done.returncode else ""


def for_the_emulator(text: str) -> str:
    """Returns the template in a form that this Packer accepts, with an AWS on loopback."""
    emulator = '  custom_endpoint_ec2 = "http://127.0.0.1:5000"\n  skip_credential_validation = true\n'
    emulator += '  skip_region_validation = true\n  ssh_timeout = "60s"\n'
    return for_this_packer(text).replace('source "amazon-ebs" "apex" {\n', f'source "amazon-ebs" "apex" {{\n{emulator}')


def lay_out(folder: Path, text: str = TEMPLATE) -> Path:
    """Copies the files that Packer reads."""
    shutil.copytree(DEPLOY / "units", folder / "units")
    shutil.copytree(DEPLOY / "packer", folder / "packer", ignore=shutil.ignore_patterns("build"))
    (folder / "packer/build").mkdir()
    shutil.copytree(DEPLOY / "packer/build", folder / "packer/build", dirs_exist_ok=True)
    (folder / "packer/apex.pkr.hcl").write_text(for_the_emulator(text))
    return folder / "packer"


def packer(*arguments: str, cwd: Path) -> str:
    """Returns the complaint of `packer validate`, or ""."""
    found = subprocess.run(["packer", *arguments], cwd=cwd, capture_output=True, text=True, timeout=100)
    return "" if found.returncode == 0 else found.stdout + found.stderr or f"status {found.returncode}"


def build(state: Path, begun: Path | None, template: Path | None, kind: str = "cpu") -> dict:
    """Runs Packer with a machine behind the emulator; returns the result."""
    state.mkdir(parents=True)
    job = {
        "template": str(template),
        "packer": None if template is None else [f"-only=amazon-ebs.{kind}", *VARIABLES],
        "base": os.environ.get("APEX_BASE_ROOT", "/"),
        "user": "ubuntu",
        "begun": begun and str(begun),
        "state": str(state),
        "outside": os.getpid(),
        "out": str(state / "out.json"),
        "look": LOOKS,
    }
    (state / "job.json").write_text(json.dumps(job))
    program = Path(__file__).with_name("emulated_build.py")
    log = state / "log"
    command = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", sys.executable, program]
    with log.open("w") as file:
        status = subprocess.run([*command, state / "job.json"], stdout=file, stderr=file, timeout=900).returncode
    assert status == 0, log.read_text()[-4000:]
    return {"log": log.read_text()} | (json.loads((state / "out.json").read_text()) if template else {})


@pytest.fixture(scope="session")
def source() -> None:
    """The packed commit, and the plugins that this Packer needs; skips the tests if these are unavailable."""
    if reason := why_not(DEPLOY / "packer"):
        pytest.skip(reason)
    subprocess.run([DEPLOY / "packer/source.sh"], check=True, capture_output=True)


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> Path:
    """A base image: this machine's own system, or that in APEX_BASE_ROOT, with an SSH server."""
    state = tmp_path_factory.mktemp("base") / "state"
    build(state, None, None)
    return state


@pytest.fixture(scope="session")
def cpu(source, base, tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("cpu")
    return build(folder / "state", base, lay_out(folder)) | {"state": folder / "state"}


@pytest.fixture(scope="session")
def gpu(cpu, tmp_path_factory) -> dict:
    """Builds on the layer of the first build, so that pip finds the packages there and takes seconds."""
    folder = tmp_path_factory.mktemp("gpu")
    return build(folder / "state", cpu["state"], lay_out(folder), "gpu")


def complaints(text: str, facts: dict, kind: str) -> list[str]:
    """Returns the errors of a build, from Packer's requests to EC2 and the resulting account."""
    newer = "\n".join(NEWER.findall(text))
    asked = {action: [r for r in facts["requests"] if r.get("Action") == action] for action in ACTIONS}
    instances, images = asked["RunInstances"], facts["images"]
    ports = [v for r in asked["AuthorizeSecurityGroupIngress"] for n, v in r.items() if n.endswith("CidrIp")]
    commit = (DEPLOY / "packer/build/COMMIT").read_text().strip()
    tags = {"Project": "apex-zeromq", "Role": kind, "Commit": commit}
    holds = {
        "status": facts["status"] == 0,
        "IMDSv2 only": bool(re.search(r'http_tokens += "required"', newer)),
        "image with IMDSv2 only": bool(re.search(r'imds_support += "v2.0"', newer)),
        "no secret": not SECRET.search(text),
        "one build machine": len(instances) == 1,
        "encrypted disk": all(r.get("BlockDeviceMapping.1.Ebs.Encrypted") == "true" for r in instances),
        "base image": all(r["ImageId"] == BASES[kind][0] for r in instances),
        "type": all(r["InstanceType"] == TYPES[kind] for r in instances),
        "owner of the base image": any(r.get("Owner.1") == BASES[kind][1] for r in asked["DescribeImages"]),
        "encrypted image": [r.get("Encrypted") for r in asked["CopyImage"]] == ["true"],
        "networks of SSH": ports == ["198.51.100.0/24"],
        "one image": len(images) == 1,
        "name": all(re.fullmatch(rf"apex-{kind}-\d{{8}}-\d{{6}}", image["Name"]) for image in images),
        "tags": all({tag["Key"]: tag["Value"] for tag in image.get("Tags", [])} == tags for image in images),
        "private image": not any(image["Public"] for image in images),
        "ended machines": all(i["State"]["Name"] == "terminated" for i in facts["instances"]),
        "nothing left": facts["volumes"] == [] and facts["keys"] == [] and facts["groups"] == ["default"],
    }
    return [name for name, value in holds.items() if not value]


ACTIONS = ("RunInstances", "DescribeImages", "CopyImage", "AuthorizeSecurityGroupIngress")


@pytest.mark.parametrize(
    ("version", "init", "template", "fetches", "reason"),
    [
        ("1.6.6", "exit 1", DEPLOY / "packer", False, ""),
        ("1.11.2", "exit 1", Path(__file__).parent, False, ""),  # a folder without plugins
        ("1.11.2", "exit 0", DEPLOY / "packer", True, ""),
        ("1.7.0", "echo no route to host >&2; exit 1", DEPLOY / "packer", True, "no route to host"),
    ],
)
def test_only_a_newer_packer_fetches_plugins(tmp_path, monkeypatch, version, init, template, fetches, reason):
    outdated = "Your version of Packer is out of date! The latest version is 1.99.0."
    script = f'case $1 in\nversion) echo "Packer v{version}\n\n{outdated}" ;;\ninit) {init} ;;\nesac'
    record = replace_program(monkeypatch, tmp_path, "packer", script)
    found = why_not(template)
    assert found.endswith(reason)
    assert bool(found) == bool(reason)
    assert record.read_text().splitlines() == ["version", *fetches * [f"init {template}"]]
    assert "required_plugins" in TEMPLATE
    assert (for_this_packer(TEMPLATE) == TEMPLATE) == (version != "1.6.6")


@tools
def test_packer_accepts_the_template(source, tmp_path):
    assert packer("fmt", "-check", str(DEPLOY / "packer"), cwd=DEPLOY) == ""
    assert packer("validate", *VARIABLES, ".", cwd=lay_out(tmp_path)) == ""


@tools
@pytest.mark.parametrize("networks", ['["0.0.0.0/0"]', '["::/0"]', '["198.51.100.7/32", "0.0.0.0/0"]', "[]"])
def test_ssh_is_never_open_to_the_internet(source, tmp_path, networks):
    assert "Invalid value" in packer("validate", "-var", f"only_from={networks}", ".", cwd=lay_out(tmp_path))


def test_every_script_stops_at_its_first_failure():
    scripts = [*(DEPLOY / "packer").glob("*.sh"), *(DEPLOY / "units/bin").iterdir()]
    assert len(scripts) >= 7
    assert [path.name for path in scripts if "\nset -euo pipefail\n" not in path.read_text()] == []


def test_there_is_no_secret_in_the_tree():
    files = [p for p in DEPLOY.rglob("*") if p.is_file() and p.suffix not in (".pyc",) and p.parent.name != "tests"]
    files = [p for p in files if not MADE_HERE & set(p.relative_to(DEPLOY).parts)]
    assert {".tf", ".hcl", ".sh", ".service", ".md"} <= {p.suffix for p in files}
    found = {p.name: m.group() for p in files if (m := SECRET.search(p.read_text(errors="replace")))}
    assert found == {}


@pytest.mark.build
@machines
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_an_image_is_built_with_the_expected_contents(kind, request):
    facts = request.getfixturevalue(kind)
    assert complaints(TEMPLATE, facts, kind) == [], facts["log"][-4000:]
    looks = facts["looks"]
    assert re.fullmatch(r"apex \d+\.\d+\.\d+\n", looks["version"]["text"])
    assert looks["units"] == {"status": 0, "text": ""}
    assert looks["commit"]["text"] == (DEPLOY / "packer/build/COMMIT").read_text()
    assert "ok" in looks["native"]["text"]
    assert looks["enabled"]["text"].split() == ["apex-max-hours.timer"]
    assert looks["user"]["text"].splitlines() == ["apex 750"] * 2
    assert looks["secrets"]["text"].strip() == ""
    assert "usage: apex host" in looks["boto3"]["text"]


MUTATIONS = {
    "the image in the clear": (
        "encrypt_boot                          = true",
        "encrypt_boot                          = false",
    ),
    "the build machine's disk in the clear": ("encrypted             = true", "encrypted             = false"),
    "no role in the tags": (
        'tags            = { Project = "apex-zeromq", Role = "cpu", ',
        'tags            = { Project = "apex-zeromq", ',
    ),
    "the smoke test left out": ("/smoke.sh", "/clean.sh"),
    "SSH from anywhere": ("_cidrs = var.only_from", '_cidrs = ["0.0.0.0/0"]'),
}
REFUSED = {
    "no owner": ('owners      = ["099720109477"]', "owners      = []"),
    "any metadata request": ('"required"', '"optional"'),
    "a key in the file": (
        "  subnet_id ",
        '  access_key                            = "AKIAIOSFODNN7EXAMPLE"\n  subnet_id ',
    ),
    "no networks asked for": ("length(var.only_from) > 0 && ", ""),
}


def mutate(change: tuple[str, str]) -> str:
    assert change[0] in TEMPLATE
    return TEMPLATE.replace(*change)


@pytest.mark.build
@machines
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [None, *MUTATIONS])
def test_a_broken_template_is_detected_by_its_build(name, source, base, tmp_path):
    text = TEMPLATE if name is None else mutate(MUTATIONS[name])
    template = lay_out(tmp_path, text)
    for script in ("install.sh", "smoke.sh", "clean.sh"):
        (template / script).write_text(NOTE.replace('$(basename "$0")', script))
    facts = build(tmp_path / "state", base, template)
    found = complaints(text, facts, "cpu")
    if facts["looks"]["ran"]["text"].split("\n") != ["install.sh cpu", "smoke.sh cpu", "clean.sh ", ""]:
        found.append("not every step was run")
    assert bool(found) == (name is not None), f"{found}\n{facts['looks']['ran']}\n{facts['log'][-3000:]}"


@tools
@pytest.mark.parametrize("name", [None, *REFUSED])
def test_only_a_broken_template_is_refused(name, source, tmp_path):
    text = TEMPLATE if name is None else mutate(REFUSED[name])
    newer = "\n".join(NEWER.findall(text))
    refused = bool(packer("validate", *VARIABLES, ".", cwd=lay_out(tmp_path, text)))
    open_door = not packer("validate", "-var", "only_from=[]", ".", cwd=tmp_path / "packer")
    broken = refused or open_door or bool(SECRET.search(text)) or '"required"' not in newer
    assert broken == (name is not None)
