"""Loads a trained policy as a function from observations to actions."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from apex.algorithms.interface import Agent, RecurrentAgent, forget
from apex.config.validation import Probability, checked
from apex.environments.answers import MASK, BadAnswerError, read_mask
from apex.environments.factory import describe
from apex.environments.single import AgentEnvironment
from apex.environments.translator import Translator
from apex.runs.checkpoints.policy_file import PolicyInfo, read_policy
from apex.runs.find_policy import find_policy
from apex.runtime import trust
from apex.schema import Schema
from apexreplay.errors import UsageError, require
from apexreplay.item_kinds import Array

EPSILON = (
    "probability of a random action, 0.001 by default; continuous actions: standard deviation of noise, for SAC a "
    "factor on that of the policy, default 0"
)


RUN = "a run folder, or its name below runs/ (default: the newest run)"


def add_policy(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that choose a policy: RUN, --checkpoint and --allow."""
    parser.add_argument("run", nargs="?", metavar="RUN", help=RUN)
    parser.add_argument(
        "--checkpoint",
        metavar="best|last|PATH",
        help="policy to use (default: best if the run has a best policy, otherwise last)",
    )
    trust.add_allow(parser)


def load_policy(
    run: str | os.PathLike[str],
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    epsilon: float = 0.0,
    seed: int = 0,
    allow: str | Iterable[str] = (),
) -> Policy:
    """Loads the policy of a run, on the CPU.

    `run` is the result of `apex.train`, a run folder or its name below runs/, the folder of a checkpoint, or a file of
    weights: best.safetensors, or model.safetensors of `apex export`. For a run, `checkpoint` is "best" (the evaluator's
    best policy), "last", or a path; None: the best if there is one, otherwise the last. `epsilon` is the probability of
    a random action, and `seed` is the seed of these random choices. `allow`: modules that files may name, other than
    those with which you have trained here, as the option --allow.

    Raises UsageError if the policy is missing or damaged, names another module, or if epsilon is outside 0 ... 1. A
    custom network (network.factory) must be importable.
    """
    checked("epsilon", Probability, epsilon)
    trust.allow(allow)
    path = find_policy(run, checkpoint)
    info, agent = read_policy(path)
    return Policy(info, agent, path=path, epsilon=epsilon, seed=seed)


