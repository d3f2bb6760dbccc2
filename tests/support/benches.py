"""Starts benchmarks as separate programs."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def start(tmp_path, *arguments):
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "bench", *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    )


def stand_in(folder, name, script=""):
    """Returns the option `NAME=PYTHON` with a program in the place of a peer's interpreter; `script` runs first."""
    path = folder / name
    line = '{"inserts_per_s": %s, "batches_per_s": 20, "bytes_per_transition": 7100}'
    path.write_text(f"#!/bin/sh\ninserts=10000\n{script}\necho noise\nprintf '{line}\\n' $inserts\n")
    path.chmod(0o755)
    return f"{name}={path}"
