"""The container: its image contains only what a run needs, and trains; the commands of compose.yaml train."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from emulated_build import WHEELS, pip_settings

from apex.runs.folder import RunFolder
from tests.support.machines import Machines, can_make_machines

pytestmark = pytest.mark.timeout(3600)  # A build takes 3 to 14 minutes.
ROOT = Path(__file__).parents[2]
# These decide whether a build succeeds. CI builds if their hashes differ from those of the last good build.
FILES = (".dockerignore", "Dockerfile", "apexreplay/pyproject.toml", "apexreplay/setup.py", "constraints.txt")
FILES += ("deploy/install.sh", "deploy/tests/test_container.py", "pyproject.toml", "setup.py")
RECORD = ROOT / "deploy/tests/container.built"
TOOLS = ("buildah", "debootstrap", "unshare")
MAX_BYTES = 1.5e9
# This machine's access to packages, in the build: certificates, wheels and downloads.
SHARED = {
    Path("/etc/ssl/certs/ca-certificates.crt"): "/mnt/certificates",
    WHEELS: WHEELS,
    Path("~/.cache/pip").expanduser(): "/mnt/pip",
}
PIP = {"cert": "/mnt/certificates", "cache-dir": "/mnt/pip", "constraint": "/dev/null", "find-links": ""}
TORCH_INDEX = "/mnt/torch"  # of such a machine, in the build
# Starts a program like a container engine: as process 1, with memory files, processes and a network of its own.
START = """
mount --make-rprivate /; mount -t proc proc {root}/proc
mount --rbind /dev {root}/dev; mount -t tmpfs none {root}/dev/shm
ip link set lo up; exec chroot --userspec={user}:{user} {root} env -i -C {folder} {environment} "$@"
"""


class Image(NamedTuple):
    """A built image, and a container of it."""

    config: dict[str, Any]
    num_bytes: float  # as `docker images` shows
    root: Path

    def run(self, *arguments: str, entrypoint: tuple[str, ...] = (), seconds: float = 600) -> str:
        """Returns the output of a program, which must end with status 0."""
        config = self.config
        place = {"root": self.root, "user": config["User"], "folder": config["WorkingDir"]}
        script = START.format(**place, environment=" ".join(config["Env"]))
        new = ["unshare", "--mount", "--net", "--ipc", "--pid", "--fork", "--kill-child"]
        command = [*new, "sh", "-euc", script, "sh", *(entrypoint or config["Entrypoint"]), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    """Builds the image as docs/guide/container.md says, on a Debian by debootstrap instead of a registry's."""
    if os.geteuid() or not all(map(shutil.which, TOOLS)):
        pytest.skip(f"builds need root and {', '.join(TOOLS)}")
    folder = tmp_path_factory.mktemp("image")
    try:
        yield build(folder)
    finally:
        shutil.rmtree(folder)


def build(folder: Path) -> Image:
    """Builds the image and makes a container of it, all below `folder`."""

    def run(*command: str) -> str:
        with (folder / "log").open("a+") as log:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ, "TMPDIR": str(folder)},
                timeout=1800,
            )  # fmt: skip
            log.seek(0)
            assert done.returncode == 0, f"{command} {log.read()[-4000:]}"
        return done.stdout.strip()

    buildah = partial(run, "buildah", "--storage-driver", "vfs", f"--root={folder}/store", f"--runroot={folder}/run")
    base = buildah("from", "scratch")
    system = buildah("mount", base)
    run("unshare", "--mount", "debootstrap", "--variant=minbase", "bookworm", system)
    for name in ("usr/share/doc", "usr/share/locale", "usr/share/man", "var/cache/apt", "var/lib/apt/lists"):
        shutil.rmtree(Path(system, name))  # The image bookworm-slim has none of them.
    buildah("commit", "--quiet", "--rm", base, "base")
    (folder / "pip.conf").write_text(pip_settings(PIP))
    (folder / "index/torch").mkdir(parents=True)
    links = [f'<a href="file://{wheel}">{wheel.name}</a>' for wheel in WHEELS.glob("torch-*")]
    (folder / "index/torch/index.html").write_text("\n".join(links))
    shared = {**SHARED, folder / "index": TORCH_INDEX}
    buildah(
        *("build", "--isolation=chroot", "--tag=apex", f"--secret=id=pip,src={folder}/pip.conf"),
        *("--build-arg=BASE=localhost/base", *[f"--build-arg=TORCH_INDEX=file://{TORCH_INDEX}"] * bool(links)),
        *(f"--volume={place}:{at}" for place, at in shared.items() if place.exists()),
        str(ROOT),
    )
    config = json.loads(buildah("inspect", "--type=image", "apex"))["OCIv1"]["config"]
    amount, unit = json.loads(buildah("images", "--json", "apex"))[0]["size"].split()
    root = buildah("mount", buildah("from", "apex"))
    return Image(config, float(amount) * {"MB": 1e6, "GB": 1e9}[unit], Path(root))


