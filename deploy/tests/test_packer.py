"""The images: the template's provisioners make both in a changed root; errors of the template are detected."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DEPLOY = Path(__file__).parents[1]
PROGRAM = Path(__file__).with_name("emulated_build.py")
TEMPLATE = (DEPLOY / "packer/apex.pkr.hcl").read_text()
VARIABLES = ("-var", 'only_from=["198.51.100.0/24"]', "-var", "cpu_wheels=", "-var", "check_gpu=false")
OWNERS = {"cpu": "099720109477", "gpu": "898082745236"}  # of the base images
SECRET = re.compile(
    r"AKIA[0-9A-Z]{16}|\b(?:access_key|secret_key|password|token) *=|BEGIN [A-Z ]*PRIVATE KEY|\b[0-9a-f]{64}\b"
)
INIT_SECONDS = 180
# blocks of the template that need Packer 1.7: its plugins, and what these support
NEWER = re.compile(r"\n *# Only with packer >= 1\.7: begin\n(.*?)\n *# end\n", re.DOTALL)
MADE_HERE = {"build", ".terraform", ".terraform.lock.hcl", ".venv", "__pycache__"}  # not part of the tree
# Without Packer or root, these tests are skipped; pytest -rs shows the reason.
tools = pytest.mark.skipif(shutil.which("packer") is None, reason="packer is not installed")
machines = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="a changed root needs root and unshare"
)
LOOKS = {
    "version": "/opt/apex/venv/bin/apex --version",
    "units": "systemd-analyze verify --man=no /etc/systemd/system/apex*.{service,timer}",
    "commit": "cat /opt/apex/COMMIT",
    "native": "cd /var/lib/apex && /opt/apex/venv/bin/apex doctor --preset cartpole | grep 'native loops'",
    "enabled": "cd /etc/systemd/system && ls *.wants | grep apex",
    "user": "stat -c '%U %a' /var/lib/apex /var/lib/apex/runs",
    "secrets": "find /opt/apex /etc/apex /var/lib/apex /etc/ssh -name '*.key_secret' -o -name 'ssh_host_*_key'; "
    "ls /tmp | grep -v step",
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


def lay_out(folder: Path, text: str = TEMPLATE) -> Path:
    """Copies the files that Packer reads."""
    shutil.copytree(DEPLOY / "packer", folder / "packer", ignore=shutil.ignore_patterns("build"))
    (folder / "packer/build").mkdir()
    shutil.copytree(DEPLOY / "packer/build", folder / "packer/build", dirs_exist_ok=True)
    (folder / "packer/apex.pkr.hcl").write_text(for_this_packer(text))
    return folder / "packer"


def packer(*arguments: str, cwd: Path) -> str:
    """Returns the complaint of `packer validate`, or ""."""
    found = subprocess.run(["packer", *arguments], cwd=cwd, capture_output=True, text=True, timeout=100)
    return "" if found.returncode == 0 else found.stdout + found.stderr or f"status {found.returncode}"


@pytest.fixture(scope="session")
def packed() -> None:
    """The packed commit."""
    subprocess.run([DEPLOY / "packer/source.sh"], check=True, capture_output=True)


@pytest.fixture(scope="session")
def source(packed) -> None:
    """The same, and the plugins that this Packer needs; skips the tests if these are unavailable."""
    if reason := why_not(DEPLOY / "packer"):
        pytest.skip(reason)


def steps(text: str) -> list[tuple[str, str]]:
    """Returns the scripts of the template in their order, each with its variables."""
    return re.findall(r'script += "\$\{path\.root\}/(\w+\.sh)"\n.*(?:\n +environment_vars = \[(.*)\])?', text)


def build(folder: Path, begun: Path | None, kind: str) -> Path:
    """Runs the steps of the template for an image of this kind, on this machine's own system or APEX_BASE_ROOT.

    Returns the state, on which another build can begin. `looks.json` in it has what was seen in the image.
    """
    commit = (DEPLOY / "packer/build/COMMIT").read_text().strip()
    values = {"source.name": kind, "local.commit": commit, "var.cpu_wheels": "", "var.check_gpu": "false"}
    packed, state = DEPLOY / "packer/build/source.tar.gz", folder / "state"

    def variables(names: str) -> list[str]:
        return [re.sub(r"\$\{(.*)\}", lambda name: values[name[1]], each) for each in re.findall(r'"(.*?)"', names)]

    job = {
        "base": os.environ.get("APEX_BASE_ROOT", "/"),
        "begun": begun and str(begun),
        "state": str(state),
        "files": {"tmp/apex-image/source.tar.gz": str(packed), "tmp/apex-image/units": str(packed.parent / "units")},
        "steps": [(str(DEPLOY / "packer" / script), variables(names)) for script, names in steps(TEMPLATE)],
        "out": str(state / "looks.json"),
        "look": LOOKS,
    }
    (folder / "job.json").write_text(json.dumps(job))
    unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
    with (folder / "log").open("w") as log:
        done = subprocess.run([*unshare, sys.executable, PROGRAM, folder / "job.json"], stdout=log, stderr=log)
    assert done.returncode == 0, (folder / "log").read_text()[-4000:]
    return state


@pytest.fixture(scope="session")
def images(packed, tmp_path_factory) -> dict[str, Path]:
    """The states of both images. The second builds on the layer of the first, whose packages pip finds."""
    cpu = build(tmp_path_factory.mktemp("cpu"), None, "cpu")
    return {"cpu": cpu, "gpu": build(tmp_path_factory.mktemp("gpu"), cpu, "gpu")}


def complaints(text: str) -> list[str]:
    """Returns what is wrong with the template."""
    newer = "\n".join(NEWER.findall(text))
    sources = dict(re.findall(r'\n  source "amazon-ebs\.apex" \{\n    name += "(\w+)"\n(.*?)\n  \}\n', text, re.DOTALL))
    tags = r'\n    tags += \{ Project = "apex-zeromq", Role = "%s", Commit = local\.commit \}'
    holds = {
        "IMDSv2 only": re.search(r'http_tokens += "required"', newer),
        "image with IMDSv2 only": re.search(r'imds_support += "v2.0"', newer),
        "no secret": not SECRET.search(text),
        "no other owner": not re.search("ami_(users|groups|org_arns)", text),
        "encrypted image": re.search(r"\n  encrypt_boot += true\n", text),
        "networks of SSH": re.search(r"temporary_security_group_source_cidrs = var\.only_from\n", text),
        "every step": [script for script, _ in steps(text)] == ["install.sh", "smoke.sh", "clean.sh"],
        "both kinds": sources.keys() == OWNERS.keys(),
        "encrypted disk": all(re.search(r"\n +encrypted += true\n", body) for body in sources.values()),
        "owner of the base image": all(f'owners      = ["{OWNERS[kind]}"]' in body for kind, body in sources.items()),
        "tags": all(re.search(tags % kind, body) for kind, body in sources.items()),
    }
    return [name for name, value in holds.items() if not value]


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
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", OWNERS)
def test_an_image_is_built_with_the_expected_contents(kind, images):
    looks = json.loads((images[kind] / "looks.json").read_text())
    assert re.fullmatch(r"apex \d+\.\d+\.\d+\n", looks["version"])
    assert looks["units"] == ""
    assert looks["commit"] == (DEPLOY / "packer/build/COMMIT").read_text()
    assert "ok" in looks["native"]
    assert looks["enabled"].split() == ["apex-max-hours.timer"]
    assert looks["user"].splitlines() == ["apex 750"] * 2
    assert looks["secrets"].strip() == ""
    assert "usage: apex host" in looks["boto3"]


def test_the_template_keeps_every_rule():
    assert SECRET.search('access_key = "AKIAIOSFODNN7EXAMPLE"')
    assert complaints(TEMPLATE) == []
    assert complaints(TEMPLATE + '  ami_users = ["123456789012"]\n') == ["no other owner"]
