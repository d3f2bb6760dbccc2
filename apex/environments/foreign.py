"""Which modules outside this package a configuration imports by their names, and whether the user trusts them."""

import re
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, parse_env_id
from gymnasium.envs.registration import namespace as gymnasium_namespace

from apex.config import Config
from apex.environments.mujoco import DM_CONTROL
from apex.errors import ConfigError
from apex.runtime.trust import allow, package_of, require_trusted
from apexreplay.errors import require

SCRIPT = "__main__"  # module of the code that a notebook cell or a script defines; each process has another one
PLUGINS = "gymnasium.envs"  # group of entry points
# Packages whose registered environments every file and every learner may name, and the script that the user runs.
TRUSTED = ("gymnasium", "ale_py", SCRIPT)

_registered: list[EntryPoint] = []  # that this process has called


def environment_modules(name: str) -> list[str]:
    """Returns the modules that creating the environment `name` imports; none for those of Gymnasium and ALE.

    An id that another package has registered stands for the modules of its environment, in all versions.
    """
    first, colon, rest = name.partition(":")
    named, trusted, registered = ([first], (*TRUSTED, package_of(first)), rest) if colon else ([], TRUSTED, name)
    if colon and rest.isidentifier():
        return named
    modules = {_module_of(spec.entry_point) for spec in _specs(registered) if spec.entry_point is not None}
    modules |= {entry.module for entry in registrations(name)}
    return named + sorted(module for module in modules if package_of(module) not in trusted)


def registrations(name: str) -> list[EntryPoint]:
    """Returns the functions of installed packages that register the namespace of `name` (MinAtar/Breakout-v1).

    Gymnasium 1 does not call them any more. Imports nothing.
    """
    namespace, _ = _parse(name.rpartition(":")[2])
    found = entry_points(group=PLUGINS, name=namespace) if namespace else ()
    return [entry for entry in found if re.fullmatch(r"[\w.]+:\w+", entry.value)]


def register(name: str) -> None:
    """Registers the namespace of `name` if the name is not known. The user trusts its `environment_modules`."""
    if not _specs(name.rpartition(":")[2]):
        for entry in registrations(name):
            if entry not in _registered:
                with gymnasium_namespace(entry.name):
                    entry.load()()
                _registered.append(entry)
                allow(environment_modules(name))  # It may have named other modules.


def _specs(name: str) -> list[EnvSpec]:
    """Returns what is registered under the name, in all versions."""
    place = _parse(name)
    return [spec for spec in gymnasium.registry.values() if (spec.namespace, spec.name) == place]


def _parse(name: str) -> tuple[str | None, str]:
    """Returns namespace and name of an id; none and "" if it is not one, or is one of dm_control's."""
    if not name.startswith(DM_CONTROL):
        with suppress(gymnasium.error.Error):
            namespace, plain, _ = parse_env_id(name)
            return namespace, plain
    return None, ""


def _module_of(entry_point: str | Callable[..., Any]) -> str:
    if isinstance(entry_point, str):
        return entry_point.partition(":")[0]
    return getattr(entry_point, "__module__", "") or type(entry_point).__module__  # A partial has no module of its own.


def require_trust(config: Config, *, given: bool = False) -> list[str]:
    """Returns the modules that a configuration names. Raises UsageError unless the user trusts all. Imports nothing.

    `given`: the user of this process, or a learner whose key the user has, has given the names, so they are trusted.
    Names of `__main__` are always refused, because the other programs of a run have another `__main__`.
    """
    names = [("environment.id", config.environment.id, module) for module in environment_modules(config.environment.id)]
    others = (("network.factory", config.network.factory), ("algorithm", config.algorithm))
    names += [(setting, value, value.partition(":")[0]) for setting, value in others if ":" in value]
    spec = gymnasium.registry.get(config.environment.id)
    if getattr(spec and spec.entry_point, "__module__", "") == SCRIPT:
        names.append(("environment.id", config.environment.id, SCRIPT))
    for setting, value, module in names:
        problem = f"{setting} {value!r}: the programs of a run cannot import what a notebook cell or a script defines"
        remedy = "save it as a module (in a notebook: %%writefile my_env.py), and give my_env:NAME"
        require(module != SCRIPT, problem, ConfigError, remedy=remedy)
        if given:
            allow(module)
        else:
            require_trusted(setting, value, module)
    return [module for *_, module in names]
