"""Which modules outside this package a configuration imports by their names, and whether the user trusts them."""

import gymnasium
from gymnasium.envs.registration import parse_env_id

from apex.config import Config
from apex.environments.mujoco import DM_CONTROL
from apex.errors import ConfigError, require
from apex.runtime.trust import allow, package_of, require_trusted

TRUSTED = ("gymnasium", "ale_py")  # packages whose registered environments every file and every learner may name
SCRIPT = "__main__"  # module of the code that a notebook cell or a script defines; each process has another one


def environment_modules(name: str) -> list[str]:
    """Returns the modules that creating the environment `name` imports; none for those of Gymnasium and ALE.

    An id that another package has registered stands for the modules of its environment, in all versions.
    """
    module, colon, _ = name.partition(":")
    if colon:
        return [module]
    if name.startswith(DM_CONTROL):
        return []
    try:
        namespace, plain, _ = parse_env_id(name)
    except gymnasium.error.Error:
        return []
    specs = [spec for spec in gymnasium.registry.values() if (spec.namespace, spec.name) == (namespace, plain)]
    # An entry point that is a function is already imported.
    modules = {spec.entry_point.partition(":")[0] for spec in specs if isinstance(spec.entry_point, str)}
    return sorted(module for module in modules if package_of(module) not in TRUSTED)


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
