"""Writes the settings that a cluster accepts, by section, with the kind of their values, into the folder of Terraform:
`PYTHONPATH=. .venv/bin/python deploy/tests/setting_kinds.py`.
"""

import json
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from apex.config import Config
from apex.config.validation import Branch, plain_type

FILE = Path(__file__).parents[1] / "terraform/modules/cluster/settings.json"
# Other variables set these. A text cannot hold a table. The last two of `run` are refused by `apex learner`.
NOT_ACCEPTED = {
    "environment": {"id", "args"},
    "actor": {"num_actors", "num_processes", "envs_per_process"},
    "replay": {"num_shards", "host_bytes"},
    "run": {"name", "folder", "mirror", "single_process"},
}
KINDS = {bool: "true|false", int: "int", float: "float", str: "text"}


def setting_kinds() -> dict[str, dict[str, str]]:
    """Returns the kind of each setting: a key of `patterns` in boot.tf, or the values themselves, separated by |."""
    sections = {name: branch for name, branch in Config.field_types().items() if name != "transport"}
    return {
        section: {
            name: _kind(annotation)
            for name, annotation in branch.field_types().items()
            if name not in NOT_ACCEPTED.get(section, ())
        }
        for section, branch in sections.items()
        if isinstance(branch, type) and issubclass(branch, Branch)
    }


def _kind(annotation: Any) -> str:
    plain = plain_type(annotation)
    if get_origin(plain) is Literal:
        return "|".join(get_args(plain))
    (kind,) = set(get_args(plain) or (plain,)) - {NoneType}
    return KINDS[plain_type(kind)]


def as_json() -> str:
    """Returns the file's text, with one line for each section."""
    lines = (f"  {json.dumps(name)}: {json.dumps(kinds)}" for name, kinds in setting_kinds().items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    FILE.write_text(as_json())
