"""Finds Packer, and checks whether it accepts the template: from version 1.7 on it needs the template's plugins."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

INIT_SECONDS = 180
NEWER = re.compile(r"\n *# Only with packer >= 1\.7: begin\n(.*?)\n *# end\n", re.DOTALL)


def has_plugins() -> bool:
    """Returns whether this Packer has `packer init`, and the marked blocks of the template."""
    output = subprocess.run(["packer", "version"], capture_output=True, text=True, check=True).stdout
    return tuple(map(int, re.findall(r"\d+", output)[:2])) >= (1, 7)


def for_this_packer(text: str) -> str:
    """Returns the template, without the marked blocks if Packer is too old for them."""
    return text if has_plugins() else NEWER.sub("\n", text)


def why_not(template: Path) -> str:
    """Returns why this Packer cannot use the template of that folder, or ""; fetches the required plugins."""
    if not has_plugins() or not any("required_plugins" in path.read_text() for path in template.glob("*.pkr.hcl")):
        return ""
    try:
        done = subprocess.run(["packer", "init", str(template)], capture_output=True, text=True, timeout=INIT_SECONDS)
    except subprocess.TimeoutExpired:
        return f"packer init has not fetched the template's plugins within {INIT_SECONDS} s"
    output = " ".join((done.stdout + done.stderr).split())[:300]
    return f"packer init cannot fetch the template's plugins: {output}" if done.returncode else ""
