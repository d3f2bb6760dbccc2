"""Packages that only some commands need, and how to install them."""

import os
import shlex
import sys
from pathlib import Path

EXTRAS = {  # see pyproject.toml
    "aws": ("boto3",),
    "az": ("adlfs",),
    "box2d": ("gymnasium[box2d]",),
    "export": ("onnx", "onnxruntime"),
    "gs": ("gcsfs",),
    "hub": ("huggingface_hub",),
    "minari": ("minari[hdf5]",),
    "minatar": ("minatar",),
    "mlflow": ("mlflow",),
    "ray": ("ray[default]",),
    "s3": ("s3fs",),
    "sweep": ("optuna",),
    "wandb": ("wandb",),
}


def remedy(extra: str) -> str:
    """Returns the command that installs an extra's packages by name: `apex-zeromq` itself is not on a package index."""
    python = Path(sys.executable)
    typed = os.path.relpath(python) if python.is_relative_to(Path.cwd()) else str(python)
    return f"{shlex.quote(typed)} -m pip install {shlex.join(EXTRAS[extra])}"
