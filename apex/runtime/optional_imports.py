"""What some commands need beside what training does, and how a user gets it."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

EXTRAS = {"aws": ("boto3",), "export": ("onnx", "onnxruntime")}  # as in pyproject.toml


def remedy(extra: str) -> str:
    """The command that installs an extra. It names the packages, as `apex-zeromq` is on no package index."""
    python = Path(sys.executable)
    typed = os.path.relpath(python) if python.is_relative_to(Path.cwd()) else str(python)
    return f"{shlex.quote(typed)} -m pip install {' '.join(EXTRAS[extra])}"
