"""The table of games that no setting was tuned on: statistics computed by hand, missing runs, and the peers' rules."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import stable_baselines3_dqn as peer
from support.learning_records import MACHINE, SCORE, make_record
from zoo_settings import ATARI_OPTIONS, UNTUNED_OPTIONS
from zoo_settings import TASKS as PEER_TASKS

from apex.command_line import parse_config
from bench.learning.tasks import TASKS, UNTUNED, UNTUNED_RUNS
from bench.learning.untuned import (
    RANDOM_AND_HUMAN,
    draw,
    interquartile_mean,
    interquartile_mean_of_games,
    interval,
    missing_runs,
    normalize,
    probability_of_improvement,
    render_untuned,
)


def make_records(runs):
    """Records whose scores are random play for the peers, and a human's for Ape-X."""
    return [
        make_record(
            task,
            system,
            seed,
            mean=RANDOM_AND_HUMAN[task][system == "apex"],
            final_score=SCORE,
            seconds=1_140.0,
            others_share=0.0,
        )
        for task, system, seed in runs
    ]


def test_an_interquartile_mean_leaves_out_a_quarter_at_each_end():
    assert interquartile_mean(np.array([9.0, 1.0, 2.0, 100.0])) == 5.5  # (2 + 9) / 2
    assert interquartile_mean(np.array([1.0, 2.0, 6.0])) == 3.0  # A quarter of 3 is rounded down to 0.
    values = np.array([[5.0, 4.0, 3.0, 2.0, 1.0], [0.0, 0.0, 3.0, 6.0, 99.0]])
    assert interquartile_mean(values).tolist() == [3.0, 3.0]
    assert interquartile_mean_of_games([np.array([1.0, 2.0]), np.array([9.0, 100.0])]) == 5.5


def test_the_probability_of_improvement_is_a_mean_over_games_of_pairs():
    ours = [np.array([1.0, 5.0]), np.array([2.0, 2.0])]
    theirs = [np.array([0.0, 1.0]), np.array([2.0, 3.0])]
    # First game: 1 > 0, 1 = 1, 5 > 0, 5 > 1: 3.5 of 4. Second: two ties and two losses: 1 of 4.
    assert probability_of_improvement(ours, theirs) == pytest.approx((3.5 / 4 + 1 / 4) / 2)
    assert probability_of_improvement(theirs, ours) == pytest.approx((0.5 / 4 + 3 / 4) / 2)


def test_seeds_are_drawn_within_each_game():
    same = [np.array([1.0, 1.0, 1.0]), np.array([5.0, 5.0])]
    assert interval(lambda games: np.concatenate(games, axis=-1).mean(axis=-1), same) == pytest.approx((2.6, 2.6))
    # Of one game with the seeds 0 and 1, a quarter of the draws has the mean 0, and a quarter the mean 1.
    assert interval(lambda games: games[0].mean(axis=-1), [np.array([0.0, 1.0])]) == (0.0, 1.0)
    # Between two systems, one of whose two seeds is always higher: a draw has a chance of 0, 1/2 or 1.
    ours, theirs = [np.array([0.0, 2.0])], [np.array([1.0, 1.0])]
    assert interval(probability_of_improvement, ours, theirs) == (0.0, 1.0)
    assert interval(probability_of_improvement, [np.array([3.0, 2.0])], theirs) == (1.0, 1.0)


def test_scores_are_shares_of_the_way_from_random_play_to_a_human():
    assert set(RANDOM_AND_HUMAN) == set(UNTUNED)
    assert normalize("qbert", np.array([163.9, 13_455.0, 6_809.45])) == pytest.approx([0.0, 1.0, 0.5])