class Policy:
    """The epsilon-greedy policy of a trained network; for continuous actions, the network's action plus noise.

    `policy(observation)` takes what `env.reset` and `env.step` of the environment return, and returns what `env.step`
    takes::

        policy = apex.load_policy("runs/my-run")
        env = gymnasium.make("Pendulum-v1")
        observation, _ = env.reset()
        observation, reward, *_ = env.step(policy(observation))

    If the network sees the last S > 1 frames, as of Atari, or is recurrent, call `reset` when an episode begins; of a
    `gymnasium.vector` environment, name those that begin one. An Atari game is played as Gymnasium shows it,
    `gymnasium.make("ALE/Pong-v5", repeat_action_probability=0)`, or with `environment.sticky_actions`. Training also
    takes the maximum of the last two frames of the emulator, and presses FIRE when a game begins and, with
    `environment.fire_after_life_loss`, after each lost life; only `make_environment` does this. Without FIRE, games
    such as Breakout do not begin.

    `act` and `q_values` take prepared observations, as `prepare` and the environment of `make_environment` return them:

    - vectors: float32[D], the environment's observation, flattened as by `gymnasium.spaces.flatten` (a Discrete is
      one-hot). Nothing is normalised.
    - images and grids: uint8[H, W] or [H, W, C]; of Atari, gray.
    - dictionaries and other observations of several parts: uint8[F], their bytes as `info.schema.parts` lists them.

    With S > 1 stacked frames, as for Atari, they have one more axis in front: [S, ...], the newest frame last, with
    zeros before an episode's first frame.
    """

    def __init__(self, info: PolicyInfo, agent: Agent, *, path: Path, epsilon: float = 0.0, seed: int = 0) -> None:
        self.info = info  # schema, environment, network, updates; the evaluator's score if this is the best policy
        self.network = agent.network  # frame_dtype[B, S, *F] -> float32[B, A]; a recurrent one also takes the state
        self._agent = agent
        self.path = path  # file or folder that was loaded
        self.epsilon = epsilon
        self._rng = np.random.default_rng(seed)

    def __repr__(self) -> str:
        return f"Policy({self.info.environment.id}, {self.info.num_updates:,} updates, epsilon {self.epsilon:g})"

    def __call__(self, observation: Any, mask: Any = None) -> Any:
        """Returns the environment's own action for its own observation, or a batch of actions for a batch.

        Batches are those of a `gymnasium.vector` environment: each array has one more axis, in front. `mask` is
        `info["action_mask"]`; None: all actions are allowed. Raises UsageError if the observation does not belong to
        the observation space, if the environment cannot be created to read its spaces, or if a mask is missing.
        """
        batch, is_one = self._translator.prepare(observation)
        return self._translator.convert(self._choose(batch, mask), is_one=is_one)

    def reset(self, ended: ArrayLike | None = None) -> None:
        """Forgets the previous episode. Only policies that see several frames, and recurrent ones, remember it.

        `ended`, bool[B]: the environments of a batch whose next observation is the first of an episode; None: all, and
        the next batch may have another size. Raises UsageError if it has another shape or dtype.
        """
        state, rows = self.state, None if ended is None else np.asarray(ended)
        if rows is not None:
            of_state = None if state is None else len(state)
            known = [number for number in (of_state, self._translator.num_environments) if number is not None]
            problem = f"ended must be bool[{known[0] if known else 'B'}], got {rows.dtype}{list(rows.shape)}"
            fits = rows.dtype == np.bool_ and rows.ndim == 1 and all(number == len(rows) for number in known)
            require(fits, problem, remedy="call Policy.reset without arguments to change the number of environments")
        forget(self._agent, rows)
        self._translator.reset(rows)

    @property
    def state(self) -> NDArray[np.float32] | None:
        """The state of a recurrent policy before its next observation, float32[B, D], of a batch of B environments.

        None: at the beginning of an episode, or if the policy is not recurrent. Every choice of actions advances it.
        Assign it to continue from another state, and set rows to 0 where an episode has ended. Assigning raises
        UsageError if the policy is not recurrent, or if the shape is another one.
        """
        state: NDArray[np.float32] | None = getattr(self._agent, "state", None)
        return state

    @state.setter
    def state(self, state: NDArray[np.float32] | None) -> None:
        size = self.info.schema.state_size
        require(size > 0, f"the policy of {self.info.environment.id} is not recurrent: it has no state")
        given = None if state is None else np.asarray(state, np.float32)
        problem = f"the state must be float32[B, {size}], got {None if given is None else list(given.shape)}"
        require(given is None or given.shape == (len(given), size), problem)
        cast(RecurrentAgent, self._agent).state = given

    def prepare(self, observation: Any) -> Array:
        """Converts an observation of the environment, or a batch, to the format that the network was trained on.

        If the network sees several frames, adds it to those since `reset`.
        """
        batch, is_one = self._translator.prepare(observation)
        one = batch if self.info.schema.stack > 1 else batch[:, 0]
        return one[0] if is_one else one

    def act(self, observation: Any, mask: Any = None) -> int | Array:
        """Returns the agent's action for a prepared observation: an int; for a batch, int64[B].

        Discrete actions are 0 ... A - 1, counted from the action space's `start`, which is usually 0; each combination
        of a MultiDiscrete or MultiBinary is one action. Continuous actions are float32[K] or [B, K] in -1 ... 1, where
        -1 and 1 stand for the environment's own bounds; `epsilon` is then the standard deviation of normal noise.

        `mask`, bool[A] or [B, A]: the allowed actions; None: all. Raises UsageError if the observation has another
        shape or dtype, or if the policy was trained with masks and `mask` is None.
        """
        batch, is_one = self._batch(observation)
        actions = self._choose(batch, mask)
        if not is_one:
            return actions
        return actions[0] if self.info.schema.action_size else int(actions[0])

    def q_values(self, observation: Any) -> NDArray[np.float32]:
        """Returns float32[A] for one prepared observation, float32[B, A] for a batch.

        Raises UsageError if the policy has no Q-values.
        """
        batch, is_one = self._batch(observation)
        q_values: Callable[[Array], NDArray[np.float32]] | None = getattr(self._agent, "q_values", None)
        if q_values is None:
            raise UsageError(f"the policy of {self.info.environment.id} has no Q-values: its algorithm is not DQN")
        self._check_state(len(batch))
        q = q_values(batch)
        return q[0] if is_one else q

    def make_environment(self, render_mode: str | None = None) -> AgentEnvironment:
        """Creates an environment as in training, with prepared observations and the agent's actions; see `act`."""
        return AgentEnvironment(self.info.environment, self.info.schema, render_mode=render_mode)

    @cached_property
    def _translator(self) -> Translator:
        return Translator(self.info.environment)

    def _choose(self, batch: Array, mask: Any) -> Array:
        """Returns the agent's actions for frame_dtype[B, S, *F]."""
        problem = f"{self.info.environment.id} has action masks, but no mask is given"
        is_complete = mask is not None or not self.info.schema.masked
        require(is_complete, problem, remedy='pass info["action_mask"] as the second argument')
        allowed = None if mask is None else self._mask(mask, len(batch))
        self._check_state(len(batch))
        return self._agent.act(batch, allowed, self.epsilon, self._rng)

    def _check_state(self, size: int) -> None:
        """Raises UsageError if the policy remembers another number of environments."""
        known = size if self.state is None else len(self.state)
        problem = f"the policy remembers {known} environments, but this batch has {size} observations"
        require(known == size, problem, remedy="call Policy.reset, or set Policy.state to None, when episodes begin")

    def _mask(self, mask: Any, size: int) -> NDArray[np.bool_]:
        """Checks an action mask; returns bool[B, A]."""
        if isinstance(mask, tuple):  # as `MultiDiscrete.sample` expects it
            try:
                mask = read_mask({MASK: mask}, self.info.schema.num_actions)
            except BadAnswerError as error:
                raise UsageError(f"{self.info.environment.id} {error}") from error
        allowed = np.asarray(mask)
        shape = (size, self.info.schema.num_actions)
        require(
            allowed.size == size * shape[1] and allowed.shape[-1:] == shape[1:],
            f"an action mask of {self.info.environment.id} must be bool[{shape[1]}] for one observation, or "
            f"bool[{size}, {shape[1]}] for a batch of {size}; got {list(allowed.shape)}",
        )
        allowed = allowed.reshape(shape).astype(np.bool_)
        require(bool(allowed.any(1).all()), "an action mask must allow at least one action in every observation")
        return allowed

    def _batch(self, observation: Any) -> tuple[Array, bool]:
        """Returns a batch, frame_dtype[B, S, *F], and whether `observation` is a single observation.

        `observation` may lack axis S if S is 1.
        """
        schema, array = self.info.schema, np.asarray(observation)
        stack, one = schema.observation_shape, schema.observation_shape if schema.stack > 1 else schema.frame_shape
        if array.shape != one and array.shape[1:] not in (one, stack):
            dims = ", ".join(map(str, one))
            raise UsageError(
                f"a prepared observation of {self.info.environment.id} must be {schema.frame_dtype}[{dims}], or a "
                f"batch {schema.frame_dtype}[B, {dims}]; got {array.dtype}{list(array.shape)}",
                "prepare the environment's own observations with Policy.prepare, or call the policy itself",
            )
        fits = array.dtype == np.uint8 if schema.frame_dtype == "uint8" else array.dtype.kind in "biuf"
        require(fits, f"observations of {self.info.environment.id} must be {schema.frame_dtype}, got {array.dtype}")
        return np.require(array.reshape(-1, *stack), schema.frame_dtype, ["C", "W"]), array.shape == one


def require_fit(path: Path, info: PolicyInfo) -> None:
    """Raises UsageError if the environment on this machine differs from the one that the policy was trained in."""
    here, trained = _interface(describe(info.environment, info.schema.n_step)), _interface(info.schema)
    require(here == trained, f"{info.environment.id} has {here} on this machine, but {path} was trained with {trained}")


def _interface(schema: Schema) -> str:
    shape = ", ".join(map(str, schema.observation_shape))
    seen = schema.observations if schema.parts else f"{schema.frame_dtype}[{shape}]"
    return f"{seen} and {schema.actions}"
