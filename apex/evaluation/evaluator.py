"""The evaluator's loop: plays full games with the newest parameters and reports the scores."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from apex.algorithms.interface import Agent
from apex.algorithms.parameters import load_parameters
from apex.config import Config
from apex.environments import factory
from apex.environments.factory import VectorEnvironment
from apex.errors import EnvironmentFailure, UsageError
from apex.evaluation.episodes import ActFunction, Episode, evaluation_seed, play, summarize
from apex.runtime.lifecycle import POLL_SECONDS, Stop, Wait
from apex.transport.messages.results import EvaluationResult
from apex.transport.messages.status import RoleStatus
from apex.types import Parameters as ParameterValues

log = logging.getLogger("apex")

REST_SECONDS = 5.0  # pause after a confirmed score, which ends the run; leaves the CPU to the run's other programs


Final = Callable[[], int | None]  # returns the version of the run's last parameters; None while training continues
Newest = Callable[[float], ParameterValues | None]  # takes a timeout in seconds; returns newer parameters, or None
Keep = Callable[
    [EvaluationResult, ParameterValues | None], None
]  # takes a result, and the evaluated parameters if the result is the best so far, otherwise None


class _Until(NamedTuple):
    """The condition that ends the evaluation of the parameters `version`; None: it ends with training in any case."""

    stop: Stop
    version: int | None
    final: Final

    def poll(self) -> bool:
        """Whether a stop was requested, or training has ended with other parameters than `version`."""
        return self.stop.poll() or self.final() not in (None, self.version)


class Evaluator:
    """Evaluates the learner's newest parameters. With the same `seed` and `life`, evaluation k plays the same games."""

    def __init__(
        self,
        config: Config,
        agent: Agent,
        *,
        newest: Newest,
        keep: Keep,
        life: int = 0,
        make_environment: Callable[[int, int], VectorEnvironment] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`keep` takes each result. `make_environment(num_envs, seed)` creates environments; None: as configured.

        `life` is a different number for each start of the evaluator, so that each start plays different games.
        """
        self._config = config.evaluator
        self._agent = agent
        self._stop_score = config.run.stop_score
        self._seed, self._life = config.seed, life
        self._make_environment = make_environment or (
            lambda num_envs, seed: factory.make_environment(config.environment, num_envs, seed=seed, num_threads=1)
        )
        self._newest = newest
        self._keep = keep
        self._clock = clock
        self._sleep = sleep
        self._wait = Wait("evaluator", clock)
        self._start_at = clock()
        self._num_plays = 0
        self._has_made = (
            False  # whether an environment was ever created; if so, no wrong setting causes a later failure
        )
        self.num_evaluations = 0
        self.best: float | None = None

    def run(self, stop: Stop, final: Final = lambda: None) -> None:
        """Evaluates the newest parameters at the configured interval until `stop` is requested.

        Once `final` returns the version of the last parameters, these are evaluated at once, and the games of older
        parameters are abandoned.
        """
        while not stop.poll():
            if final() is None and (pause := self._start_at - self._clock()) > 0:
                self._sleep(min(pause, POLL_SECONDS))
            else:
                self.step(stop, final=final)

    def step(self, stop: Stop, timeout: float = POLL_SECONDS, *, final: Final = lambda: None) -> bool:
        """Evaluates the newest parameters; returns False if no newer ones come within `timeout` seconds."""
        parameters = self._newest(timeout)
        if parameters is None:
            self._wait.on("newer parameters from the learner")
            return False
        self._wait.over()
        self._start_at = self._clock() + self._config.period_seconds
        try:
            self._evaluate(parameters, _Until(stop, parameters.version, final))
        except EnvironmentFailure:  # The actors' environments are not affected.
            log.exception("evaluation of update %d failed; the run continues", parameters.version)
        return True

    def status(self) -> RoleStatus:
        """Returns the evaluator's part of a heartbeat."""
        return RoleStatus(rate=f"{self.num_evaluations} done", waiting=self._wait.reason)

    def _evaluate(self, parameters: ParameterValues, until: _Until) -> None:
        """Plays games and keeps the result. If the mean reaches the stop score, plays new games to confirm the score.

        In that case, keeps only the result of the new games. Does not confirm a score once training has ended, because
        it ends nothing then, and the games may take longer than the run waits. Keeps nothing if `until` is requested.
        """
        config, since, goal = self._config, self._clock(), self._stop_score
        load_parameters(self._agent.network, parameters.values)
        seed, played = self._play(config.episodes, until)
        reached = goal is not None and bool(played) and summarize(played).mean >= goal
        confirms = reached and not until.poll() and until.final() is None
        if confirms:
            # The first games' score is biased by selection.
            confirmation = self._play(config.confirm_episodes, until._replace(version=None))
            confirms = until.final() is None
            seed, played = confirmation if confirms else (seed, played)
        if until.poll():
            return
        summary = summarize(played)
        low, high = summary.interval or (None, None)
        result = EvaluationResult(
            updates=parameters.version,
            mean=summary.mean,
            median=summary.median,
            low=low,
            high=high,
            length=summary.length,
            episodes=summary.episodes,
            scores=[game.score for game in played],
            confirmed=confirms and goal is not None and low is not None and low >= goal,
            epsilon=config.epsilon,
            seed=seed,
            num_envs=min(config.num_envs, summary.episodes),
            seconds=self._clock() - since,
        )
        is_best = self.best is None or result.mean >= self.best
        if is_best:
            self.best = result.mean
        self.num_evaluations += 1
        self._keep(result, parameters if is_best else None)
        if result.confirmed:
            self._start_at = max(self._start_at, self._clock() + REST_SECONDS)

    def _play(self, episodes: int, until: _Until) -> tuple[int, list[Episode]]:
        """Returns a new seed, and the games played with it. Raises UsageError if the first environment cannot start."""
        self._num_plays += 1  # `apex evaluate` uses number 0, so that its games differ from those that select a policy.
        seed = evaluation_seed(self._seed, self._num_plays, self._life)
        try:
            environment = self._make_environment(min(self._config.num_envs, episodes), seed)
        except UsageError as error:
            if self._has_made:
                raise EnvironmentFailure(str(error)) from error
            raise
        self._has_made = True
        try:
            policy = make_policy(self._agent, self._config.epsilon, np.random.default_rng(seed))
            return seed, play(environment, policy, episodes, stop=until)
        finally:
            environment.close()


def make_policy(agent: Agent, exploration: float, rng: np.random.Generator) -> ActFunction:
    """Returns an agent's policy. `exploration`: epsilon; for continuous actions, standard deviation of the noise."""
    return lambda observation, mask: agent.act(observation, mask, exploration, rng)
