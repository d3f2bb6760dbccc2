"""Describes the origin of a run: versions of packages, the git commit, the hardware."""

import importlib.metadata
import os
import platform
import re
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from apex.runtime.gpu import read_cuda
from apex.runtime.hardware import PROCESSOR
from apex.version import VERSION
from apexreplay.process.limits import read_text

PACKAGES = ("torch", "numpy", "pyzmq", "gymnasium", "ale-py", "cramjam", "safetensors", "tensorboardX", "tensorboard")
ASK_SECONDS = 5.0  # timeout of git


def describe_versions() -> dict[str, str | None]:
    """Returns the versions of this package, of Python and of the main dependencies; None if not installed."""
    versions: dict[str, str | None] = {"apex": VERSION, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def describe_checkout(package: Path) -> dict[str, Any] | None:
    """Returns the git commit from which `package` is checked out; None if git does not track its files."""
    git = ["git", "--no-optional-locks", "-C", str(package)]
    if _ask([*git, "ls-files", "--error-unmatch", "--", "__init__.py"]) is None:
        return None
    commit = _ask([*git, "rev-parse", "HEAD"])
    changes = _ask([*git, "status", "--porcelain"])
    return None if commit is None else {"commit": commit, "dirty": changes != ""}


def describe_hardware() -> dict[str, Any]:
    """Returns this host's CPU, the cores that this process may use, memory and GPUs."""
    facts = read_text(PROCESSOR)
    processor = _fact(facts, "model name") or platform.processor() or platform.machine()
    family, model = _fact(facts, "cpu family"), _fact(facts, "model")
    if family and model:  # In a virtual machine, several CPU generations share one name.
        processor += f" (family {family}, model {model})"
    return {
        "host": socket.gethostname(),
        "system": platform.platform(),
        "cpu": processor,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": [gpu.name for gpu in read_cuda().gpus],
    }


def _fact(facts: str, name: str) -> str:
    """Returns a field of the first CPU in /proc/cpuinfo; "" if it is missing."""
    found = re.search(rf"^{name}\s*:\s*(.+)$", facts, re.MULTILINE)
    return found[1].strip() if found else ""


def _ask(command: Sequence[str]) -> str | None:
    """Returns the output of a command; None if the command does not exist, fails, or exceeds ASK_SECONDS."""
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=ASK_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()
