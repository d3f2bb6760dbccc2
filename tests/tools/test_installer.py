"""`venv.sh` installs what is missing, names it, and installs nothing twice. Its Python and pip are a script here."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = """#!/bin/sh
case "$*" in
*"-m venv"*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && echo "#!$3/bin/python" > "$3/bin/pip" ;;
*"-m pip"*)
  echo "$PIP_EXTRA_INDEX_URL $*" >> "{calls}"
  for line in "Collecting a" "  Downloading a.whl.metadata (9 kB)" "Collecting b" "  Downloading b.whl (175.0 MB)" \
    "Installing collected packages: a, b" "Successfully installed furo-1.0 sphinx-2.0"; do echo "$line"; done ;;
*silent.example*) exit 1 ;;
esac
"""


@pytest.fixture
def install(tmp_path):
    """Installs a package without content; returns standard error. `calls`: arguments of pip; `log`: its output."""
    root, calls = tmp_path / "root", tmp_path / "calls"
    for name in (
        "pyproject.toml",
        "constraints.txt",
        "setup.py",
        "apex/algorithms/kernels/a.c",
        "apexreplay/frames/a.c",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    python = tmp_path / "python"
    python.write_text(PYTHON.format(calls=calls))
    python.chmod(0o755)
    calls.touch()

    def run(extra, indexes=""):
        script = f'source "{ROOT}/venv.sh" && ensure_venv "{root}" {extra}'
        environment = {"PATH": "/usr/bin:/bin", "PYTHON": str(python), "PIP_EXTRA_INDEX_URL": indexes}
        ended = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=300)
        assert ended.returncode == 0, ended.stderr
        return ended.stderr

    run.log = root / ".venv" / "install.log"
    run.calls = lambda: calls.read_text().splitlines()
    return run


def test_an_update_names_the_extra_and_the_new_packages(install):
    first, told = install(""), install("docs")
    assert "PyTorch" in first
    for text in (first, told):
        assert f"tail -f {install.log}" in text
    assert "docs" in told
    assert "furo-1.0 sphinx-2.0" in told
    assert "PyTorch" not in told
    assert install.calls()[1].endswith("[box2d,docs]")


@pytest.mark.parametrize(("first", "second", "installs"), [("dev", "docs", 1), ("docs", "", 1), ("docs", "dev", 2)])
def test_nothing_is_installed_that_an_earlier_extra_contains(install, first, second, installs):
    install(first)
    install(second)
    assert len(install.calls()) == installs


def test_an_index_that_cannot_be_reached_is_named_and_left_out(install):
    told = install("", indexes="https://good.example/a https://user:secret@silent.example/b")
    (call,) = install.calls()
    assert call.startswith("https://good.example/a  -m pip ")
    assert "silent.example/b" in told
    assert "secret" not in told


def test_each_stage_and_large_download_is_shown_without_a_terminal(install):
    lines = [line.strip() for line in install("").splitlines()[-3:]]
    assert lines == ["Collecting a", "Downloading b.whl (175.0 MB)", "Installing collected packages: a, b"]
