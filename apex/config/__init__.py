"""All settings of a run. `tree` defines them with default, unit, range and source; `codec` reads and writes TOML."""

from apex.config.addresses import TransportConfig
from apex.config.codec import dump_toml, flatten, from_dict, from_saved, lay_over, load_toml, to_dict
from apex.config.dpg import DpgConfig
from apex.config.tree import (
    ActorConfig,
    CheckpointConfig,
    Config,
    EnvironmentConfig,
    EvaluatorConfig,
    LearnerConfig,
    NetworkConfig,
    ReplayConfig,
    RunConfig,
)

__all__ = [
    "ActorConfig",
    "CheckpointConfig",
    "Config",
    "DpgConfig",
    "EnvironmentConfig",
    "EvaluatorConfig",
    "LearnerConfig",
    "NetworkConfig",
    "ReplayConfig",
    "RunConfig",
    "TransportConfig",
    "dump_toml",
    "flatten",
    "from_dict",
    "from_saved",
    "lay_over",
    "load_toml",
    "to_dict",
]
