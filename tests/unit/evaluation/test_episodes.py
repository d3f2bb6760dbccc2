"""Tests of full games: scores, lengths, numbers of games per environment, and their statistics."""

import numpy as np
import pytest
from support.scripted import ScriptedEnvironment

from apex.evaluation.episodes import Episode, evaluation_seed, metrics_of, play, summarize
from apex.metric_tags import MAX_METRICS
from apexreplay.process.lifecycle import Stop


def forward(observation, mask):
    return np.ones(len(observation), np.int64)


def naive_games(games, num_envs, episodes):
    """The games by definition: environment i plays game k if k % num_envs is i; a score is the sum of the rewards."""
    played = []
    for i in range(num_envs):
        quota = len([k for k in range(episodes) if k % num_envs == i])
        played += [
            Episode(float(sum(games[i][k % len(games[i])])), len(games[i][k % len(games[i])])) for k in range(quota)
        ]
    return sorted(played)


def test_score_is_the_sum_of_raw_rewards_and_length_the_steps():
    environment = ScriptedEnvironment([[[1.0, 10.0, 100.0], [-7.0]]])
    assert play(environment, forward, 3) == [Episode(111.0, 3), Episode(-7.0, 1), Episode(111.0, 3)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("episodes", [1, 3, 4, 7, 12])
def test_games_match_the_definition(seed, episodes):
    rng = np.random.default_rng(seed)
    games = [[rng.integers(1000, size=rng.integers(1, 9)).tolist() for _ in range(3)] for _ in range(4)]
    assert sorted(play(ScriptedEnvironment(games), forward, episodes)) == naive_games(games, 4, episodes)


def test_short_games_are_not_preferred():
    """The first four games to end would be four short ones."""
    environment = ScriptedEnvironment([[[0.0] * 50], [[1.0]]])
    assert [game.score for game in play(environment, forward, 4)] == [1.0, 1.0, 0.0, 0.0]


def test_truncated_game_counts_with_its_score():
    environment = ScriptedEnvironment([[[1.0, 2.0]]], truncates=True)
    assert play(environment, forward, 1) == [Episode(3.0, 2)]


def test_lost_life_does_not_end_a_game():
    environment = ScriptedEnvironment([[[1.0, 2.0, 4.0]]], loses_lives=True)
    assert play(environment, forward, 1) == [Episode(7.0, 3)]


def test_policy_gets_each_observation_and_its_action_is_played():
    environment = ScriptedEnvironment([[[0.0] * 3]])
    seen = []

    def policy(observation, mask):
        seen.append(float(observation[0, 0, 0]))
        return np.array([int(observation[0, 0, 0]) % 2])

    play(environment, policy, 1)
    assert seen == [0.0, 1.0, 2.0]
    assert environment.actions == [[0], [1], [0]]


def test_policy_gets_the_mask_of_each_observation():
    masks = []

    def policy(observation, mask):
        masks.append(mask.argmax(1).tolist())
        return mask.argmax(1)

    play(ScriptedEnvironment([[[0.0] * 3], [[0.0] * 2]], masked=True), policy, 2)
    assert masks == [[0, 0], [1, 1], [2, 0]]


def test_action_that_the_mask_forbids_raises():
    environment = ScriptedEnvironment([[[0.0] * 3], [[0.0] * 3]], masked=True)
    with pytest.raises(ValueError, match=r"\[0, 0\].*action mask"):
        play(environment, lambda observation, mask: np.zeros(2, np.int64), 2)
    assert environment.actions == [[0, 0]]


def test_steps_and_games_are_reported_in_order():
    tape = []
    environment = ScriptedEnvironment([[[1.0, 2.0]]])
    play(environment, forward, 1, on_step=lambda step: tape.append(float(step.reward[0])), on_game=tape.append)
    assert tape == [1.0, 2.0, Episode(3.0, 2)]


def test_stop_returns_the_games_played_so_far():
    stop = Stop()
    games = play(ScriptedEnvironment([[[1.0]]]), forward, 10, stop=stop.poll, on_game=lambda game: stop.request())
    assert games == [Episode(1.0, 1)]


def test_summary_of_known_games():
    summary = summarize([Episode(1.0, 10), Episode(2.0, 20), Episode(6.0, 60)])
    assert (summary.episodes, summary.mean, summary.median, summary.min, summary.max) == (3, 3.0, 2.0, 1.0, 6.0)
    assert summary.length == 30.0


def test_one_game_has_no_interval():
    assert summarize([Episode(5.0, 1)]).interval is None


def test_equal_games_have_an_interval_of_width_zero():
    assert summarize([Episode(5.0, 1)] * 4).interval == (5.0, 5.0)


def test_interval_of_many_games_is_that_of_a_normal_distribution():
    scores = np.random.default_rng(0).normal(10.0, 4.0, 400)
    low, high = summarize([Episode(float(score), 1) for score in scores]).interval
    half = 1.96 * scores.std() / 400**0.5
    # The error of the 2.5 % quantile of 10,000 resamples is below 4 * sqrt(p q / n) / density = 0.107 sigmas (4 SD).
    tolerance = 0.107 * scores.std() / 400**0.5
    assert (low, high) == pytest.approx((scores.mean() - half, scores.mean() + half), abs=tolerance)


def test_same_games_give_the_same_interval():
    games = [Episode(float(i), 1) for i in range(9)]
    assert summarize(games) == summarize(games)


def test_metrics_are_means_over_the_games_that_reported_them():
    reports = {7.0: {"success": 1.0, "laps": 4.0}, 3.0: {"success": 0.0}}
    environment = ScriptedEnvironment([[[7.0], [3.0]], [[1.0, 7.0], [2.0]]], reports=reports)
    games = play(environment, forward, 4)
    metrics = metrics_of(games)
    assert {name: (metric.games, metric.mean) for name, metric in metrics.items()} == {
        "success": (3, 2 / 3),
        "laps": (2, 4.0),
    }
    low, high = metrics["success"].interval
    assert 0.0 <= low < 2 / 3 < high <= 1.0
    assert metrics_of(games[:1])["success"].interval is None
    many = Episode(1.0, 1, {f"field_{i}": 1.0 for i in range(2 * MAX_METRICS)})
    assert list(metrics_of([many])) == [f"field_{i}" for i in range(MAX_METRICS)]


def test_evaluation_seeds_differ_and_are_reproducible():
    seeds = [evaluation_seed(seed, number) for seed in range(20) for number in range(20)]
    assert len(set(seeds)) == 400
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert evaluation_seed(3, 4) == evaluation_seed(3, 4)


def test_game_is_played_again_if_the_environment_failed():
    class Failing(ScriptedEnvironment):
        def step(self, actions):
            step = super().step(actions)
            if len(self.actions) != 2:
                return step
            self._step[1] = 0
            return step._replace(observation=self._observe(), failed=np.array([False, True]))

    environment = Failing([[[1.0, 2.0, 4.0]], [[1.0, 2.0, 4.0]]])
    assert play(environment, forward, 2) == [Episode(7.0, 3), Episode(7.0, 3)]
    assert len(environment.actions) == 5


def test_environment_rests_after_its_last_game():
    environment = ScriptedEnvironment([[[1.0] * 5], [[2.0] * 2], [[4.0] * 3]])
    assert play(environment, forward, 5) == [
        Episode(4.0, 2),
        Episode(12.0, 3),
        Episode(4.0, 2),
        Episode(5.0, 5),
        Episode(5.0, 5),
    ]
    assert environment.rested == [(2, 3), (1, 4), (0, 10)]


def test_resting_environment_gives_no_endless_game_warning(caplog):
    environment = ScriptedEnvironment([[[0.0] * 30, [0.0] * 30], [[0.0] * 3, [0.0] * 500]])
    assert len(play(environment, forward, 3, endless_steps=40)) == 3
    assert not caplog.records


def test_endless_game_is_logged_once(caplog):
    play(ScriptedEnvironment([[[0.0] * 39], [[0.0] * 90]]), forward, 2, endless_steps=40)
    assert [record.args for record in caplog.records] == [(1, 2, 40)]
