"""Which modules outside this package a configuration imports by their names, and whether the user trusts them."""

import gymnasium
from gymnasium.envs.registration import parse_env_id

from apex.config import Config
from apex.environments.mujoco import DM_CONTROL
from apex.runtime.trust import allow, package_of, require_trusted

TRUSTED = ("gymnasium", "ale_py")  # packages whose registered environments every file and every learner may name


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
    """
    names = [("environment.id", config.environment.id, module) for module in environment_modules(config.environment.id)]
    others = (("network.factory", config.network.factory), ("algorithm", config.algorithm))
    names += [(setting, value, value.partition(":")[0]) for setting, value in others if ":" in value]
    for setting, value, module in names:
        if given:
            allow(module)
        else:
            require_trusted(setting, value, module)
    return [module for *_, module in names]
