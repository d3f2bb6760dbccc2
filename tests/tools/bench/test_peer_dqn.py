"""`bench/peers/stable_baselines3_dqn.py`: clock, curve, end and refusals, without the peer itself."""

import io
import os
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import stable_baselines3_dqn as peer
from training_watch import Watch
from zoo_settings import TASKS, Evaluations

RULES = Evaluations(period_seconds=10.0, episodes=2, confirm_episodes=5, num_envs=2, epsilon=0.0)


class Training:
    """A training whose steps take a second; every game takes `game_seconds` and has the next of `scores`."""

    def __init__(self, scores, *, game_seconds=0.0, stop_score=None, limit_seconds=1_000.0):
        self.seconds, self.steps = 0.0, 0
        self.played, self.kept = [], []
        self.curve = io.StringIO()
        self._scores, self._game_seconds = iter(scores), game_seconds
        self.watch = Watch(
            RULES,
            stop_score=stop_score,
            limit_seconds=limit_seconds,
            play=self.play,
            keep=lambda: self.kept.append(self.steps),
            curve=self.curve,
            clock=lambda: self.seconds,
        )

    def play(self, episodes):
        self.played.append((self.steps, episodes))
        self.seconds += self._game_seconds * episodes
        return next(self._scores)

    def run(self, steps):
        while self.steps < steps:
            self.steps += 1
            self.seconds += 1.0
            if not self.watch.goes_on(self.steps):
                break
        return self


def test_the_curve_has_seconds_since_the_start_agent_steps_and_mean_scores():
    training = Training([9.5, 12.0, 11.0]).run(35)
    assert training.curve.getvalue() == "seconds,steps,score\n10.0,10,9.5\n20.0,20,12.0\n30.0,30,11.0\n"


def test_evaluations_take_at_most_a_tenth_of_the_time():
    training = Training([1.0, 2.0, 3.0], game_seconds=3.0).run(80)
    assert training.played == [(10, 2), (64, 2)]  # 6 s of evaluation from 10 s on; the next after 54 s
    assert training.curve.getvalue() == "seconds,steps,score\n16.0,10,1.0\n76.0,64,2.0\n"
    assert training.watch.evaluation_seconds == 12.0


def test_the_stop_score_must_be_confirmed_by_other_games_alone():
    training = Training([475.0, 470.0, 480.0, 475.0], stop_score=475.0).run(100)
    assert training.played == [(10, 2), (10, 5), (20, 2), (20, 5)]
    assert training.watch.reached
    assert training.steps == 20
    assert training.curve.getvalue().splitlines()[1:] == ["10.0,10,470.0", "20.0,20,475.0"]


def test_the_newest_of_the_best_policies_is_kept():
    assert Training([5.0, 9.0, 8.0, 9.0]).run(45).kept == [10, 20, 40]


def test_the_time_limit_ends_it_without_a_last_evaluation():
    training = Training([1.0, 2.0], limit_seconds=20.0).run(100)
    assert (training.steps, training.played, training.watch.reached) == (20, [(10, 2)], False)


def test_the_clock_counts_from_the_start_of_the_process():
    clock = peer._clock_of_process()
    # `ps` computes it in the same way, from the uptime of the system.
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    assert clock() == pytest.approx(uptime - ticks / os.sysconf("SC_CLK_TCK"), abs=2.0)


def test_training_and_every_evaluation_have_different_seeds():
    seeds = [peer._draw_seed(1, number) for number in range(100)] + [peer._draw_seed(1_000_001, 0)]
    assert len({1, *seeds}) == 102
    assert all(0 <= seed < 2**31 for seed in seeds)


class Games:
    """Two environments; the first ends a life every step and a game every third, the second both every fifth."""

    action_space = SimpleNamespace(n=4)

    def __init__(self):
        self.t, self.closed = 0, False

    def reset(self):
        return np.zeros((2, 3))

    def step(self, actions):
        assert actions.shape == (2,)
        self.t += 1
        infos = [{"episode": {"r": 10.0 * e + self.t, "l": self.t}} if self.t % (3, 5)[e] == 0 else {} for e in (0, 1)]
        return np.zeros((2, 3)), np.ones(2), np.array([True, self.t % 5 == 0]), infos

    def close(self):
        self.closed = True


def test_each_environment_plays_equally_many_full_games(monkeypatch):
    games = Games()
    monkeypatch.setattr(peer, "_make_environments", lambda *_, **__: games)
    model = SimpleNamespace(predict=lambda observation, deterministic: (np.zeros(2, int), None))
    task = TASKS["dqn"]["ALE/Breakout-v5"]
    assert peer._play(model, task, "ALE/Breakout-v5", 5, seed=1) == [3.0, 15.0, 6.0, 9.0, 20.0]
    assert games.closed


def test_a_schedule_of_the_zoo_ends_after_its_own_number_of_steps():
    rate = peer._schedule("lin_2.5e-4", 10_000_000)

    def after(steps):
        return rate(1.0 - steps / peer.FOREVER)

    assert [after(0), after(2_500_000), after(10_000_000), after(20_000_000)] == pytest.approx([2.5e-4, 1.875e-4, 0, 0])
    assert (peer._schedule(128, 1), peer._schedule("CnnPolicy", 1)) == (128, "CnnPolicy")
    assert peer._batches_per_update("ppo", TASKS["ppo"]["ALE/Pong-v5"]) == 8 * 128 // 256
    assert peer._batches_per_update("dqn", TASKS["dqn"]["ALE/Pong-v5"]) == 1
    assert peer.ATARI_OPTIONS["repeat_action_probability"] == 0.0


GOOD = ["train", "--env", "CartPole-v1", "--seed", "1", "--minutes", "1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--env", "Tetris"], "Tetris"),
        ([*GOOD, "--algorithm", "sac"], "--env.*HalfCheetah-v5, Hopper-v5.*CartPole-v1"),
        ([*GOOD, "--cores", "0"], "--cores.*0"),
        ([*GOOD, "--seed", "-1"], "--seed.*-1"),
        (GOOD, "bench/peers/setup.sh"),
    ],
)
def test_a_mistake_is_refused_before_training(capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(peer.importlib.util, "find_spec", lambda name: None)  # as if the package were not installed
    with pytest.raises(SystemExit) as exit:
        peer.main(arguments)
    assert exit.value.code == 2
    assert re.search(message, capsys.readouterr().err)
