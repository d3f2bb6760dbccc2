"""Tests of the evaluator: games of the newest parameters, confirmation of the stop score, waits and the end."""

import logging

import numpy as np
import pytest
import torch
from support.clocks import Clock
from support.messages import as_json
from support.scripted import ScriptedEnvironment
from torch import nn

from apex.algorithms.parameters import flatten_parameters
from apex.config import Config, EvaluatorConfig, LearnerConfig, RunConfig
from apex.dqn.algorithm import DqnAgent
from apex.errors import ConfigError, EnvironmentFailure
from apex.evaluation.episodes import Episode, evaluation_seed, summarize
from apex.evaluation.evaluator import Evaluator, make_policy
from apex.learning.coordinator.metric_rows import evaluation_row
from apex.transport.messages.status import EvaluatorStatus
from apex.types import Parameters
from apexreplay.errors import UsageError
from apexreplay.facts import Waiting
from apexreplay.process.lifecycle import Stop


class Table(nn.Module):
    """The same Q-values of two actions for every observation."""

    def __init__(self, *values):
        super().__init__()
        self.values = nn.Parameter(torch.tensor(values or (0.0, 0.0)))

    def forward(self, observation):
        return self.values.expand(len(observation), -1)


def make_parameters(version, *values):
    return Parameters(version, flatten_parameters(Table(*values)))


class Learner:
    """Returns the entries one by one (None: no newer parameters), then requests the stop. Keeps the results."""

    def __init__(self, *entries, stop, clock):
        self._entries = list(entries)
        self._stop = stop
        self._clock = clock
        self.final = lambda: None
        self.newer = None  # the answer to a request that does not wait
        self.called_at = []
        self.results = []
        self.versions = []  # of the parameters that came with them

    def newest(self, timeout):
        if not timeout:
            return self.newer
        self.called_at.append(self._clock.now)
        if not self._entries:
            self._stop.request()
            return None
        entry = self._entries.pop(0)
        if entry is None:
            self._clock.now += timeout
        return entry

    def keep(self, result, parameters):
        self.results.append(result)
        self.versions.append(None if parameters is None else parameters.version)


class ShortSleeps(Clock):
    """Allows only sleeps of at most 0.2 s, so that a stop request takes effect soon."""

    def sleep(self, seconds):
        assert 0 < seconds <= 0.2
        super().sleep(seconds)


class Trial:
    """An evaluator with a learner, a clock and environments. Plays `scores` in order, one list of games per play."""

    def __init__(
        self,
        *parameters,
        scores=(),
        stop_score=None,
        seed=3,
        life=0,
        on_play=lambda trial: None,
        init_from="",
        **settings,
    ):
        self.stop, self.clock = Stop(), ShortSleeps()
        self.learner = Learner(*parameters, stop=self.stop, clock=self.clock)
        self.made = []  # (num_envs, seed)
        self.environments = []
        self.reports = None  # the metrics of a game, by its score
        self._scores = list(scores)
        self._on_play = on_play
        settings = {"period_seconds": 0.0, "episodes": 2, "num_envs": 2, "epsilon": 0.0, **settings}
        self.evaluator = Evaluator(
            Config(
                seed=seed,
                run=RunConfig(stop_score=stop_score),
                evaluator=EvaluatorConfig(**settings),
                learner=LearnerConfig(init_from=init_from),
            ),
            DqnAgent(Table()),
            self.learner,
            life=life,
            make_environment=self.make_environment,
            clock=self.clock,
            sleep=self.clock.sleep,
        )

    def make_environment(self, num_envs, seed):
        self.made.append((num_envs, seed))
        self._on_play(self)
        scores = self._scores.pop(0) if self._scores else [1.0, 1.0]
        games = [[[score] for score in scores[i::num_envs]] for i in range(num_envs)]
        self.environments.append(ScriptedEnvironment(games, reports=self.reports))
        return self.environments[-1]

    def run(self, final=lambda: None):
        self.learner.final = final
        self.evaluator.run(self.stop)
        return self.learner.results


def test_result_has_the_games_of_the_parameters():
    (result,) = Trial(make_parameters(30), scores=[[2.0, 7.0, 3.0]], episodes=3, num_envs=3).run()
    assert (result.updates, result.mean, result.median, result.episodes) == (30, 4.0, 3.0, 3)
    assert (result.scores, result.length, result.confirmed) == ([2.0, 7.0, 3.0], 1.0, False)


def test_result_has_the_means_of_the_metrics():
    trial = Trial(make_parameters(30), scores=[[2.0, 7.0, 3.0]], episodes=3, num_envs=3)
    trial.reports = {2.0: {"success": 1.0}, 7.0: {"success": 0.0}}
    (result,) = trial.run()
    assert result.metrics == {"success": 0.5}
    assert evaluation_row(70, result, 9.0).scalars["evaluator_metrics/success"] == 0.5


