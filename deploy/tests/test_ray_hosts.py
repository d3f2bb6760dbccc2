"""What a host of `ray up` does: its setup commands succeed, and it ends when no run uses it."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from test_host import replace_program

yaml = pytest.importorskip("yaml", reason="needs PyYAML, of the extra cloud")
DEPLOY = Path(__file__).parents[1]
UNITS = DEPLOY / "units"
CONFIG = yaml.safe_load((DEPLOY / "ray/aws.yaml").read_text())
pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("systemctl") is None,
    reason="needs root for namespaces, and systemctl",
)

# A changed root with this host's system and, in a layer that is removed with it, what the image has.
ROOT = """
set -euo pipefail
mount --types tmpfs none {state}
mkdir {state}/upper {state}/work {state}/root
mount -t overlay overlay -o lowerdir=/,upperdir={state}/upper,workdir={state}/work {state}/root
cd {state}/root
mkdir -p var/lib/apex opt/apex/bin home/ubuntu/.ray
touch home/ubuntu/.ray/auth_token
cp {units}/*.service etc/systemd/system
cp {units}/bin/apex-idle opt/apex/bin
printf '#!/bin/sh\\nexec "$@"\\n' >usr/local/bin/sudo
# Like Ray's, it starts only where Ray does not run.
mkdir -p opt/apex/venv/bin
printf '#!/bin/sh\\nif [ $1 = stop ]; then rm -f /running; else set -C && echo >/running; fi\\n' >opt/apex/venv/bin/ray
# systemctl enables units here, but cannot start them.
printf '#!/bin/bash\\nexec /usr/bin/systemctl "${{@/--now/--quiet}}"\\n' >usr/local/bin/systemctl
chmod 755 usr/local/bin/sudo usr/local/bin/systemctl opt/apex/venv/bin/ray
export HOME=/home/ubuntu PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
"""


def run_in_root(state: Path, commands: list[str], look: str = "") -> str:
    """Runs commands as `ray up` does, each in a shell of its own, until one fails; then `look` in the root."""
    script = ROOT.format(state=state, units=UNITS)
    script += "".join(f"chroot . bash -c {shlex.quote(command)}\n" for command in commands) + look
    command = ["unshare", "--mount", "bash", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd="/")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_setup_commands_succeed_in_a_host_of_the_image(tmp_path: Path) -> None:
    commands = [*CONFIG["setup_commands"], *CONFIG["head_setup_commands"]]
    look = "cat var/lib/apex/max-hours; ls etc/systemd/system/multi-user.target.wants | grep apex\n"
    output = run_in_root(tmp_path, commands, f"{look}stat -c %a home/ubuntu/.ray/auth_token\n")
    assert output.split()[-3:] == ["24", "apex-idle@60.service", "600"]


@pytest.mark.parametrize("kind", ["head", "worker"])
def test_ray_up_may_be_repeated_on_hosts_that_run_ray(tmp_path: Path, kind: str) -> None:
    run_in_root(tmp_path, 2 * CONFIG[f"{kind}_start_ray_commands"], "ls running\n")


def test_a_host_ends_some_minutes_after_its_last_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    systemctl = replace_program(monkeypatch, tmp_path, "systemctl", "")
    # Each call is a minute. In the fifth, the guard of the run ends.
    ends = f"kill -9 $(cat {tmp_path}/guard); while grep -qs apex /proc/$(cat {tmp_path}/guard)/cmdline; do :; done"
    record = tmp_path / "sleep.record"
    minutes = replace_program(monkeypatch, tmp_path, "sleep", f"if [ $(wc -l <{record}) = 5 ]; then {ends}; fi")
    guard = '(exec -a "python -u -P -m apex.launch.guard" tail -f /dev/null) & echo $!'
    script = f"{guard} >{tmp_path}/guard; exec {UNITS}/bin/apex-idle 3"
    # In a namespace of processes, which has no run of this host.
    command = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-c", script]
    subprocess.run(command, check=True, timeout=60)
    assert minutes.read_text().splitlines() == ["60"] * (4 + 3)
    assert systemctl.read_text() == "--no-block poweroff\n"
