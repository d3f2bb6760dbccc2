"""Which Packer there is, and whether it can take the template: from 1.7 on it wants the template's plugins first."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

INIT_SECONDS = 180
NEWER = re.compile(r"\n *# Only with packer >= 1\.7: begin\n(.*?)\n *# end\n", re.DOTALL)


def has_plugins() -> bool:
    """Whether this Packer knows `packer init`, and what stands in the template between the marks."""
    said = subprocess.run(["packer", "version"], capture_output=True, text=True, check=True).stdout
    return tuple(map(int, re.findall(r"\d+", said)[:2])) >= (1, 7)


def for_this_packer(text: str) -> str:
    """The template without the marked blocks where Packer is older than they are."""
    return text if has_plugins() else NEWER.sub("\n", text)


def why_not(template: Path) -> str:
    """Why this Packer cannot take the template of that folder, "" if it can; fetches the plugins that it wants."""
    if not has_plugins() or not any("required_plugins" in path.read_text() for path in template.glob("*.pkr.hcl")):
        return ""
    try:
        done = subprocess.run(["packer", "init", str(template)], capture_output=True, text=True, timeout=INIT_SECONDS)
    except subprocess.TimeoutExpired:
        return f"packer init has not fetched the template's plugins within {INIT_SECONDS} s"
    said = " ".join((done.stdout + done.stderr).split())[:300]
    return f"packer init cannot fetch the template's plugins: {said}" if done.returncode else ""