def test_interval_comes_from_the_games_and_one_game_has_none():
    (result,) = Trial(make_parameters(30), scores=[[2.0, 7.0, 3.0]], episodes=3, num_envs=3).run()
    assert (result.low, result.high) == summarize([Episode(score, 1) for score in (2.0, 7.0, 3.0)]).interval
    row = evaluation_row(70, result, 9.0).scalars
    assert (row["evaluator/score_low"], row["evaluator/score_high"]) == (result.low, result.high)
    (alone,) = Trial(make_parameters(30), scores=[[2.0]], episodes=1, num_envs=1).run()
    assert not {"low", "high"} & as_json(alone).keys()
    assert set(row) - set(evaluation_row(70, alone, 9.0).scalars) == {"evaluator/score_low", "evaluator/score_high"}


def test_parameters_determine_the_actions():
    trial = Trial(make_parameters(1, 0.0, 1.0), make_parameters(2, 1.0, 0.0))
    trial.run()
    assert [environment.actions for environment in trial.environments] == [[[1, 1]], [[0, 0]]]


def test_parameters_are_kept_with_the_best_result_so_far():
    scores = [[1.0, 3.0], [1.0, 1.0], [2.0, 2.0], [5.0, 0.0], [0.0, 0.0]]
    trial = Trial(*[make_parameters(version) for version in range(1, 6)], scores=scores)
    trial.run()
    assert [result.mean for result in trial.learner.results] == [2.0, 1.0, 2.0, 2.5, 0.0]
    assert trial.learner.versions == [1, None, 3, 4, None]
    assert trial.evaluator.best == 2.5


@pytest.mark.parametrize(("init_from", "kept"), [("", [None, 1]), ("runs/other", [0, None])])
def test_parameters_of_update_0_are_the_best_only_after_a_warm_start(init_from, kept):
    trial = Trial(make_parameters(0), make_parameters(1), scores=[[9.0, 9.0], [1.0, 1.0]], init_from=init_from)
    trial.run()
    assert ([result.mean for result in trial.learner.results], trial.learner.versions) == ([9.0, 1.0], kept)


