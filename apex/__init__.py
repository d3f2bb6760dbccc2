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
    from apex.agent import Policy, load_policy
    from apex.config import Config
    from apex.errors import ConfigError
    from apex.evaluation import Evaluation, evaluate
    from apex.patience import EnvironmentFailure
    from apex.presets import preset
    from apex.training import Run, TrainingError, preset_for, train
    from apex.weights import export

__version__ = VERSION

__all__ = [
    "Config",
    "ConfigError",
    "EnvironmentFailure",
    "Evaluation",
    "Policy",
    "Run",
    "TrainingError",
    "__version__",
    "evaluate",
    "export",
    "load_policy",
    "preset",
    "preset_for",
    "train",
]

_HOMES = {  # Must not be called as what is in them: importing apex.x binds the name x here to that module.
    "agent": ("Policy", "load_policy"),
    "config": ("Config",),
    "errors": ("ConfigError",),
    "evaluation": ("Evaluation", "evaluate"),
    "patience": ("EnvironmentFailure",),
    "presets": ("preset",),
    "training": ("Run", "TrainingError", "preset_for", "train"),
    "weights": ("export",),
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
