"""A trained policy as a function from observations to actions."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from apex.config.validation import Probability, checked
from apex.dqn.exploration import epsilon_greedy
from apex.dqn.networks import q_values
from apex.environments.factory import describe
from apex.environments.single import AgentEnvironment
from apex.errors import ConfigError, require
from apex.runs.checkpoints.folder import find_latest
from apex.runs.checkpoints.paths import MANIFEST
from apex.runs.checkpoints.policy_file import PolicyInfo, find_best, read_policy
from apex.runs.folder import RunFolder
from apex.types import Array, Schema


def load_policy(
    run: str | os.PathLike[str],
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    epsilon: float = 0.0,
    seed: int = 0,
) -> Policy:
    """The policy of a run, on the CPU.

    `run` is what `apex.train` returned, a run folder or its name below runs/, a checkpoint's folder, or a file of
    weights: best.safetensors, or model.safetensors of `apex export`. For a run, `checkpoint` is "best" by its
    evaluator, "last", or a path; None is the best if there is one, else the last. `epsilon` is the probability of a
    random action, and `seed` the seed of these draws.

    Raises ConfigError if the policy is missing or damaged, or for an epsilon outside 0 ... 1. A custom network
    (network.factory) must be importable.
    """
    checked("epsilon", Probability, epsilon)
    path = find_policy(run, checkpoint)
    info, network = read_policy(path)
    return Policy(info, network, path=path, epsilon=epsilon, seed=seed)


class Policy:
    """The epsilon-greedy policy of a trained network.

    An observation is what the network was trained on:

    - vectors: float32[D], what the environment returns, flattened as `gymnasium.spaces.flatten` does (a Discrete is
      one-hot). Nothing is normalised.
    - images and Atari: uint8[S, H, W], the last S gray frames of H x W pixels, the newest last, with zeros before an
      episode's first frame. `make_environment` returns an environment that does this.

    Actions are 0 ... A - 1, counted from the action space's `start`, which is usually 0.
    """

    def __init__(
        self, info: PolicyInfo, network: nn.Module, *, path: Path, epsilon: float = 0.0, seed: int = 0
    ) -> None:
        self.info = info  # schema, environment, network, updates; the evaluator's score if it is the run's best
        self.network = network  # frame_dtype[B, S, *F] -> float32[B, A]
        self.path = path  # what was loaded
        self.epsilon = epsilon
        self._rng = np.random.default_rng(seed)

    def __repr__(self) -> str:
        return f"Policy({self.info.environment.id}, {self.info.num_updates:,} updates, epsilon {self.epsilon:g})"

    def __call__(self, observation: Any) -> int | NDArray[np.int64]:
        """The action for one observation, int64[B] for a batch. Raises ConfigError for another shape or dtype."""
        batch, is_one = self._batch(observation)
        q = q_values(self.network, batch)
        actions = epsilon_greedy(q, np.full(len(q), self.epsilon), self._rng)
        return int(actions[0]) if is_one else actions

    def q_values(self, observation: Any) -> NDArray[np.float32]:
        """float32[A] for one observation, float32[B, A] for a batch."""
        batch, is_one = self._batch(observation)
        q = q_values(self.network, batch)
        return q[0] if is_one else q

    def make_environment(self, render_mode: str | None = None) -> AgentEnvironment:
        """The environment that it was trained in; observations and actions need no conversion."""
        return AgentEnvironment(self.info.environment, self.info.schema, render_mode=render_mode)

    def _batch(self, observation: Any) -> tuple[Array, bool]:
        """frame_dtype[B, S, *F], and whether it was one observation. The axis of a stack of one may be missing."""
        schema, array = self.info.schema, np.asarray(observation)
        stack, one = schema.observation_shape, schema.observation_shape if schema.stack > 1 else schema.frame_shape
        if array.shape != one and array.shape[1:] not in (one, stack):
            dims = ", ".join(map(str, one))
            raise ConfigError(
                f"an observation of {self.info.environment.id} is {schema.frame_dtype}[{dims}], a batch of them "
                f"{schema.frame_dtype}[B, {dims}], got {array.dtype}{list(array.shape)}"
            )
        fits = array.dtype == np.uint8 if schema.frame_dtype == "uint8" else array.dtype.kind in "biuf"
        require(fits, f"observations of {self.info.environment.id} are {schema.frame_dtype}, got {array.dtype}")
        return np.require(array.reshape(-1, *stack), schema.frame_dtype, ["C", "W"]), array.shape == one


def find_policy(run: str | os.PathLike[str], checkpoint: str | os.PathLike[str] | None = None) -> Path:
    """The file or folder that `load_policy` reads; raises ConfigError if there is none."""
    path = Path(run)
    # A run named 7 has a manifest too, but also a folder of checkpoints.
    is_checkpoint = path.name.isdecimal() and (path / MANIFEST).is_file() and not (path / "checkpoints").is_dir()
    if path.is_file() or is_checkpoint:
        require(checkpoint is None, f"{path} is one policy: checkpoint chooses among those of a run")
        return path
    folder = RunFolder.open(path)
    choice = None if checkpoint is None else os.fspath(checkpoint)
    best = find_best(folder.checkpoints) if choice in (None, "best") else None
    if best is not None:
        return best
    require(choice != "best", f"{folder.path} has no best policy: no evaluation was finished; try --checkpoint last")
    if choice in (None, "last"):
        last = find_latest(folder.checkpoints).path
        if last is None:
            raise ConfigError(
                f"{folder.path} has neither a best policy nor a checkpoint yet: it was trained too shortly"
            )
        return last
    named = (Path(choice or ""), folder.checkpoints / (choice or ""))
    for candidate in named:
        if candidate.exists():
            return candidate
    raise ConfigError(f"--checkpoint must be best, last or a path, got {choice!r}: neither {named[0]} nor {named[1]}")


def require_fit(path: Path, info: PolicyInfo) -> None:
    """Raises ConfigError if the environment of that name here differs from the one the policy was trained in."""
    schema = describe(info.environment, info.schema.n_step)
    require(
        _interface(schema) == _interface(info.schema),
        f"{info.environment.id} is another environment here than the one that {path} was trained in: "
        f"{_interface(schema)}, not {_interface(info.schema)}",
    )


def _interface(schema: Schema) -> str:
    shape = ", ".join(map(str, schema.observation_shape))
    return f"{schema.frame_dtype}[{shape}] and {schema.num_actions} actions"