@pytest.mark.build
def test_the_image_has_no_more_than_a_run_needs(image):
    files = {str(path.relative_to(image.root)) for path in image.root.rglob("*")}
    programs = {path.rpartition("/")[2] for path in files if re.match("(usr/)?bin/|usr/lib/gcc", path)}
    assert {"python3", "wget"} <= programs
    assert programs & {"gcc", "cc", "c++", "as", "ld", "make", "git"} == set()
    unwanted = r"^opt/.*/tests?/|\.deb$|^root/\.cache/.|^etc/pip\.conf$|^var/lib/apt/lists/.|^wheels|\.key_secret$"
    assert sorted(path for path in files if re.search(unwanted, path)) == []
    assert image.num_bytes <= MAX_BYTES
    assert (image.config["User"], image.config["Entrypoint"]) == ("1000", ["apex"])


@pytest.mark.build
def test_the_image_has_the_tested_versions(image):
    packages = json.loads(image.run("list", "--format", "json", entrypoint=("python", "-m", "pip")))
    found = {package["name"].lower(): package["version"] for package in packages}
    tested = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text().lower(), re.M))
    wrong = {
        name: version
        for name, version in found.items()
        if name not in ("pip", "apex-zeromq", "apexreplay") and tested.get(name) != version.partition("+")[0]
    }
    assert wrong == {}
    assert found["torch"].endswith("+cpu"), "the build with CUDA has replaced it"


@pytest.mark.build
def test_the_image_trains_as_a_user_without_rights(image):
    report = image.run("doctor", "--preset", "cartpole")
    assert re.search("^ok +native loops", report, re.M), report
    image.run("train", "--preset", "cartpole", "--name", "solved", "--seed", "1")
    folder = RunFolder.open(image.root / "home/apex/runs/solved")
    assert (folder.end.kind, folder.end.value) == ("score", 475)
    assert {path.stat().st_uid for path in folder.path.rglob("*")} == {1000}


@pytest.mark.build
def test_a_good_build_is_recorded(image, request):
    """The last test of a build: `sha256sum --check` compares the record, and CI builds only if it differs."""
    assert not request.session.testsfailed
    RECORD.write_text("".join(f"{hashlib.sha256((ROOT / name).read_bytes()).hexdigest()}  {name}\n" for name in FILES))


def test_the_record_names_all_files_that_decide_about_a_build():
    assert [line.split()[1] for line in RECORD.read_text().splitlines()] == list(FILES)
    copied = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.M)
    assert {name for name in copied if (ROOT / name).is_file()} - {"LICENSE", "README.md"} <= set(FILES)


@pytest.mark.skipif(not can_make_machines(), reason="needs root, network namespaces, iproute2 and util-linux")
def test_the_services_of_compose_train(tmp_path):
    """Each container is a machine in namespaces. The volume of keys is a folder that all machines see."""
    text = (ROOT / "compose.yaml").read_text().replace("${PRESET:-pong}", "cartpole --max-updates 200")
    services = yaml.safe_load(re.sub(r"\$\{\w+:-(\w+)\}", r"\1", text))["services"]
    actors = [f"actor{number}" for number in range(services["actor"]["deploy"]["replicas"])]
    machines = Machines(tmp_path, "keys", "head", *actors)
    try:
        (tmp_path / "hosts").write_text(f"127.0.0.1 localhost\n{machines.addresses['head']} head\n")
        (tmp_path / "volume").mkdir()
        started = {}
        for name in ("keys", *actors, "head"):
            (machines.home(name) / "keys").symlink_to(tmp_path / "volume")
            machines.run(name, f"mount --bind {tmp_path / 'hosts'} /etc/hosts")
            command = f"apex {services[name.rstrip('0123456789')]['command']}"
            started[name] = machines.start(name, command, tmp_path / f"{name}.log")
            if name == "keys":
                assert started[name].wait(100) == 0
        statuses = {name: program.wait(600) for name, program in started.items()}
        assert set(statuses.values()) == {0}, [(tmp_path / f"{name}.log").read_text()[-2000:] for name in statuses]
    finally:
        machines.close()
    assert RunFolder.open(machines.home("head") / "runs/pong").end.kind == "updates"


def test_compose_opens_nothing_but_tensorboard_on_loopback():
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    ports = {name: service.get("ports", []) for name, service in services.items()}
    assert ports == {"keys": [], "head": ["127.0.0.1:6006:6006"], "actor": []}
    assert all({"network_mode", "privileged", "environment"}.isdisjoint(service) for service in services.values())
