"""Steps E Gymnasium environments one after the other, converts observations and actions, and handles faults."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from apex.config import EnvironmentConfig
from apex.environments import answers
from apex.environments.action_form import read_actions
from apex.environments.answers import BadAnswerError, ScaleCheck
from apex.environments.fault_budget import FaultBudget
from apex.environments.observation_form import read_observations
from apex.types import Step
from apexreplay.item_kinds import Array

DEFAULT_FPS = 30  # steps per second for pictures, if the environment has no render_fps

log = logging.getLogger("apex")


class SyncVectorEnvironment:
    """A VectorEnvironment of plain environments, which the caller's thread steps one after the other.

    If an environment raises or returns a bad value, its episode ends before that step, the step is marked as `failed`,
    and the environment is closed and created again. The other environments continue.

    If the first `info` of environment 0 has an "action_mask", all later ones must have one, except in terminal states.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        make: Callable[[int], gymnasium.Env[Any, Any]],
        seeds: Sequence[int],
        *,
        is_trial: bool = False,
    ) -> None:
        """`make(i)` creates environment i, at the start and after each of its faults.

        `is_trial`: the first fault raises UsageError.
        """
        self.num_envs = len(seeds)
        self._make = make
        self._budget = FaultBudget(config.id, self.num_envs, is_trial=is_trial)
        self._envs: list[gymnasium.Env[Any, Any]] = []
        try:
            for i in range(self.num_envs):
                self._envs.append(make(i))
        except BaseException:
            self.close()
            raise
        self.fps = float((self._envs[0].metadata or {}).get("render_fps") or DEFAULT_FPS)
        self._seeds = list(seeds)
        self._form = read_observations(self._envs[0], config)
        self._actions = read_actions(self._envs[0], config)
        shape = (self.num_envs, self._form.stack, *self._form.shape)
        self._observation: Array = np.zeros(shape, self._form.dtype)
        self._mask: NDArray[np.bool_] = np.ones((self.num_envs, self._actions.num_actions), np.bool_)
        self._masked: bool | None = None  # None: unknown before the first reset
        self._resting: NDArray[np.bool_] = np.zeros(self.num_envs, np.bool_)
        self._scale = ScaleCheck(config.id, clip_rewards=config.clip_rewards)

    @property
    def action_mask(self) -> NDArray[np.bool_] | None:
        """See VectorEnvironment."""
        return self._mask if self._masked else None

    def reset(self) -> Array:
        """See VectorEnvironment."""
        observation, mask = np.empty_like(self._observation), np.ones_like(self._mask)
        is_first = self._masked is None
        for i, seed in enumerate(self._seeds):
            self._begin(i, observation, mask, seed=seed if is_first else None)
        self._resting[:] = False
        self._observation, self._mask = observation, mask
        return observation

    def step(self, actions: Array) -> Step:
        """See VectorEnvironment."""
        self._actions.check(actions)
        self._budget.step()
        observation, mask = np.empty_like(self._observation), self._mask.copy() if self._masked else self._mask
        observation[:, :-1] = self._observation[:, 1:]
        reward = np.zeros(self.num_envs, np.float32)
        terminated, truncated, failed = np.zeros((3, self.num_envs), np.bool_)
        metrics = {}
        for i in range(self.num_envs):
            if self._resting[i]:
                observation[i] = self._observation[i]
                continue
            try:
                frame, reward[i], terminated[i], truncated[i], info = self._ask(i, self._actions.convert(actions[i]))
                answers.write_frame(frame, observation[i])
                if self._masked and not terminated[i]:
                    mask[i] = answers.read_mask(info, len(mask[i]))
                if i == 0:
                    self._scale.check(frame, float(reward[0]))
                if terminated[i] or truncated[i]:
                    metrics[i] = answers.read_metrics(info)
            except (Exception, SystemExit) as error:
                self._budget.record(i, error)
                terminated[i], truncated[i], failed[i] = False, False, True
                observation[i] = self._observation[i]  # The state in which the step was tried is the last one known.
        final_observation, final_mask = observation, mask
        ended = terminated | truncated
        if ended.any() or failed.any():
            final_observation, final_mask = observation.copy(), mask.copy()
            for i in np.flatnonzero(ended | failed).tolist():
                self._begin(i, observation, mask, renew=bool(failed[i]))
        self._observation, self._mask = observation, mask
        return Step(
            observation,
            reward,
            terminated,
            truncated,
            np.zeros(self.num_envs, np.bool_),
            final_observation,
            failed=failed if failed.any() else None,
            action_mask=mask if self._masked else None,
            final_mask=final_mask if self._masked else None,
            metrics=metrics,
        )

    def rest(self, i: int) -> None:
        """See VectorEnvironment."""
        self._resting[i] = True

    def picture(self) -> NDArray[np.uint8]:
        """See VectorEnvironment."""
        if self._envs[0].render_mode != "rgb_array":
            raise RuntimeError("no picture: create the environment with pictures=True")
        try:
            picture: Any = self._envs[0].render()
        except NotImplementedError as error:
            missing = BadAnswerError("has no render that draws", "define render(), or leave out the video")
            raise self._budget.failure(0, missing) from error
        except Exception as error:
            raise self._budget.failure(0, error, "in its render") from error
        try:
            return answers.read_picture(picture)
        except BadAnswerError as error:
            raise self._budget.failure(0, error) from error

    def close(self) -> None:
        """See VectorEnvironment."""
        for i in range(len(self._envs)):
            self._close(i)

    def _ask(self, i: int, action: Any) -> tuple[Array, float, bool, bool, Any]:
        """Steps environment i; returns frame, reward, terminated, truncated, info. Terminated overrides truncated."""
        answer: Any = self._envs[i].step(action)
        if not (isinstance(answer, tuple) and len(answer) == 5):
            expected = "(observation, reward, terminated, truncated, info)"
            raise BadAnswerError(f"returned {answers.describe_type(answer)} from its step, expected {expected}")
        raw, reward, *flags, info = answer
        terminated, truncated = map(answers.read_flag, ("terminated", "truncated"), flags)
        return self._form.to_frame(raw), answers.read_reward(reward), terminated, truncated and not terminated, info

    def _begin(
        self, i: int, observation: Array, mask: NDArray[np.bool_], seed: int | None = None, *, renew: bool = False
    ) -> None:
        """Resets environment i and writes its stack and mask. If `renew` or after a fault, first creates it again."""
        while True:
            try:
                if renew:
                    self._close(i)
                    self._envs[i] = self._make(i)
                    # Another seed may avoid the same fault. It follows from the first seed, so runs are reproducible.
                    seed = int(np.random.SeedSequence([self._seeds[i], self._budget.faults[i]]).generate_state(1)[0])
                answer: Any = self._envs[i].reset(seed=None if seed is None else seed % 2**31)
                if not (isinstance(answer, tuple) and len(answer) == 2):
                    raise BadAnswerError(f"returned {answers.describe_type(answer)}, expected (observation, info)")
                answers.write_frame(self._form.to_frame(answer[0]), observation[i])
                observation[i, :-1] = 0
                if self._masked is None:
                    self._masked = self._actions.num_actions > 0 and answers.has_mask(answer[1])
                if self._masked:
                    mask[i] = answers.read_mask(answer[1], len(mask[i]))
                return
            except (Exception, SystemExit) as error:
                self._budget.record(i, error, "in its reset")
                renew = True

    def _close(self, i: int) -> None:
        try:
            self._envs[i].close()
        except Exception as error:
            log.warning("%s. Ignored", self._budget.failure(i, error, "in its close"))
