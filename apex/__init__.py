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
    from apex.config import Config as Config
    from apex.config.presets import preset as preset
    from apex.errors import ConfigError as ConfigError
    from apex.errors import EnvironmentFailure as EnvironmentFailure
    from apex.errors import TrainingError as TrainingError
    from apex.evaluation.command import Evaluation as Evaluation
    from apex.evaluation.command import evaluate as evaluate
    from apex.evaluation.export.command import export as export
    from apex.evaluation.policy import Policy as Policy
    from apex.evaluation.policy import load_policy as load_policy
    from apex.launch.api import Run as Run
    from apex.launch.api import preset_for as preset_for
    from apex.launch.api import resume as resume
    from apex.launch.api import train as train
    from apex.launch.callbacks import Callback as Callback
    from apex.launch.callbacks import LiveRun as LiveRun
    from apex.launch.engine import RayEngine as RayEngine
    from apex.launch.trackers.mlflow import MlflowTracker as MlflowTracker
    from apex.launch.trackers.wandb import WandbTracker as WandbTracker
    from apex.runs.plots.command import plot as plot
    from apex.runs.report.command import report as report
    from apexreplay.errors import ApexError as ApexError
    from apexreplay.errors import DataError as DataError
    from apexreplay.errors import UsageError as UsageError

__version__ = VERSION

_HOMES = {  # module -> the public names that it defines
    "config": ("Config",),
    "config.presets": ("preset",),
    "errors": ("ApexError", "ConfigError", "DataError", "EnvironmentFailure", "TrainingError", "UsageError"),
    "evaluation.command": ("Evaluation", "evaluate"),
    "evaluation.export.command": ("export",),
    "evaluation.policy": ("Policy", "load_policy"),
    "launch.api": ("Run", "preset_for", "resume", "train"),
    "launch.callbacks": ("Callback", "LiveRun"),
    "launch.engine": ("RayEngine",),
    "launch.trackers.mlflow": ("MlflowTracker",),
    "launch.trackers.wandb": ("WandbTracker",),
    "runs.plots.command": ("plot",),
    "runs.report.command": ("report",),
}
__all__ = sorted(name for names in _HOMES.values() for name in names)


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            value = getattr(importlib.import_module(f"apex.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'apex' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
