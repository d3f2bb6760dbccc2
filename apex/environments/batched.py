"""Plays a `gymnasium.vector.VectorEnv`, whose environments are stepped by one call, such as those of EnvPool."""

import logging
import warnings
from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, iterate
from numpy.typing import NDArray

from apex.config import EnvironmentConfig
from apex.environments import answers
from apex.environments.action_form import read_actions
from apex.environments.answers import BadAnswerError, ScaleCheck
from apex.environments.fault_budget import FaultBudget
from apex.environments.observation_form import read_observations
from apex.environments.sync_vector import DEFAULT_FPS
from apex.types import Step
from apexreplay.errors import UsageError
from apexreplay.item_kinds import Array

log = logging.getLogger("apex")

MODES = {mode.value: mode for mode in AutoresetMode}


def spaces_of(env: Any) -> Any:
    """Returns an object with the spaces of an environment, or of one environment of a vector environment."""
    if not isinstance(env, VectorEnv):
        return env
    return SimpleNamespace(observation_space=env.single_observation_space, action_space=env.single_action_space)


def make_batch(
    config: EnvironmentConfig, factory: Callable[..., Any], options: dict[str, Any], num_envs: int, seed: int
) -> Any:
    """Returns the environment that the factory makes; if it is a vector environment, one of `num_envs` environments.

    The factory gets what it takes: `num_envs`, and with it `seed`, because EnvPool seeds its games when it makes them;
    and `render_mode`, if that is one of the options.
    """
    parameters = signature(factory).parameters
    takes_any = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values())
    if "num_envs" in parameters:
        options = {**({"seed": seed} if "seed" in parameters else {}), **options, "num_envs": num_envs}
    if not takes_any and "render_mode" not in parameters:
        options = {name: value for name, value in options.items() if name != "render_mode"}
    env = factory(**options)
    if takes_any and isinstance(env, VectorEnv) and env.num_envs != num_envs:
        env.close()
        env = factory(**{**options, "num_envs": num_envs})
    if isinstance(env, VectorEnv) and env.num_envs != num_envs:
        env.close()
        problem = f"environment.id {config.id!r} makes {env.num_envs} environments instead of {num_envs}"
        raise UsageError(problem, "make as many as the argument num_envs of the function says")
    return env


Answer = TypeVar("Answer")


