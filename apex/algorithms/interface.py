"""The interface of an algorithm. Trainer, actors, evaluator, policies and export use nothing else of an algorithm.

`make_algorithm` creates the algorithm that a configuration names. Axes: E environments, A discrete actions, K numbers
of a continuous action, B batch, S stacked frames, *F one frame.
"""

import importlib
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from apex.algorithms.gradient_step import Update
from apex.config import Config
from apex.config.algorithm_choice import choose_algorithm
from apex.config.built_in import ALGORITHMS
from apex.runtime.importer import call_factory
from apex.schema import Schema
from apex.types import Exploration
from apexreplay.errors import require
from apexreplay.item_kinds import Array

Mask = NDArray[np.bool_] | None  # [E, A]  whether each action is allowed; None: all are allowed


class Decision(NamedTuple):
    """The actions that an agent chooses in E states, and their values."""

    action: Array  # int64[E], or float32[E, K] in -1 ... 1
    state_value: NDArray[np.float32]  # [E]  Q-value of the greedy action, from which n-step returns bootstrap
    value: Callable[[Array], NDArray[np.float32]]  # function from executed actions to Q(s, a), float32[E]


def check_allowed(action: Array, mask: Mask) -> None:
    """Raises ValueError if the mask forbids one of the actions, int64[E], which only a custom algorithm can choose."""
    if mask is not None and not mask[np.arange(len(mask)), action].all():
        raise ValueError(f"the algorithm chose actions {action.tolist()}, one of which its action mask forbids")


class Agent(Protocol):
    """Chooses actions with a network. `exploration`: amount as in `Algorithm.exploration`, such as epsilon; 0: greedy.

    The number of draws from `rng` depends only on shapes, so a seed gives the same exploration for any parameters of
    the network.
    """

    @property
    def network(self) -> nn.Module:
        """The network. A change of its parameters takes effect at the next decision."""

    def decide(
        self, observation: Array, mask: Mask, exploration: NDArray[np.float64], rng: np.random.Generator
    ) -> Decision:
        """Chooses actions for observations frame_dtype[E, S, *F]; `exploration`: float64[E]."""

    def state_value(self, observation: Array, mask: Mask) -> NDArray[np.float32]:
        """Returns only `Decision.state_value`, float32[E], for states in which no action is executed."""

    def act(self, observation: Array, mask: Mask, exploration: float, rng: np.random.Generator) -> Array:
        """Chooses actions as `decide` does, with the same `exploration` for all E states; returns only the actions."""


class RecurrentAgent(Agent, Protocol):
    """An agent that remembers what it has seen. `decide` and `act` advance its state by one step; nothing else does."""

    state: NDArray[np.float32] | None  # [E, D]  before the next observation; None: all zero, for any E

    def forget(self, ended: NDArray[np.bool_] | None = None) -> None:
        """Sets the state to zero in environments whose episode has ended, bool[E]; None: in all, and E may change."""


def forget(agent: Agent, ended: NDArray[np.bool_] | None = None) -> None:
    """Calls `forget` of a recurrent agent; does nothing for any other agent."""
    if (clear := getattr(agent, "forget", None)) is not None:
        clear(ended)


class Algorithm(Protocol):
    """A learning algorithm, created by `factory(config, schema)` from the whole configuration and a schema.

    To play a policy file, it is created without `run` and `transport`, which then have their defaults.
    """

    name: str

    def exploration(self, num_actors: int) -> Exploration:
        """Returns how much each of N actors explores; the last actor explores least."""

    def make_network(self) -> nn.Module:
        """Returns a network, initialized with the configured seed. Its state dict must contain only float32 tensors.

        If it contains `nn.ReLU` modules, the trainer also calls it with batches of observations, see `DormantUnits`.
        """

    def make_agent(self, network: nn.Module, *, bfloat16: bool = False) -> Agent:
        """Returns an agent that runs the network on the CPU, in bfloat16 if `bfloat16`, which the CPU must support."""

    def make_optimizer(self, online: nn.Module) -> torch.optim.Optimizer:
        """Returns an optimizer for the parameters of `online`, which are already on their device."""

    def make_update(
        self, online: nn.Module, target: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
    ) -> Update:
        """Returns the gradient step. The process that runs the step must call torch.set_num_threads(torch_threads)."""


def make_algorithm(config: Config, schema: Schema) -> Algorithm:
    """Returns the algorithm that the configuration names, or the default one for this kind of actions.

    Raises UsageError if the algorithm does not fit the environment, ConfigError if the name is unknown.
    """
    name = choose_algorithm(config, schema)
    if ":" not in name:
        module, _, attribute = ALGORITHMS[name].path.partition(":")
        algorithm: Algorithm = getattr(importlib.import_module(module), attribute)(config, schema)
        return algorithm
    custom: Algorithm = call_factory("algorithm", name, object, config, schema)
    missing = sorted(method for method in METHODS if not hasattr(custom, method))
    require(not missing, f"algorithm {name!r}: {type(custom).__name__} lacks {missing}", remedy="define them")
    return custom


METHODS = [name for name in (*vars(Algorithm), *Algorithm.__annotations__) if not name.startswith("_")]
