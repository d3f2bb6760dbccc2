"""Determines the algorithm of a run, the configured one or the default for the actions, and whether it is wide.

Does not import torch.
"""

from dataclasses import replace

from apex.config.built_in import ALGORITHMS
from apex.config.codec import flatten
from apex.config.tree import Config, NetworkConfig
from apex.schema import Schema
from apexreplay.errors import require

STATE_ARRAYS = 2  # of an LSTM: hidden and cell state
WIDE_ENOUGH = 0.5  # minimum width at which bfloat16 is faster on CPUs that support it: Pong, 26 ms instead of 29 ms
KINDS = {False: "discrete", True: "continuous"}


def _settings_of_dqn() -> list[str]:
    """Returns the settings that DPG and SAC do not read."""
    network = (f"network.{name}" for name in NetworkConfig.field_types() if name != "factory")
    return [*network, "learner.target", "learner.centered_gradients", "actor.epsilon_base", "actor.epsilon_exponent"]


def choose_algorithm(config: Config, schema: Schema) -> str:
    """Returns a key of `ALGORITHMS` or package.module:factory. Raises UsageError if it does not fit the actions."""
    is_continuous = schema.action_size > 0
    name = config.algorithm or next(name for name, each in ALGORITHMS.items() if each.continuous == is_continuous)
    built_in = ALGORITHMS.get(name)
    if built_in:
        require_actions(config, schema, name, continuous=built_in.continuous)
    if built_in and is_continuous:
        problem = f"dpg.normalize_observations works only for vectors, but the observations are {schema.observations}"
        require(schema.is_vector or not config.dpg.normalize_observations, problem, remedy="set it to false")
        values, defaults = flatten(config), flatten(Config())
        for setting in ("learner.bfloat16", "actor.bfloat16"):
            problem = f"{setting} is 'on', but {name.upper()} uses float32 only"
            require(values[setting] != "on", problem, remedy=f"set --{setting} off")
        for setting in _settings_of_dqn():
            problem = f"{setting} {values[setting]!r} belongs to DQN, but this environment has continuous actions"
            require(
                values[setting] == defaults[setting], problem, remedy="leave it out, or the preset or file that sets it"
            )
    shift = config.learner.random_shift
    require(
        not shift or schema.has_images,
        f"learner.random_shift {shift} is for images, but {config.environment.id} has none",
        remedy="use 0",
    )
    require(
        not schema.masked or config.learner.target == "double_q",
        f"learner.target {config.learner.target!r} supports no action masks, but {config.environment.id} has them",
        remedy="use double_q",
    )
    return name


def with_sequences(config: Config, schema: Schema) -> Schema:
    """Returns the schema with the sequences of a recurrent algorithm; unchanged for any other algorithm.

    Raises UsageError if the algorithm is recurrent and an observation has more than one frame.
    """
    built_in = ALGORITHMS.get(config.algorithm)
    if built_in is None or not built_in.recurrent:
        return schema
    problem = f"algorithm {config.algorithm!r} sees one frame at a time, but the observations have {schema.stack}"
    require(schema.stack == 1, problem, remedy="set --environment.frame-stack 1: its state remembers earlier frames")
    r2d2 = config.r2d2
    return replace(
        schema,
        sequence_length=r2d2.sequence_length,
        sequence_period=r2d2.period(config.actor.n_step),
        state_size=STATE_ARRAYS * r2d2.units,
    )


def require_actions(config: Config, schema: Schema, algorithm: str, *, continuous: bool) -> None:
    """Raises UsageError unless the actions of the environment are of the kind that `algorithm` learns."""
    found = schema.action_size > 0
    problem = f"algorithm {algorithm!r} learns {KINDS[continuous]} actions, but the actions of {config.environment.id} "
    require(found == continuous, f"{problem}are {KINDS[found]}", remedy="leave --algorithm out")


def is_wide(network: NetworkConfig, schema: Schema) -> bool:
    """Returns whether a network for images has at least half of the paper's width. A custom network counts as wide."""
    return bool(network.factory) or (schema.has_images and network.width >= WIDE_ENOUGH)
