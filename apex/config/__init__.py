"""Every setting of a run: its default, unit, range and source. See `tree` for the settings and `codec` for TOML."""

from apex.config.codec import dump_toml, flatten, from_dict, load_toml, read_toml, to_dict
from apex.config.tree import (
    MAX_EPISODES,
    REPLAY_SOCKETS,
    SHARD_STEP,
    ActorConfig,
    CheckpointConfig,
    Config,
    EnvironmentConfig,
    EvaluatorConfig,
    LearnerConfig,
    NetworkConfig,
    ReplayConfig,
    RunConfig,
    TransportConfig,
)

__all__ = [
    "MAX_EPISODES",
    "REPLAY_SOCKETS",
    "SHARD_STEP",
    "ActorConfig",
    "CheckpointConfig",
    "Config",
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
    "load_toml",
    "read_toml",
    "to_dict",
]
