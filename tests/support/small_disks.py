"""Disks that are soon full, each mounted for one program; needs root on Linux."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import apex

MOUNT = [
    "unshare",
    "--mount",
    "sh",
    "-c",
    'mount -t tmpfs -o "size=64k,nr_inodes=${NODES:-64}" tmpfs "$1" && shift && exec "$@"',
    "sh",
]


def can_mount():
    return os.geteuid() == 0 and subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0


needs_mounts = pytest.mark.skipif(
    not can_mount(), reason="mounting a small disk needs root and its own mount namespace"
)


def run_on_a_small_disk(folder, script, **environment):
    """Runs a Python script in `folder`, on a disk of 64 KiB that only this program sees; returns its output."""
    process = subprocess.run(
        [*MOUNT, str(folder), sys.executable, "-c", textwrap.dedent(script)],
        cwd=Path(apex.__file__).parent.parent,
        env={**os.environ, "FOLDER": str(folder), **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout
