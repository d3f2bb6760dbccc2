"""All settings of a run. `tree` defines them with default, unit, range and source; `codec` reads and writes TOML."""

from apex.config.addresses import TransportConfig as TransportConfig
from apex.config.codec import dump_toml as dump_toml
from apex.config.codec import flatten as flatten
from apex.config.codec import from_dict as from_dict
from apex.config.codec import from_saved as from_saved
from apex.config.codec import lay_over as lay_over
from apex.config.codec import load_toml as load_toml
from apex.config.codec import to_dict as to_dict
from apex.config.dpg import DpgConfig as DpgConfig
from apex.config.iqn import IqnConfig as IqnConfig
from apex.config.r2d2 import R2d2Config as R2d2Config
from apex.config.sac import SacConfig as SacConfig
from apex.config.tree import ActorConfig as ActorConfig
from apex.config.tree import CheckpointConfig as CheckpointConfig
from apex.config.tree import Config as Config
from apex.config.tree import EnvironmentConfig as EnvironmentConfig
from apex.config.tree import EvaluatorConfig as EvaluatorConfig
from apex.config.tree import LearnerConfig as LearnerConfig
from apex.config.tree import NetworkConfig as NetworkConfig
from apex.config.tree import ReplayConfig as ReplayConfig
from apex.config.tree import RunConfig as RunConfig