class BatchedEnvironment:
    """A VectorEnvironment of a vector environment, with any autoreset mode.

    SAME_STEP: the last observation of an episode is in `info["final_obs"]`. DISABLED: ended environments are reset at
    once. NEXT_STEP: the first observation comes with the next step, which plays nothing there: it is `skipped`. If all
    episodes end in one step, that next step is made at once.

    The games depend on the seed of the first environment only. A fault ends the process, because the other environments
    cannot continue without it.
    """

    def __init__(self, config: EnvironmentConfig, env: Any, seed: int, *, is_trial: bool = False) -> None:
        """Takes over `env`, and closes it at the end. `is_trial`: a fault raises UsageError."""
        self.num_envs = int(env.num_envs)
        self._env = env
        self._seed: int | None = seed % 2**31
        metadata = env.metadata or {}
        mode = metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
        self._mode = MODES.get(str(getattr(mode, "value", mode)), AutoresetMode.NEXT_STEP)
        self.fps = float(metadata.get("render_fps") or DEFAULT_FPS)
        single = spaces_of(env)
        self._space = single.observation_space
        is_single = env.observation_space == self._space  # EnvPool declares the space of one environment.
        self._batch_space = batch_space(self._space, self.num_envs) if is_single else env.observation_space
        self._form, self._actions = read_observations(single, config), read_actions(single, config)
        self._is_plain = isinstance(self._space, spaces.Box) and self._form.dtype == "float32"
        self._acts_plainly = isinstance(single.action_space, spaces.Discrete) and single.action_space.start == 0
        self._observation: Array = np.zeros((self.num_envs, self._form.stack, *self._form.shape), self._form.dtype)
        self._mask: NDArray[np.bool_] | None = None
        self._is_masked = False  # whether the first info had action masks
        self._skips: NDArray[np.bool_] = np.zeros(self.num_envs, np.bool_)
        self._is_trial = is_trial
        self._budget = FaultBudget(config.id, self.num_envs, is_trial=is_trial)
        self._scale = ScaleCheck(config.id, clip_rewards=config.clip_rewards)

    @property
    def action_mask(self) -> NDArray[np.bool_] | None:
        """See VectorEnvironment."""
        return self._mask

    def reset(self) -> Array:
        """See VectorEnvironment."""
        return self._call("reset", self._reset)

    def step(self, actions: Array) -> Step:
        """See VectorEnvironment."""
        self._actions.check(actions)
        self._budget.step()
        return self._call("step", lambda: self._step(actions))

    def _reset(self) -> Array:
        seed, self._seed = self._seed, None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "EnvPool seeds", UserWarning)  # See `make_batch`.
            raw, info = self._env.reset(seed=seed)
        observation = np.zeros_like(self._observation)
        self._write(raw, observation, np.ones(self.num_envs, np.bool_))
        self._skips = np.zeros(self.num_envs, np.bool_)
        self._is_masked = self._actions.num_actions > 0 and answers.has_mask(info)
        self._mask = self._read_masks(info)
        self._observation = observation
        return observation

    def _step(self, actions: Array) -> Step:
        converted = actions if self._acts_plainly else np.stack([self._actions.convert(action) for action in actions])
        answer = self._env.step(converted)
        if not (isinstance(answer, tuple) and len(answer) == 5):
            raise BadAnswerError(f"returned {answers.describe_type(answer)}, expected five values")
        raw, rewards, *flags, info = answer
        for values in (rewards, *flags):
            if np.shape(values) != (self.num_envs,):
                found = answers.describe_type(np.asarray(values))
                raise BadAnswerError(f"returned rewards or flags {found}, expected one for each environment")
        skipped, self._skips = self._skips, np.zeros(self.num_envs, np.bool_)
        terminated, truncated = (np.asarray(flag, np.bool_) & ~skipped for flag in flags)
        truncated &= ~terminated
        reward = np.array([answers.read_reward(each) for each in np.asarray(rewards)], np.float32)
        reward[skipped] = 0.0
        ended = terminated | truncated
        metrics = {i: answers.read_metrics(self._info_of(info, i)) for i in np.flatnonzero(ended).tolist()}
        is_same_step = self._mode == AutoresetMode.SAME_STEP
        final_mask = mask = self._read_masks(info, over=None if is_same_step else terminated)
        observation = np.empty_like(self._observation)
        observation[:, :-1] = self._observation[:, 1:]
        if not ended.any() or not is_same_step:
            self._write(raw, observation, skipped)
        final_observation = observation
        if ended.any():
            final_observation = observation.copy()
            if is_same_step:
                self._write(raw, observation, ended | skipped)
                final_observation[~ended] = observation[~ended]
                for i in np.flatnonzero(ended).tolist():
                    answers.write_frame(self._form.to_frame(_row(info["final_obs"], i)), final_observation[i])
                final_mask = self._read_masks(info.get("final_info"), ended, over=terminated)
            elif self._mode == AutoresetMode.DISABLED:
                raw, info = self._env.reset(options={"reset_mask": ended.copy()})
                self._write(raw, observation, ended, only=ended)
                mask = self._read_masks(info, ended, mask)
            elif ended.all():
                raw, *_, info = self._env.step(converted)
                self._write(raw, observation, ended)
                mask = self._read_masks(info)
            else:
                self._skips = ended
        self._scale.check(observation[0, -1], float(reward[0]))
        self._observation, self._mask = observation, mask
        return Step(
            observation,
            reward,
            terminated,
            truncated,
            np.zeros(self.num_envs, np.bool_),
            final_observation,
            skipped=skipped if skipped.any() else None,
            action_mask=mask,
            final_mask=final_mask,
            metrics=metrics,
        )

    def rest(self, i: int) -> None:
        """See VectorEnvironment. The environment is stepped with the others nevertheless."""

    def picture(self) -> NDArray[np.uint8]:
        """See VectorEnvironment."""
        return self._call("render", lambda: answers.read_picture(self._env.render()[0]))

    def close(self) -> None:
        """See VectorEnvironment."""
        try:
            self._env.close()
        except Exception as error:
            log.warning("%s. Ignored", self._budget.failure(None, error, "in its close"))

    def _call(self, name: str, call: Callable[[], Answer]) -> Answer:
        """Returns the result of `call`; raises UsageError in a trial, else EnvironmentFailure, if it fails."""
        try:
            return call()
        except (Exception, SystemExit) as error:
            failure = self._budget.failure(None, error, f"in its {name}")
            raise (UsageError(failure.problem, failure.remedy) if self._is_trial else failure) from error

    def _write(
        self, raw: Any, stacks: Array, begins: NDArray[np.bool_], *, only: NDArray[np.bool_] | None = None
    ) -> None:
        """Writes the newest frames of all environments, or of those in `only`; those that begin get empty stacks."""
        if self._is_plain and only is None and self._form.stack == 1:
            frames = np.asarray(raw)
            if frames.shape != (self.num_envs, *self._space.shape):
                expected = f"expected {self.num_envs} of {self._space}"
                raise BadAnswerError(f"returned observations {answers.describe_type(frames)}, {expected}")
            answers.check_finite(frames.reshape(-1))
            stacks[:] = frames.reshape(stacks.shape)
            return
        rows = list(iterate(self._batch_space, raw))
        if len(rows) != self.num_envs:
            raise BadAnswerError(f"returned {len(rows)} observations, expected one for each environment")
        for i, row in enumerate(rows):
            if only is None or only[i]:
                if begins[i]:
                    stacks[i] = 0
                answers.write_frame(self._form.to_frame(row), stacks[i])

    def _read_masks(
        self,
        info: Any,
        only: NDArray[np.bool_] | None = None,
        others: NDArray[np.bool_] | None = None,
        *,
        over: NDArray[np.bool_] | None = None,
    ) -> NDArray[np.bool_] | None:
        """Returns the action masks in the info of all environments, bool[E, A]; None if the first info had none.

        `only`: those that have one; the others get the rows of `others`, or all actions.
        `over`: those in a terminal state. If all that should have a mask are, their info may have none.
        """
        if not self._is_masked:
            return None
        masks = np.ones((self.num_envs, self._actions.num_actions), np.bool_) if others is None else others.copy()
        if not answers.has_mask(info):
            asked = slice(None) if only is None else only
            if over is not None and over[asked].all():
                return masks
            raise BadAnswerError(f"returned no {answers.MASK!r} in its info, although the first info had one")
        for i in range(self.num_envs) if only is None else np.flatnonzero(only).tolist():
            given = _row(info[answers.MASK], i)
            is_terminal = over is not None and over[i]
            if not is_terminal or answers.join_masks(given).any():  # A terminal state may allow no action.
                masks[i] = answers.read_mask({answers.MASK: given}, masks.shape[1])
        return masks

    def _info_of(self, info: Any, i: int) -> dict[str, Any]:
        """Returns the info of the last step of environment i."""
        if not isinstance(info, Mapping):
            return {}
        ends = info.get("final_info") if self._mode == AutoresetMode.SAME_STEP else info
        found: Any = ends if isinstance(ends, Mapping) else {}
        return dict(_row({name: value for name, value in found.items() if name in answers.METRICS}, i))


def _row(batch: Any, i: int) -> Any:
    """Returns the value of environment i in a batch: an array, or a mapping or tuple of batches."""
    if isinstance(batch, Mapping):  # `_KEY` says which environments have KEY.
        there = [key for key in batch if f"_{key}" not in batch or np.all(_row(batch[f"_{key}"], i))]
        named = {key: batch[key] for key in there if not str(key).startswith("_")}
        # A number is one for all environments.
        return {key: part if np.isscalar(part) else _row(part, i) for key, part in named.items()}
    if isinstance(batch, tuple):
        return tuple(_row(part, i) for part in batch)
    return batch if isinstance(batch, bool) else batch[i]
