"""What some commands need beside what training does, and how a user gets it."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

EXTRAS = {"aws": ("boto3",), "export": ("onnx", "onnxruntime")}  # as in pyproject.toml


def remedy(extra: str) -> str:
    """What to type to install an extra where this program runs.

    It names the packages and not `apex-zeromq[extra]`: this one is no package of an index, and whoever came to register
    its name there would be asked for it.
    """
    python = Path(sys.executable)
    typed = os.path.relpath(python) if python.is_relative_to(Path.cwd()) else str(python)
    return f"{shlex.quote(typed)} -m pip install {' '.join(EXTRAS[extra])}"
