"""`venv.sh` installs what is missing, names it, and installs nothing twice. Its Python and pip are a script here."""

import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from support.waiting import until

ROOT = Path(__file__).parents[2]
PYTHON = """#!/bin/sh
case "$* ${{INDEX:-}}" in
*"-m venv"*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && echo "#!$3/bin/python" > "$3/bin/pip" ;;
*"-m pip"*)
  echo "$PIP_EXTRA_INDEX_URL $*" >> "{calls}"
  until [ -e "{calls}.go" ]; do sleep 0.05; done
  for line in "Collecting a" "  Downloading a.whl.metadata (9 kB)" "Collecting b" "  Downloading b.whl (175.0 MB)" \
    "Installing collected packages: a, b" "Successfully installed furo-1.0 sphinx-2.0"; do echo "$line"; done ;;
*secret*silent.example*) case "$*" in *secret*) exit 0 ;; *) exit 1 ;; esac ;;
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
    run_pip = calls.with_suffix(".go")
    run_pip.touch()
    started = []

    def start(extra, indexes=""):
        script = f'source "{ROOT}/venv.sh" && ensure_venv "{root}" {extra}'
        environment = {"PATH": "/usr/bin:/bin", "PYTHON": str(python), "PIP_EXTRA_INDEX_URL": indexes}
        started.append(subprocess.Popen(["bash", "-c", script], env=environment, stderr=subprocess.PIPE, text=True))
        return started[-1]

    def end(process):
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        return errors

    def run(extra, indexes=""):
        return end(start(extra, indexes))

    run.start, run.end, run.pip = start, end, run_pip
    run.log = root / ".venv" / "install.log"
    run.calls = lambda: calls.read_text().splitlines()
    yield run
    run_pip.touch()  # A failed test may have left a pip that waits for it.
    for process in started:
        process.communicate(timeout=300)


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


def test_a_second_installation_waits_for_the_first_one(install):
    install.pip.unlink()
    first = install.start("dev")
    until(install.calls)
    second = install.start("docs")
    assert any("Waiting" in line for line in second.stderr)
    install.pip.touch()
    install.end(first)
    install.end(second)
    assert len(install.calls()) == 1


def test_an_environment_of_another_tool_is_kept(install):
    kept = install.log.parent / "lib" / "package.py"
    kept.parent.mkdir(parents=True)
    kept.touch()
    process = install.start("")
    _, errors = process.communicate(timeout=300)
    assert process.returncode
    assert f"{kept.parents[1]} was not made" in errors
    assert kept.exists()


def test_an_index_with_a_password_is_asked_without_it():
    seen = []

    class Index(BaseHTTPRequestHandler):
        def do_GET(self):
            seen.append(self.headers["Host"])
            self.send_error(401)

        def log_message(self, *words):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Index) as server:
        Thread(target=server.serve_forever).start()
        address = f"127.0.0.1:{server.server_port}"
        call = f'leave_out_silent_indexes "{sys.executable}" && echo "$PIP_EXTRA_INDEX_URL"'
        script = f'source "{ROOT}/venv.sh" && {call}'
        environment = {"PATH": "/usr/bin:/bin", "PIP_EXTRA_INDEX_URL": f"http://me:secret@{address}/simple"}
        told = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=60)
        server.shutdown()
    assert told.stdout.split() == [environment["PIP_EXTRA_INDEX_URL"]]
    assert seen == [address]


def test_each_stage_and_large_download_is_shown_without_a_terminal(install):
    lines = [line.strip() for line in install("").splitlines()[-3:]]
    assert lines == ["Collecting a", "Downloading b.whl (175.0 MB)", "Installing collected packages: a, b"]
