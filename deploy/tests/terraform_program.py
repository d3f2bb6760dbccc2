"""Runs Terraform on copies of the configuration, so that the tree stays unchanged."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1] / "terraform"
CLUSTER = "modules/cluster"
PROVIDER = Path("registry.terraform.io/hashicorp/aws")
SECONDS = 900  # time limit beside busy programs; an apply takes one minute

Plan = dict[str, Any]


class Terraform:
    """A copy of `source` in `folder`, whose root module is in the folder `inside`, and its variables."""

    def __init__(
        self, folder: Path, environment: Mapping[str, str], data: Path, source: Path = ROOT, inside: str = ""
    ) -> None:
        """`data`: folder of the providers, which several copies may share."""
        self.folder = folder / inside
        fixed = {"TF_DATA_DIR": str(data), "TF_IN_AUTOMATION": "1", "TF_INPUT": "0", "TF_CLI_ARGS": "-no-color"}
        fixed["GOGC"] = "400"  # Most of a plan is the provider's start, a fourth of that is Go's garbage collection.
        self._environment = {**os.environ, **environment, **fixed}
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns(".terraform*", "*.tfstate*", "*.tfvars*"))
        if (data / "lock.hcl").exists():
            shutil.copy(data / "lock.hcl", self.folder / ".terraform.lock.hcl")

    def run(self, *arguments: str, may_fail: bool = False) -> subprocess.CompletedProcess[str]:
        """Runs Terraform; raises AssertionError if it fails, unless it `may_fail`."""
        done = subprocess.run(
            ["terraform", *arguments],
            cwd=self.folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert may_fail or not done.returncode, f"{arguments}: {done.stdout[-4000:]}{done.stderr}"
        return done

    def refusal(self, *arguments: str) -> str:
        """Returns the errors of a run that must fail, without their frames and line breaks."""
        done = self.run(*arguments, may_fail=True)
        assert done.returncode == 1, done.stdout
        return " ".join(done.stderr.replace("│", " ").split())

    def copy(self, folder: Path) -> Terraform:
        """Returns another copy with the same state."""
        other = Terraform.__new__(Terraform)
        other.folder, other._environment = folder, self._environment
        shutil.copytree(self.folder, folder)
        return other

    def edit(self, file: str, old: str, new: str) -> None:
        """Replaces a text of the cluster's module in the copy, which must occur exactly once."""
        path = self.folder / CLUSTER / file
        text = path.read_text()
        assert text.count(old) == 1, f"{file} has {old!r} {text.count(old)} times"
        path.write_text(text.replace(old, new))

    def set(self, **variables: Any) -> None:
        """Writes the variables of all later runs."""
        (self.folder / "test.auto.tfvars.json").write_text(json.dumps(variables))

    def plan(self, *arguments: str) -> Plan:
        """Returns the plan in Terraform's JSON."""
        self.run("plan", "-out=test.tfplan", *arguments)
        return dict(json.loads(self.run("show", "-json", "test.tfplan").stdout))


def install(data: Path, scratch: Path) -> dict[str, str]:
    """Runs `terraform init` to fetch the provider into `data`, from a local mirror if there is one.

    Returns the environment for later runs.
    """
    data.mkdir(parents=True, exist_ok=True)
    settings = scratch / "terraform.rc"
    mirror = _mirror()
    settings.write_text(
        f'provider_installation {{\n  filesystem_mirror {{ path = "{mirror}" }}\n}}\n' if mirror else ""
    )
    environment = {"TF_CLI_CONFIG_FILE": str(settings), "CHECKPOINT_DISABLE": "1"}
    terraform = Terraform(scratch / "install", environment, data)
    terraform.run("init", "-backend=false")
    shutil.copy(terraform.folder / ".terraform.lock.hcl", data / "lock.hcl")
    return environment


def changes(plan: Plan) -> dict[str, dict[str, tuple[Any, Any]]]:
    """Returns the changed attributes of each resource, with values before and after. Addresses: see `resources`."""
    found = {}
    for resource in plan.get("resource_changes", []):
        change = resource["change"]
        if resource["mode"] == "managed" and change["actions"] != ["no-op"]:
            before, after = change["before"] or {}, change["after"] or {}
            names = {*before, *after, *(change["after_unknown"] or {})}
            found[_inside(resource["address"])] = {
                name: (before.get(name), after.get(name, "unknown"))
                for name in sorted(names)
                if _without_empty(before.get(name)) != _without_empty(after.get(name))
            }
    return found


def warnings(plan: Plan) -> list[str]:
    """Returns the messages of failed checks."""
    instances = [instance for check in plan["checks"] for instance in check["instances"] or []]
    return [problem["message"] for instance in instances for problem in instance.get("problems") or []]


def resources(values: Plan) -> list[dict[str, Any]]:
    """Returns the managed resources in a plan or a state, with their addresses inside the module of the cluster."""
    modules = [values["root_module"], *values["root_module"].get("child_modules", [])]
    found = [item for module in modules for item in module.get("resources", []) if item["mode"] == "managed"]
    return [{**item, "address": _inside(item["address"])} for item in found]


def _inside(address: str) -> str:
    return address.removeprefix("module.cluster.")


def _without_empty(value: Any) -> Any:
    """Returns the value without empty parts, which the provider does not distinguish from missing ones."""
    if isinstance(value, dict):
        return {key: _without_empty(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_without_empty(entry) for entry in value]
    return None if value == "" else value


def _mirror() -> Path | None:
    """Returns a folder with providers in the format of Terraform's file system mirrors, where packages install them."""
    named = os.environ.get("TF_PLUGIN_MIRROR")
    roots = [Path(named)] if named else [Path("/opt"), Path("/usr/local/share"), Path("/usr/share"), Path.home()]
    folders = (folder for root in roots for at in ("*", "*/*", ".terraform.d/*") for folder in [root, *root.glob(at)])
    return next((folder for folder in folders if (folder / PROVIDER).is_dir()), None)
