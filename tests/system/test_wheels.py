"""Both distributions are built as wheels and installed without an index; each is complete."""

import importlib.util
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

from apex.version import VERSION
from apexreplay import version as library

ROOT = Path(__file__).parents[2]
LOOK = "import {0}, pathlib; print(pathlib.Path({0}.__file__).parent)"
STORE = """
import sys, apexreplay.snapshots.restore, apexreplay.snapshots.writer, apexreplay.store.reader, apexreplay.store.writer
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"apex", "torch", "gymnasium", "matplotlib", "zmq"}))
"""
SERVER = """
import sys, apexreplay.client.reliable_sender, apexreplay.server.service
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"apex", "torch", "gymnasium", "matplotlib"}))
"""


def pip(python, *arguments, cwd=None):
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)


def commands_of_the_page():
    """The commands that build, check and install the wheels, split like a shell does."""
    block = (ROOT / "docs/guide/wheels.md").read_text().partition("```bash\n")[2].partition("```")[0]
    return [line.split() for line in block.splitlines()]


def tracked():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [Path(name) for name in listed.split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """The folder of both wheels, built from copies of the sources: a build writes into its source folder."""
    folder = tmp_path_factory.mktemp("wheels")
    for name in tracked():
        if name.parts[0] in ("apex", "apexreplay", "pyproject.toml", "setup.py", "README.md", "LICENSE"):
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "source" / name)
    build, *_ = commands_of_the_page()
    built = pip(sys.executable, *build[1:], "--no-build-isolation", cwd=folder / "source")
    assert built.returncode == 0, built.stderr
    return folder / "source" / "dist"


@pytest.fixture(scope="module")
def python(wheels, tmp_path_factory):
    """An interpreter with both wheels. It finds their dependencies in the environment of the tests."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=300)
    python = folder / "bin" / "python"
    options = ["--no-index", "--find-links", str(wheels), "--no-deps", "apex-zeromq"]
    assert pip(sys.executable, "--python", str(python), "install", *options, "apexreplay").returncode == 0
    own = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    (own / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


@pytest.mark.parametrize("package", ["apex", "apexreplay"])
def test_an_installed_wheel_has_every_module_and_data_file(wheels, python, package):
    shown = subprocess.run(
        [python, "-I", "-c", LOOK.format(package)], cwd="/", capture_output=True, text=True, check=True
    )
    installed = Path(shown.stdout.strip())
    assert installed.is_relative_to(python.parents[1])
    left_out = ("setup.py", "pyproject.toml", "README.md")
    names = [name for name in tracked() if name.parts[0] == package and name.suffix != ".c"]
    assert [name for name in names if not (installed.parent / name).exists() and name.name not in left_out] == []
    assert len(list(installed.rglob("_*.so"))) == 1


def test_the_five_minute_example_runs_from_the_wheel(python, tmp_path):
    page = (ROOT / "docs/tutorials/replay-server.md").read_text()
    example = page.partition("`five_minutes.py`:\n\n```python\n")[2].partition("```")[0]
    assert f"```python\n{example}```" in (ROOT / "apexreplay/README.md").read_text()
    subprocess.run([python, "-I", "-c", example], cwd=tmp_path, check=True, timeout=300)
    assert list(tmp_path.iterdir()) == []
    command = [python.parent / "apexreplay", "--version"]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=300)
    assert shown.stdout.strip() == library.VERSION


@pytest.mark.parametrize("program", [STORE, SERVER], ids=["store", "server"])
def test_the_replay_library_imports_nothing_of_the_trainer(python, program):
    shown = subprocess.run([python, "-I", "-c", program], cwd="/", capture_output=True, text=True, check=True)
    assert shown.stdout == "\n"


def test_the_trainer_requires_the_replay_library_of_its_version(wheels, tmp_path):
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"apexreplay=={VERSION}" in required
    assert library.VERSION == VERSION
    shutil.copy(next(wheels.glob("apex_zeromq-*.whl")), tmp_path)
    alone = ["--no-index", "--find-links", str(tmp_path), "--target", str(tmp_path / "target"), "--dry-run"]
    refused = pip(sys.executable, "install", *alone, "--ignore-installed", "apex-zeromq")
    assert refused.returncode != 0


def test_each_wheel_is_for_every_python_and_an_old_glibc(wheels):
    names = sorted(path.name for path in wheels.glob("*.whl"))
    assert [name.rsplit("-", 3)[1:3] for name in names] == [["py3", "none"]] * 2
    if importlib.util.find_spec("auditwheel") is None or shutil.which("patchelf") is None:
        pytest.skip("needs auditwheel and patchelf")
    _, (program, *options, _), _ = commands_of_the_page()
    subprocess.run([sys.executable, "-m", program, *options, *names], cwd=wheels, check=True, timeout=300)
    assert len(list(wheels.glob("wheels/*-py3-none-*manylinux_2_17_x86_64*.whl"))) == 2


def test_cartpole_is_trained_from_the_wheels_without_a_compiler(python, tmp_path):
    (tmp_path / "bin").mkdir()
    environment = {"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path)}  # no cc, and nothing of the checkout
    load = "from apexreplay.frames.lz4_blocks import find_native; find_native()"
    subprocess.run([python, "-c", load], cwd=tmp_path, env=environment, check=True, timeout=300)
    limits = ["--max-updates", "100", "--run.no-tensorboard", "--evaluator.final-seconds", "5"]
    command = [python, "-m", "apex", "train", "--preset", "cartpole", *limits, "--name", "one"]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=300)
    assert (tmp_path / "runs/one/end.json").exists()


@pytest.mark.parametrize("version", ["3.12", "3.13", "3.14"])
def test_other_interpreters_load_the_loops_of_the_wheel(wheels, tmp_path, version):
    found = shutil.which(f"python{version}")
    if found is None or subprocess.run([found, "-c", ""], capture_output=True, timeout=300).returncode != 0:
        pytest.skip(f"no Python {version}")
    for wheel in wheels.glob("*.whl"):
        shutil.unpack_archive(wheel, tmp_path, "zip")
    for loop in tmp_path.rglob("_*.so"):
        check = f"import ctypes; ctypes.c_int64.in_dll(ctypes.CDLL({str(loop)!r}), 'apex_interface')"
        subprocess.run([found, "-I", "-c", check], check=True, timeout=300)
