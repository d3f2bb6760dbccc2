"""Ape-X over ZeroMQ: distributed prioritized experience replay (Horgan et al. 2018).

    import apex

    config = apex.preset("cartpole", seed=2, run={"max_minutes": 5})
    run = apex.train(config)                      # as `apex train` does; Ctrl-C ends the run cleanly
    print(apex.evaluate(run, episodes=100).mean)  # as `apex evaluate` does
    policy = apex.load_policy(run)                # what env.step returned -> what env.step takes

Each name is imported at its first use: `import apex` alone loads neither NumPy nor torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from apex.version import VERSION

if TYPE_CHECKING:
    from apex.config import Config
    from apex.config.presets import preset
    from apex.errors import ConfigError, EnvironmentFailure, TrainingError
    from apex.evaluation.command import Evaluation, evaluate
    from apex.evaluation.export.command import export
    from apex.evaluation.policy import Policy, load_policy
    from apex.launch.api import Run, preset_for, train
    from apex.launch.callbacks import Callback, LiveRun
    from apex.launch.engine import RayEngine
    from apex.launch.trackers.mlflow import MlflowTracker
    from apex.launch.trackers.wandb import WandbTracker
    from apex.runs.plots.command import plot
    from apex.runs.report.command import report
    from apexreplay.errors import ApexError, DataError, UsageError

__version__ = VERSION

__all__ = [
    "ApexError",
    "Callback",
    "Config",
    "ConfigError",
    "DataError",
    "EnvironmentFailure",
    "Evaluation",
    "LiveRun",
    "MlflowTracker",
    "Policy",
    "RayEngine",
    "Run",
    "TrainingError",
    "UsageError",
    "WandbTracker",
    "evaluate",
    "export",
    "load_policy",
    "plot",
    "preset",
    "preset_for",
    "report",
    "train",
]

_HOMES = {  # module -> the names in `__all__` that it defines
    "config": ("Config",),
    "config.presets": ("preset",),
    "errors": ("ApexError", "ConfigError", "DataError", "EnvironmentFailure", "TrainingError", "UsageError"),
    "evaluation.command": ("Evaluation", "evaluate"),
    "evaluation.export.command": ("export",),
    "evaluation.policy": ("Policy", "load_policy"),
    "launch.api": ("Run", "preset_for", "train"),
    "launch.callbacks": ("Callback", "LiveRun"),
    "launch.engine": ("RayEngine",),
    "launch.trackers.mlflow": ("MlflowTracker",),
    "launch.trackers.wandb": ("WandbTracker",),
    "runs.plots.command": ("plot",),
    "runs.report.command": ("report",),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            value = getattr(importlib.import_module(f"apex.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'apex' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
