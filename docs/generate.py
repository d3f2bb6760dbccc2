"""Generates pages of the site: settings, commands, and copies of documents outside docs/."""

from __future__ import annotations

import io
import os
import re
import tokenize
from contextlib import redirect_stdout, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

from apex import cli
from apex.config.tree import Config
from apexreplay import cli as library

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
GENERATED = DOCS / "reference" / "generated"
SETTINGS = ("tree", "addresses", "iqn", "r2d2", "dpg", "sac")  # modules of apex/config that define settings
OUTSIDE = {  # files outside docs/ that are also pages of the site
    "changelog": ROOT / "CHANGELOG.md",
    "contributing": ROOT / "CONTRIBUTING.md",
    "security": ROOT / "SECURITY.md",
    "ec2": ROOT / "deploy" / "README.md",
}
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)#]+)(#[^)]*)?\)")
SHOWN = (".md", ".png", ".gif", ".svg", ".json")  # files below docs/ that the site has: pages, pictures, records
HEADING = ("| Setting | Default | Meaning |", "|---|---|---|")
HIDDEN = ("host",)  # commands that only the systemd units of cluster hosts call


def write_pages() -> None:
    """Writes the pages into `GENERATED`."""
    GENERATED.mkdir(parents=True, exist_ok=True)
    pages = {"settings": settings_page(), "commands": commands_page(), "timing": timing_table()}
    pages |= {
        name: rewrite_links(path.read_text(), path.parent, f"reference/generated/{name}")
        for name, path in OUTSIDE.items()
    }
    for name, text in pages.items():
        path = GENERATED / f"{name}.md"
        if not path.exists() or path.read_text() != text:  # Sphinx does not rebuild unchanged pages.
            path.write_text(text)


def rewrite_links(text: str, folder: Path, page: str) -> str:
    """Rewrites links in `text`, which are relative to `folder`, for the site. Links to other files become paths."""
    pages = {path: GENERATED / f"{name}.md" for name, path in OUTSIDE.items()}
    here = (DOCS / page).parent

    def rewrite(link: re.Match[str]) -> str:
        picture, label, target, anchor = link.groups()
        path = (folder / target).resolve()
        path = pages.get(path, path)
        is_page = path.is_relative_to(DOCS) and path.suffix in SHOWN
        if is_page or not path.exists():
            return f"{picture}[{label}]({os.path.relpath(path, here)}{anchor or ''})"
        name = f"`{path.relative_to(ROOT)}`"
        return name if label.strip("`") in name else f"{label} ({name})"

    return LINK.sub(rewrite, text)


def settings_page() -> str:
    """Returns the page of all settings: name, default and meaning."""
    comments = read_comments()
    lines = [
        "# Settings",
        "",
        "Every setting is an option of `apex train` (`--learner.batch-size 64`), a key in a TOML file for `--config`",
        'and an argument of `apex.preset("pong", learner={"batch_size": 64})`. Where the paper has a value, it is the',
        "default. `apex train --help-all` prints this list, and `--print-config` the values of a run.",
    ]
    branches = {field.name: getattr(Config(), field.name) for field in fields(Config)}
    top = [name for name, value in branches.items() if not hasattr(value, "__dataclass_fields__")]
    lines += ["", "## Top level", "", *HEADING, *(row(name, branches[name], comments["Config", name]) for name in top)]
    for branch, value in branches.items():
        if branch in top:
            continue
        lines += ["", f"## `{branch}`", "", (type(value).__doc__ or "").split("\n")[0], "", *HEADING]
        for field in fields(value):
            meaning = comments.get((type(value).__name__, field.name), "")
            lines.append(row(f"{branch}.{field.name}", getattr(value, field.name), meaning))
    return "\n".join(lines) + "\n"


def read_comments() -> dict[tuple[str, str], str]:
    """Returns (class, field) -> the comment beside or below the field."""
    found: dict[tuple[str, str], str] = {}
    for path in (ROOT / f"apex/config/{module}.py" for module in SETTINGS):
        owner, name = "", ""
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            parts = token.line.split()
            if token.type == tokenize.NAME and token.string == "class":
                owner = parts[1].partition("(")[0].rstrip(":")
            elif token.type == tokenize.NAME and token.start[1] == 4 and ":" in token.line.partition("=")[0]:
                name = token.string
            elif token.type == tokenize.COMMENT and name and token.start[1] > 4:
                found.setdefault((owner, name), token.string.lstrip("# "))
            elif token.type == tokenize.NEWLINE:
                name = name if token.line.rstrip().endswith(("(", ",")) else ""
    return found


def timing_table() -> str:
    """Returns a table of the periods and timeouts in both files transport/timing.py, in the order of the files."""
    text = "".join((ROOT / package / "transport/timing.py").read_text() for package in ("apex", "apexreplay"))
    rows = re.findall(r"^(\w+) = (\S+)  # (.+)$", text, re.MULTILINE)
    lines = [f"| `{name}` | {value} | {escape(meaning)} |" for name, value, meaning in rows]
    return "\n".join(["| Constant | Value | Meaning |", "|---|---|---|", *lines]) + "\n"


def commands_page() -> str:
    """Returns the page with the `--help` of each command."""
    lines = ["# Commands", "", "The `--help` text of each command."]
    names = [("apex", cli.main, name) for name in cli.COMMANDS if name not in HIDDEN]
    for program, main, name in [*names, *(("apexreplay", library.main, name) for name in ("serve", "status", "keys"))]:
        # In this process, because a process for each would take 3 s of CPU time.
        with redirect_stdout(io.StringIO()) as shown, suppress(SystemExit), patch.dict(os.environ, COLUMNS="90"):
            main([name, "--help"])
        assert shown.getvalue(), f"{program} {name} --help"
        lines += ["", f"## `{program} {name}`", "", "```text", shown.getvalue().rstrip(), "```"]
    return "\n".join(lines) + "\n"


def row(name: str, default: Any, meaning: str) -> str:
    """Returns the row of a setting in its table."""
    return f"| `{name}` | `{show(default)}` | {escape(meaning)} |"


def show(value: Any) -> str:
    """Returns a default value in TOML syntax."""
    if isinstance(value, bool):
        return str(value).lower()
    return '""' if value == "" else "none" if value is None else f"{value:,}" if type(value) is int else str(value)


def escape(text: str) -> str:
    """Escapes text for a table cell."""
    return text.replace("|", r"\|").replace("<", "&lt;")
