"""Ape-X over ZeroMQ: distributed prioritized experience replay (Horgan et al. 2018).

    import apex

    config = apex.preset("cartpole", seed=2, run={"max_minutes": 5})
    run = apex.train(config)                      # as `apex train` does; Ctrl-C ends it in order
    print(apex.evaluate(run, episodes=100).mean)  # as `apex evaluate` does
    policy = apex.load_policy(run)                # observation -> action

Everything is imported when it is first asked for: `import apex` alone loads neither NumPy nor torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from apex.version import VERSION

if TYPE_CHECKING:
    from apex.config import Config
    from apex.config.presets import preset
    from apex.environments.fault_budget import EnvironmentFailure
    from apex.errors import ConfigError
    from apex.evaluation.command import Evaluation, evaluate
    from apex.evaluation.export.command import export
    from apex.evaluation.policy import Policy, load_policy
    from apex.launch.api import Run, TrainingError, preset_for, train

__version__ = VERSION

__all__ = [
    "Config",
    "ConfigError",
    "EnvironmentFailure",
    "Evaluation",
    "Policy",
    "Run",
    "TrainingError",
    "evaluate",
    "export",
    "load_policy",
    "preset",
    "preset_for",
    "train",
]

_HOMES = {  # module -> what it has of the names above
    "config": ("Config",),
    "config.presets": ("preset",),
    "environments.fault_budget": ("EnvironmentFailure",),
    "errors": ("ConfigError",),
    "evaluation.command": ("Evaluation", "evaluate"),
    "evaluation.export.command": ("export",),
    "evaluation.policy": ("Policy", "load_policy"),
    "launch.api": ("Run", "TrainingError", "preset_for", "train"),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            value = getattr(importlib.import_module(f"apex.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'apex' has no attribute {name!r}; there are {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
