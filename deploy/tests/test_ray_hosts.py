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
# systemctl enables units here, but cannot start them.
printf '#!/bin/bash\\nexec /usr/bin/systemctl "${{@/--now/--quiet}}"\\n' >usr/local/bin/systemctl
chmod 755 usr/local/bin/sudo usr/local/bin/systemctl
export HOME=/home/ubuntu PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
"""


def test_the_setup_commands_succeed_in_a_host_of_the_image(tmp_path: Path) -> None:
    config = yaml.safe_load((DEPLOY / "ray/aws.yaml").read_text())
    commands = [*config["setup_commands"], *config["head_setup_commands"]]
    script = ROOT.format(state=tmp_path, units=UNITS)
    for command in commands:
        script += f"chroot . bash -c {shlex.quote(command)}\n"
    script += "cat var/lib/apex/max-hours\nls etc/systemd/system/multi-user.target.wants | grep apex\n"
    script += "stat -c %a home/ubuntu/.ray/auth_token\n"
    done = subprocess.run(
        ["unshare", "--mount", "bash", "-c", script], capture_output=True, text=True, timeout=100, cwd="/"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split()[-3:] == ["24", "apex-idle@60.service", "600"]


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