def test_the_table_has_figures_of_complete_systems_and_names_missing_runs():
    apex = [run for run in UNTUNED_RUNS if run[1] == "apex"]
    lines = render_untuned(make_records(apex))
    assert lines[-8].startswith("| interquartile mean, human-normalized | 100.0 % (100.0 to 100.0) | - | - |")
    assert lines[-9] == "| Qbert | 13455.0 (13455.0, 13455.0, 13455.0) | - | - |"
    assert lines[-1].startswith("20 of 35 runs (system and seed) are missing: BattleZone sb3-ppo 201, sb3 201, ")

    records = make_records(UNTUNED_RUNS)
    assert missing_runs(records[1:]) == UNTUNED_RUNS[:1]
    assert render_untuned([*records, make_record("qbert", "apex", 7, mean=0.0)]) == render_untuned(records)
    *_, means, chances, _, _, _, processors = render_untuned(records)
    assert means.endswith("| 100.0 % (100.0 to 100.0) | 0.0 % (0.0 to 0.0) | 0.0 % (0.0 to 0.0) |")
    assert chances.endswith("| | 100.0 % (100.0 to 100.0) | 100.0 % (100.0 to 100.0) |")
    assert processors.startswith("Runs: 15 of Ape-X over ZeroMQ on AMD EPYC, 10 of Stable-Baselines3 DQN on AMD EPYC, ")


def test_a_figure_of_one_run_of_each_game_has_no_interval():
    first = [run for run in UNTUNED_RUNS if run[2] == 201]
    *_, means, chances, _, _, _, _, _, _ = render_untuned(make_records(first))
    assert means.endswith("| 100.0 % | 0.0 % | 0.0 % |")
    assert chances.endswith("| | 100.0 % | 100.0 % |")
    *_, means, chances, _, _, _, _, _, _ = render_untuned(make_records(first[:-1]))
    assert chances.endswith("| | 100.0 % | - |")


@pytest.mark.parametrize(
    "change",
    [
        {"machine": {**MACHINE, "cores": 16}},
        {"machine": {**MACHINE, "gpus": ["NVIDIA H200"]}},
        {"seconds": 1_000.0},
        {"others_share": 0.06},
        {"others_share": None},
        {"dirty": True},
        {"dirty": None},
    ],
)
def test_a_run_under_other_conditions_does_not_count(change):
    first, *others = make_records(UNTUNED_RUNS)
    lines = render_untuned([replace(first, **change), *others])
    assert lines[-1].endswith(": battle-zone apex-seed-201.")
    assert lines[-3].startswith("1 of 35 runs (system and seed) are missing: BattleZone apex 201.")
    assert missing_runs([replace(first, **change)]) == UNTUNED_RUNS[1:]  # It is there, and is not made again.


def test_failed_runs_are_named():
    *_, last = render_untuned(make_records(UNTUNED_RUNS[1:]), UNTUNED_RUNS[:1])
    assert last == "These runs failed: battle-zone apex seed 201."


def test_the_picture_has_a_point_for_each_run():
    first, second, *_ = draw(make_records(UNTUNED_RUNS[:4])).axes
    assert {line.get_label(): len(line.get_xdata()) for line in first.lines[:3]} == {
        "Ape-X over ZeroMQ": 1,
        "Stable-Baselines3 PPO": 1,
        "Stable-Baselines3 DQN": 1,
    }
    assert [len(line.get_xdata()) for line in second.lines[:3]] == [1, 0, 0]
    assert first.lines[0].get_xdata()[0] == pytest.approx(100.0)


@pytest.mark.parametrize("task", UNTUNED)
def test_all_systems_play_untuned_games_by_the_same_rules(task):
    environment = parse_config(TASKS[task].options, prog="").environment
    assert (
        ATARI_OPTIONS
        | {
            "repeat_action_probability": environment.sticky_actions,
            "full_action_space": environment.full_action_space,
            "max_num_frames_per_episode": environment.max_episode_frames,
        }
        == UNTUNED_OPTIONS
    )
    assert (environment.sticky_actions, environment.full_action_space) == (0.25, True)
    assert environment.max_episode_frames == 18_000
    assert not environment.life_loss_terminates
    assert not environment.fire_after_life_loss
    assert (environment.frame_skip, environment.noop_max, environment.atari_stack) == (4, 30, 4)
    assert all(PEER_TASKS[name][environment.id].is_untuned for name in ("dqn", "ppo"))


def test_schedules_of_fitted_peers_end_with_the_time():
    shares = iter([0.0, 0.25, 1.2])
    model = SimpleNamespace()
    peer._follow_the_clock(model, lambda: next(shares))
    rate = peer._schedule("lin_4.0", peer.FOREVER)
    rates = []
    for steps in (5, 10, 15):
        model._update_current_progress_remaining(steps, peer.FOREVER)
        rates.append(rate(model._current_progress_remaining))
    assert rates == [4.0, 3.0, 0.0]