def games(mean, spread, count=100):
    """`count` scores with mean `mean`: half are `spread` above, half below."""
    return [mean - spread, mean + spread] * (count // 2)


@pytest.mark.parametrize(("scores", "stop_score"), [([9.0, 10.0], 10.0), ([1e9, 1e9], None)])
def test_nothing_is_confirmed_below_or_without_a_stop_score(scores, stop_score):
    (result,) = Trial(make_parameters(1), scores=[scores], stop_score=stop_score).run()
    assert (result.confirmed, result.mean, result.episodes) == (False, sum(scores) / 2, 2)


def test_mean_at_the_stop_score_is_confirmed_by_new_games():
    trial = Trial(make_parameters(1), scores=[[10.0, 10.0], games(11.0, 1.0)], stop_score=10.0, num_envs=100)
    (result,) = trial.run()
    assert (result.confirmed, result.mean, sorted(result.scores)) == (True, 11.0, sorted(games(11.0, 1.0, 20)))
    assert trial.made[1] == (20, result.seed)


@pytest.mark.parametrize(
    ("mean", "confirmed", "episodes"), [(60.0, False, 20), (480.0, False, 100), (490.0, True, 100), (520.0, True, 20)]
)
def test_new_games_end_as_soon_as_they_decide(mean, confirmed, episodes):
    """The standard error of 100 games is 40 / 10 = 4, so at the last look the interval begins 8 below the mean."""
    trial = Trial(make_parameters(1), scores=[[500.0] * 2, games(mean, 40.0)], stop_score=475.0, num_envs=100)
    (result,) = trial.run()
    assert (result.mean, result.confirmed, result.episodes) == (mean, confirmed, episodes)


def test_the_newest_policy_is_confirmed():
    trial = Trial(make_parameters(1, 0.0, 1.0), scores=[[11.0, 11.0], games(12.0, 1.0)], stop_score=10.0)
    trial.learner.newer = make_parameters(7, 1.0, 0.0)
    (result,) = trial.run()
    assert (result.updates, result.confirmed, trial.learner.versions) == (7, True, [7])
    assert [environment.actions[0] for environment in trial.environments] == [[1, 1], [0, 0]]


def test_the_evaluation_after_a_failed_confirmation_has_none():
    parameters = [make_parameters(version) for version in (1, 2, 3)]
    scores = [[11.0, 11.0], games(9.0, 1.0), [11.0, 11.0], [11.0, 11.0], games(12.0, 1.0)]
    results = Trial(*parameters, scores=scores, stop_score=10.0).run()
    assert [(result.episodes, result.confirmed) for result in results] == [(20, False), (2, False), (20, True)]


def test_fewer_than_100_confirming_games_are_refused():
    with pytest.raises(ConfigError, match=r"confirm_episodes\b.*\b100\b.*\b99\b"):
        EvaluatorConfig(confirm_episodes=99)


def test_every_play_has_a_new_seed_of_run_seed_and_start():
    def seeds(seed, life):
        parameters = [make_parameters(version) for version in range(3)]
        trial = Trial(*parameters, scores=[[1.0] * 100] * 6, seed=seed, life=life, stop_score=1.0)
        trial.run()
        return [seed for _, seed in trial.made]

    first = seeds(3, 1)
    assert len(set(first)) == 6
    assert seeds(3, 1) == first
    others = [*seeds(4, 1), *seeds(3, 2), evaluation_seed(3)]  # another run, another start, `apex evaluate`
    assert not set(first) & set(others)


def test_result_has_the_seed_of_its_games():
    scores = [[1.0] * 100] * 4
    trial = Trial(make_parameters(1), make_parameters(2), scores=scores, stop_score=1.0, num_envs=2)
    for result in trial.run():
        assert (result.num_envs, result.seed) in trial.made[1::2]  # The seeds of the confirming games.
    assert len({result.seed for result in trial.learner.results}) == 2


def test_environments_are_closed_and_not_more_than_games():
    trial = Trial(make_parameters(1), make_parameters(2), episodes=2, num_envs=5)
    trial.run()
    assert [num_envs for num_envs, _ in trial.made] == [2, 2]
    assert [environment.closed for environment in trial.environments] == [True, True]


def test_evaluations_start_one_period_apart():
    trial = Trial(make_parameters(1), make_parameters(2), period_seconds=60.0)
    trial.run()
    starts = trial.learner.called_at
    assert [round(start - starts[0], 6) for start in starts] == [0.0, 60.0, 120.0]


def test_a_confirmed_policy_is_the_best_after_luckier_games():
    parameters = [make_parameters(version) for version in (1, 2, 3)]
    scores = [[11.0, 11.0], games(9.0, 1.0), [30.0, 30.0], [11.0, 11.0], games(12.0, 1.0)]
    trial = Trial(*parameters, scores=scores, stop_score=10.0)
    trial.run()
    assert trial.learner.versions == [1, 2, 3]
    assert trial.evaluator.best == 12.0


def test_last_parameters_taken_for_a_confirmation_are_evaluated():
    """Training ends during the confirmation. Its last parameters do not come a second time."""
    trial = Trial(make_parameters(1), scores=[[11.0, 11.0], games(20.0, 1.0), [5.0, 7.0]], stop_score=10.0)
    trial.learner.newer = make_parameters(2)
    results = trial.run(lambda: 2 if len(trial.made) >= 2 else None)
    assert [(result.updates, result.mean) for result in results] == [(2, 6.0)]


@pytest.mark.parametrize(("stop_score", "starts"), [(None, [0.0, 20.0, 40.0]), (99.0, [0.0, 3.0, 6.0])])
def test_evaluations_take_a_tenth_of_the_time_unless_a_run_waits(stop_score, starts):
    def take_two_seconds(trial):
        trial.clock.now += 2.0

    parameters = [make_parameters(version) for version in (1, 2)]
    trial = Trial(*parameters, stop_score=stop_score, on_play=take_two_seconds, period_seconds=3.0)
    trial.run()
    assert [round(start - trial.learner.called_at[0], 6) for start in trial.learner.called_at] == starts


def test_long_games_of_the_untrained_policy_delay_no_other_evaluation():
    def take_two_seconds(trial):
        trial.clock.now += 2.0

    parameters = [make_parameters(version) for version in (0, 1, 2)]
    trial = Trial(*parameters, on_play=take_two_seconds, period_seconds=3.0)
    trial.run()
    assert [round(start - trial.learner.called_at[0], 6) for start in trial.learner.called_at] == [0.0, 3.0, 23.0, 43.0]


@pytest.mark.parametrize(("period", "starts"), [(1.0, [0.0, 5.0, 6.0]), (60.0, [0.0, 60.0, 120.0])])
def test_evaluator_pauses_after_a_confirmed_score(period, starts):
    parameters = [make_parameters(version) for version in (1, 2)]
    scores = [[9.0, 11.0], games(12.0, 1.0), [1.0, 1.0]]
    trial = Trial(*parameters, scores=scores, stop_score=10.0, period_seconds=period)
    trial.run()
    assert [result.confirmed for result in trial.learner.results] == [True, False]
    assert [round(start - trial.learner.called_at[0], 6) for start in trial.learner.called_at] == starts


def test_a_policy_that_the_learner_repeats_is_evaluated_once():
    repeated = [make_parameters(version) for version in (5, 5, 6, 6)]
    assert [result.updates for result in Trial(*repeated).run()] == [5, 6]
    assert [result.updates for result in Trial(*repeated).run(final=lambda: 6)] == [6, 6]


def test_a_policy_whose_evaluation_failed_is_evaluated_again():
    def fail(trial):
        if len(trial.made) == 1:
            raise EnvironmentFailure("maze: KeyError: 'door'")

    trial = Trial(make_parameters(5), make_parameters(5), on_play=fail)
    assert [result.updates for result in trial.run()] == [5]


def test_late_parameters_are_evaluated_at_once():
    trial = Trial(make_parameters(1), None, None, make_parameters(2), period_seconds=60.0)
    trial.run()
    assert [result.updates for result in trial.learner.results] == [1, 2]
    assert trial.clock.now - 100.0 < 121.0


def test_long_wait_for_parameters_is_logged_once(caplog):
    with caplog.at_level(logging.WARNING):
        Trial(*[None] * 60, make_parameters(1)).run()
    (record,) = caplog.records
    assert record.msg == Waiting("newer_parameters", who="evaluator", seconds=pytest.approx(10.0, abs=0.5))


def test_status_counts_evaluations_and_describes_the_wait():
    trial = Trial(make_parameters(1), None)
    assert trial.evaluator.status() == EvaluatorStatus(waiting=None, num_evaluations=0)
    trial.run()
    status = trial.evaluator.status()
    assert (status.num_evaluations, status.waiting.what) == (1, "newer_parameters")


@pytest.mark.parametrize("play", [1, 2])
def test_stop_during_first_or_confirming_games_keeps_no_result(play):
    def on_play(trial):
        if len(trial.made) == play:
            trial.stop.request()

    trial = Trial(make_parameters(1), stop_score=1.0, on_play=on_play)
    assert trial.run() == []
    assert [environment.closed for environment in trial.environments] == [True] * play


def test_final_parameters_are_evaluated_without_a_pause():
    trial = Trial(make_parameters(1), make_parameters(2), period_seconds=60.0)
    results = trial.run(lambda: 2 if trial.made else None)
    assert results[-1].updates == 2
    assert trial.clock.now - 100.0 < 1.0


def test_final_parameters_end_games_of_older_ones():
    trial = Trial(make_parameters(1), make_parameters(2), scores=[[1.0, 1.0], [5.0, 7.0]], period_seconds=60.0)
    results = trial.run(lambda: 2 if trial.made else None)
    assert [(result.updates, result.mean) for result in results] == [(2, 6.0)]
    assert [environment.closed for environment in trial.environments] == [True, True]


def test_score_of_the_final_parameters_is_not_confirmed():
    trial = Trial(make_parameters(2), scores=[[11.0, 13.0]], stop_score=10.0)
    (result,) = trial.run(lambda: 2)
    assert (result.mean, result.episodes, result.confirmed) == (12.0, 2, False)
    assert len(trial.made) == 1


def test_first_games_count_if_training_ends_during_the_confirmation():
    trial = Trial(make_parameters(2), scores=[[11.0, 13.0], games(20.0, 1.0)], stop_score=10.0, num_envs=100)
    (result,) = trial.run(lambda: 2 if len(trial.made) == 2 else None)
    assert (result.mean, result.episodes, result.confirmed) == (12.0, 2, False)
    assert (result.num_envs, result.seed) == trial.made[0]
    assert trial.environments[1].actions == []


def test_policy_explores_with_probability_epsilon():
    observation = np.zeros((4000, 1, 1), np.float32)
    greedy = make_policy(DqnAgent(Table(0.0, 1.0)), 0.0, np.random.default_rng(0))
    assert (greedy(observation, None) == 1).all()
    explores = make_policy(DqnAgent(Table(0.0, 1.0)), 0.5, np.random.default_rng(0))
    # Another action with probability 0.5 / 2; tolerance: four standard deviations of a binomial's mean.
    assert abs((explores(observation, None) == 0).mean() - 0.25) < 4 * (0.25 * 0.75 / 4000) ** 0.5


@pytest.mark.parametrize(
    ("play", "error"), [(1, EnvironmentFailure("maze: KeyError: 'door'")), (2, UsageError("maze: no space"))]
)
def test_failed_environment_costs_one_evaluation(caplog, play, error):
    def fail(trial):
        if len(trial.made) == play:
            raise error

    trial = Trial(*[make_parameters(version) for version in (1, 2, 3)], on_play=fail)
    assert [result.updates for result in trial.run()] == [version for version in (1, 2, 3) if version != play]
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert (record.args, record.exc_info[0]) == ((play,), EnvironmentFailure)
    assert str(error) in caplog.text


def test_environment_that_never_started_is_refused():
    def fail(trial):
        raise UsageError("'maze' failed")

    with pytest.raises(UsageError, match="'maze'"):
        Trial(make_parameters(1), on_play=fail).run()
