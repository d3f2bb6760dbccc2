"""The evaluator's loop: plays full games with the newest parameters and reports the scores."""

import logging
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np

from apex.algorithms.interface import Agent
from apex.algorithms.parameters import load_parameters
from apex.config import Config
from apex.environments import factory
from apex.environments.interface import VectorEnvironment
from apex.errors import EnvironmentFailure
from apex.evaluation.episodes import ActFunction, Episode, evaluation_seed, metrics_of, play, summarize
from apex.transport.messages.results import EvaluationResult
from apex.transport.messages.status import EvaluatorStatus
from apex.types import Parameters
from apexreplay.errors import UsageError
from apexreplay.facts import Waiting
from apexreplay.process.lifecycle import POLL_SECONDS, Stop, Wait

log = logging.getLogger("apex")

REST_SECONDS = 5.0  # pause after a confirmed score, which ends the run; leaves the CPU to the run's other programs


class Learner(Protocol):
    """The learner, as the evaluator sees it."""

    def newest(self, timeout: float) -> Parameters | None:
        """Returns newer parameters; None if there are none within `timeout` seconds."""

    def final(self) -> int | None:
        """Returns the version of the run's last parameters; None while training continues."""

    def keep(self, result: EvaluationResult, parameters: Parameters | None) -> None:
        """Keeps a result, and the evaluated parameters if the result is the best so far."""


class Clock(Protocol):
    """The functions of the module `time` that the evaluator uses."""

    def monotonic(self) -> float:
        """Returns seconds."""

    def sleep(self, seconds: float, /) -> None:
        """Blocks for `seconds`."""


class Evaluator:
    """Evaluates the learner's newest parameters. With the same `seed` and `life`, evaluation k plays the same games."""

    def __init__(
        self,
        config: Config,
        agent: Agent,
        learner: Learner,
        *,
        life: int = 0,
        make_environment: Callable[[int, int], VectorEnvironment] | None = None,
        clock: Clock = time,
    ) -> None:
        """`make_environment(num_envs, seed)` creates environments; None: as configured.

        `life` is a different number for each start of the evaluator, so that each start plays different games.
        """
        self._config = config.evaluator
        self._agent = agent
        self._learner = learner
        self._stop_score = config.run.stop_score
        self._seed, self._life = config.seed, life
        self._make_environment = make_environment or (
            lambda num_envs, seed: factory.make_environment(config.environment, num_envs, seed=seed)
        )
        self._clock = clock
        self._wait = Wait("evaluator", clock.monotonic)
        self._start_at = clock.monotonic()
        self._num_plays = 0
        self._has_made = False  # an environment; then a later failure is not a mistake in the settings
        self.num_evaluations = 0
        self.best: float | None = None

    def run(self, stop: Stop) -> None:
        """Evaluates the newest parameters at the configured interval until `stop` is requested.

        Once the last parameters exist, these are evaluated at once, and the games of older parameters are abandoned.
        """
        while not stop.poll():
            pause = self._start_at - self._clock.monotonic()
            if pause > 0 and self._learner.final() is None:
                self._clock.sleep(min(pause, POLL_SECONDS))
            else:
                self.step(stop)

    def step(self, stop: Stop, timeout: float = POLL_SECONDS) -> bool:
        """Evaluates the newest parameters; returns False if no newer ones come within `timeout` seconds."""
        parameters = self._learner.newest(timeout)
        if parameters is None:
            self._wait.on(Waiting("newer_parameters"))
            return False
        self._wait.over()
        self._start_at = self._clock.monotonic() + self._config.period_seconds
        try:
            self._evaluate(parameters, stop)
        except EnvironmentFailure:  # The actors' environments are not affected.
            log.exception("evaluation of update %d failed; the run continues", parameters.version)
        return True

    def status(self) -> EvaluatorStatus:
        """Returns the evaluator's part of a heartbeat."""
        return EvaluatorStatus(waiting=self._wait.waiting, num_evaluations=self.num_evaluations)

    def _evaluate(self, parameters: Parameters, stop: Stop) -> None:
        """Plays games and keeps the result. If the mean reaches the stop score, plays new games to confirm the score.

        In that case, keeps only the result of the new games. Does not confirm a score once training has ended, because
        it ends nothing then, and the games may take longer than the run waits. Keeps nothing if a stop was requested
        or if training has ended with other parameters.
        """
        config, since, goal = self._config, self._clock.monotonic(), self._stop_score
        final = self._learner.final

        def is_over() -> bool:
            return stop.poll() or final() not in (None, parameters.version)

        load_parameters(self._agent.network, parameters.values)
        seed, played = self._play(config.episodes, is_over)
        reached = goal is not None and bool(played) and summarize(played).mean >= goal
        confirms = reached and not is_over() and final() is None
        if confirms:
            # The first games' score is biased by selection.
            confirmation = self._play(config.confirm_episodes, lambda: stop.poll() or final() is not None)
            confirms = final() is None
            seed, played = confirmation if confirms else (seed, played)
        if is_over():
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
            seconds=self._clock.monotonic() - since,
            metrics={name: metric.mean for name, metric in metrics_of(played).items()},
        )
        # The score of an untrained policy is luck.
        is_best = result.updates > 0 and (self.best is None or result.mean >= self.best)
        if is_best:
            self.best = result.mean
        self.num_evaluations += 1
        self._learner.keep(result, parameters if is_best else None)
        if result.confirmed:
            self._start_at = max(self._start_at, self._clock.monotonic() + REST_SECONDS)

    def _play(self, episodes: int, stop: Callable[[], bool]) -> tuple[int, list[Episode]]:
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
            return seed, play(environment, policy, episodes, stop=stop)
        finally:
            environment.close()


def make_policy(agent: Agent, exploration: float, rng: np.random.Generator) -> ActFunction:
    """Returns an agent's policy. `exploration`: epsilon; for continuous actions, standard deviation of the noise."""
    return lambda observation, mask: agent.act(observation, mask, exploration, rng)
