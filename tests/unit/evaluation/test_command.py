"""Tests of `apex evaluate` and `apex.evaluate`: full games, which policy plays, refused arguments, videos."""

import json
import os
import signal
from dataclasses import asdict

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.envs.classic_control import CartPoleEnv
from support.environments import Counter, here
from support.films import read_mp4
from support.policy_runs import CARTPOLE, NETWORK, make_run

import apex
from apex.algorithms.parameters import flatten_parameters
from apex.config import Config, EnvironmentConfig
from apex.dqn.networks import make_network
from apex.environments.factory import describe
from apex.evaluation.command import main
from apex.runs.checkpoints.policy_file import BEST, PolicyInfo, save_policy


def evaluate(capsys, *argv):
    """Returns the object of --json; the program must end with status 0."""
    status = main([*map(str, argv), "--json"])
    out, err = capsys.readouterr()
    assert status == 0, err
    return json.loads(out.splitlines()[-1])


def refuse(capsys, *argv):
    """Returns the error of a program that ends with status 2."""
    assert main([*map(str, argv)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    return err


def test_last_line_with_json_is_one_object_with_all_results(tmp_path, capsys):
    run = make_run(tmp_path, best=70)
    result = evaluate(capsys, run.path, "--episodes", 7, "--envs", 3, "--epsilon", 0, "--seed", 5)
    assert result["episodes"] == len(result["scores"]) == len(result["lengths"]) == 7
    assert result["scores"] == result["lengths"]  # The reward of CartPole is 1 per step.
    assert all(8 <= score <= 11 for score in result["scores"])  # The pole falls after 8 to 11 pushes in one direction.
    assert result["mean"] == pytest.approx(np.mean(result["scores"]))
    assert result["median"] == np.median(result["scores"])
    low, high = result["interval"]
    assert low <= result["mean"] <= high
    assert (result["epsilon"], result["seed"], result["updates"]) == (0.0, 5, 70)
    assert (result["environment"], result["checkpoint"]) == ("CartPole-v1", str(run.checkpoints / BEST))


def test_output_without_json_is_a_table(tmp_path, capsys):
    run = make_run(tmp_path, best=70)
    assert main([str(run.path), "--episodes", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "environment",
        "policy",
        "games",
        "mean score",
        "median",
        "min ... max",
        "mean length",
    ]
    assert "70 updates, epsilon 0.001" in lines[1]


class Lucky(CartPoleEnv):
    """Succeeds in games of an even number of steps, and reports the length of the others only."""

    def step(self, action):
        self.length = getattr(self, "length", 0) + 1
        *answer, terminated, truncated, _ = super().step(action)
        info = {"is_success": self.length % 2 == 0} | ({"metrics": {"length": self.length}} if self.length % 2 else {})
        self.length *= not terminated
        return *answer, terminated, truncated, info


def test_metrics_have_rows_with_intervals_and_success_is_a_share(capsys):
    arguments = ["--random", "--env", here(Lucky), "--episodes", "30", "--json"]
    assert main(arguments) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    metrics = json.loads(last)["metrics"]
    success, length = metrics["success"], metrics["length"]
    assert success["games"] == 30
    assert length["games"] == 30 - round(30 * success["mean"])
    rows = {line.split()[0]: line for line in lines}
    assert f"{100 * success['mean']:.4g} %" in rows["success"]
    assert all(f"{100 * bound:.4g}" in rows["success"] for bound in success["interval"])
    assert f"{length['mean']:.4g} " in rows["length"]
    assert f"{length['games']} games" in rows["length"]


class Chance(CartPoleEnv):
    """Its reward is drawn from NumPy's global generator."""

    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, float(np.random.random()), *rest


def test_same_seed_plays_the_same_games_with_global_generators(capsys):
    def scores():
        return evaluate(capsys, "--random", "--env", here(Chance), "--episodes", 3, "--seed", 1)["scores"]

    np.random.seed(7)
    expected = scores()
    after = np.random.random()
    assert scores() == expected
    np.random.seed(7)
    assert np.random.random() == after, "the generator of the caller goes on as before"


def test_same_seed_plays_the_same_games(capsys):
    def scores(seed):
        return evaluate(capsys, "--random", "--env", "CartPole-v1", "--episodes", 8, "--seed", seed)["scores"]

    assert scores(1) == scores(1)
    assert scores(1) != scores(2)


def test_random_policy_needs_no_run(capsys):
    result = evaluate(capsys, "--random", "--env", "CartPole-v1", "--episodes", 40)
    # The mean of a random policy is 22.3, with a standard deviation of 12: four of the mean's are 7.6.
    assert result["mean"] == pytest.approx(22.3, abs=7.6)
    assert (result["checkpoint"], result["epsilon"], result["updates"]) == (None, 1.0, None)
    assert evaluate(capsys, "--random", "--env", "CartPole-v1", "--episodes", 1)["interval"] is None


def test_random_policy_plays_continuous_actions(capsys):
    result = evaluate(capsys, "--random", "--env", "Pendulum-v1", "--episodes", 10)
    assert -1_600 < result["mean"] < -900  # about -1,220 with a standard deviation of 290 of one game


def test_function_returns_the_results_of_the_command(tmp_path, capsys):
    run = make_run(tmp_path, best=70)
    printed = evaluate(capsys, run.path, "--episodes", 6, "--envs", 2, "--seed", 3, "--epsilon", 0.5)
    result = apex.evaluate(run.path, 6, num_envs=2, seed=3, epsilon=0.5)
    assert json.loads(json.dumps(asdict(result), default=str)) == printed
    assert capsys.readouterr() == ("", "")


def test_function_restores_the_threads_of_torch(tmp_path):
    run, before = make_run(tmp_path, best=70), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        apex.evaluate(run.path, 1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"episodes": 0}, r"episodes.*\b0"),
        ({"episodes": 2.0}, r"episodes.*2\.0"),
        ({"num_envs": 0}, r"num_envs.*\b0"),
        ({"seed": -1}, "seed.*-1"),
        ({"epsilon": 1.5}, r"epsilon.*1\.5"),
        ({"video": "game.avi"}, r"video.*game\.avi"),
        ({"checkpoint": "bets"}, "checkpoint.*'bets'"),
    ],
)
def test_function_refuses_invalid_arguments(tmp_path, options, message):
    run = make_run(tmp_path, best=70)
    with pytest.raises(apex.UsageError, match=message):
        apex.evaluate(run.path, **options)


@pytest.mark.parametrize(
    ("best", "options", "updates"),
    [
        (70, [], 70),
        (None, [], 90),
        (70, ["--checkpoint", "last"], 90),
        (70, ["--checkpoint", "best"], 70),
        (70, ["--checkpoint", "000000080"], 80),
    ],
)
def test_best_policy_plays_unless_another_one_is_chosen(tmp_path, capsys, best, options, updates):
    run = make_run(tmp_path, best=best, last=[80, 90])
    assert evaluate(capsys, run.path, "--episodes", 1, *options)["updates"] == updates


def test_checkpoint_is_chosen_by_its_path_and_a_run_by_any_name(tmp_path, capsys):
    run = make_run(tmp_path, name="7", best=70, last=[80])
    other = make_run(tmp_path, name="other", best=75).checkpoints / BEST
    for arguments, updates in (
        ([run.path], 70),
        ([run.checkpoints / "000000080"], 80),
        ([run.path, "--checkpoint", other], 75),
    ):
        assert evaluate(capsys, *arguments, "--episodes", 1)["updates"] == updates


def test_damaged_last_checkpoint_is_skipped(tmp_path, capsys):
    run = make_run(tmp_path, last=[80, 90])
    (run.checkpoints / "000000090" / "learner.safetensors").write_bytes(b"")
    assert evaluate(capsys, run.path, "--episodes", 1)["updates"] == 80


class Interrupting(Counter):
    """Sends a signal to its process at the beginning of its third episode."""

    observation_space = spaces.Box(0, 9, (2,), np.float64)
    action_space = spaces.Discrete(1, start=2)
    signum = signal.SIGINT

    def reset(self, **options):
        answer = super().reset(**options)
        if self.episode == 3:
            os.kill(os.getpid(), self.signum)
        return answer


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 1)])
def test_stopped_evaluation_reports_the_games_played(capsys, monkeypatch, signum, status):
    monkeypatch.setattr(Interrupting, "signum", signum)
    assert main(["--random", "--env", here(Interrupting), "--envs", "1", "--episodes", "9", "--json"]) == status
    out, err = capsys.readouterr()
    result = json.loads(out.splitlines()[-1])
    assert (result["episodes"], result["scores"]) == (2, [6.0, 6.0])
    assert "2 of 9 games" in err


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        (["nowhere"], ["nowhere"]),
        (["--random"], ["--env"]),
        (["--random", "--env", "CartPole-v1", "mine"], ["--random", "mine"]),
        (["--random", "--env", "CartPole-v1", "--checkpoint", "best"], ["--random", "--checkpoint best"]),
        (["--env", "CartPole-v1"], ["--env CartPole-v1", "--random"]),
        (["--env-arg", "gravity=3"], ["--env-arg", "--random"]),
        (["--random", "--env", "CartPool-v1"], ["CartPole-v1"]),
        (["--episodes", "0"], ["--episodes", "got 0"]),
        (["--envs", "many"], ["--envs", "'many'"]),
        (["--epsilon", "2"], ["--epsilon", "2.0"]),
        (["--epsilon", "nan"], ["--epsilon", "nan"]),
        (["--epsilon", "few"], ["--epsilon", "'few'"]),
        (["--seed", "-1"], ["--seed", "-1"]),
        (["--sead", "1"], ["--sead"]),
        (["--random", "--env", "CartPole-v1", "--video", "game.avi"], ["--video", "game.avi"]),
        (["--random", "--env", "CartPole-v1", "--video", "no/game.mp4"], ["--video no/game.mp4"]),
        (["--video-steps", "9"], ["--video-steps", "--video "]),
    ],
)
def test_invalid_argument_is_refused_with_its_name_and_value(tmp_path, capsys, monkeypatch, argv, names):
    monkeypatch.chdir(tmp_path)
    error = refuse(capsys, *argv)
    assert all(name in error for name in names)


def test_help_ends_with_status_0(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["--help"])
    assert exit.value.code == 0
    assert "--episodes" in capsys.readouterr().out


def test_newest_run_is_the_default(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "apex train" in refuse(capsys)
    make_run("runs")
    assert "runs has a policy" in refuse(capsys)
    make_run("runs", name="older", best=1).checkpoints.joinpath(BEST).write_bytes(b"damaged")
    assert "runs/older\n" in refuse(capsys)


def test_run_without_a_policy_is_refused(tmp_path, capsys):
    run = make_run(tmp_path)
    assert f"{run.path} has neither" in refuse(capsys, run.path)
    assert "--checkpoint last" in refuse(capsys, run.path, "--checkpoint", "best")
    assert "'bets'" in refuse(capsys, run.path, "--checkpoint", "bets")


def test_damaged_policy_is_refused_with_its_path(tmp_path, capsys):
    best = make_run(tmp_path, best=1).checkpoints / BEST
    best.write_bytes(b"damaged")
    assert str(best) in refuse(capsys, best.parent.parent)


def test_policy_of_other_observations_is_refused(tmp_path, capsys):
    run, schema = make_run(tmp_path), describe(EnvironmentConfig(id="Acrobot-v1"), 3)
    config = Config(network=NETWORK, environment=CARTPOLE)
    info = PolicyInfo(schema=schema, config=config, num_updates=1, score=None)
    save_policy(run.checkpoints / BEST, flatten_parameters(make_network(NETWORK, schema, seed=1)), info)
    error = refuse(capsys, run.path)
    assert str(run.checkpoints / BEST) in error
    assert "float32[1, 6] and 3 actions" in error


def test_video_has_one_picture_per_step_of_the_first_game(tmp_path, capsys):
    path = tmp_path / "game.mp4"
    result = evaluate(capsys, "--random", "--env", "CartPole-v1", "--episodes", 3, "--envs", 1, "--video", path)
    codec, fps, pictures = read_mp4(path)
    assert (codec, fps, len(pictures)) == (b"vp09", 50.0, result["lengths"][0])
    assert pictures[0].shape == (400, 600, 3)
    assert result["video"] == str(path)
    assert (pictures[0] != pictures[-1]).any()


def test_an_error_of_the_film_does_not_wait_for_all_games(tmp_path, capsys):
    path = tmp_path / "game.mp4"
    path.symlink_to("/dev/full")
    argv = ["--random", "--env", "CartPole-v1", "--episodes", "1000000", "--envs", "1", "--video", str(path)]
    assert main(argv) == 2
    assert f"--video {path}" in capsys.readouterr().err


def test_video_has_only_the_given_steps(tmp_path, capsys):
    path = tmp_path / "game.mp4"
    options = ("--episodes", 1, "--video", path, "--video-steps", 5)
    assert evaluate(capsys, "--random", "--env", "CartPole-v1", *options)["lengths"][0] > 5
    assert len(read_mp4(path)[2]) == 5


def test_atari_video_has_the_speed_and_colours_of_the_console(tmp_path, capsys):
    path = tmp_path / "pong.mp4"
    pong = EnvironmentConfig(id="ALE/Pong-v5", max_episode_frames=400)
    result = evaluate(capsys, make_run(tmp_path, environment=pong, best=1).path, "--episodes", 1, "--video", path)
    _, fps, pictures = read_mp4(path)
    assert (fps, len(pictures)) == (15.0, result["lengths"][0])
    assert pictures[50].shape == (420, 320, 3)
    # Pong's brown background is RGB (144, 72, 17); the codec is lossy.
    assert pictures[50][200, 160].tolist() == pytest.approx([144, 72, 17], abs=12)


@pytest.mark.parametrize("target", ["/proc/nowhere/game.mp4", "/dev/full"])
def test_video_that_cannot_be_written_is_refused_with_its_path(tmp_path, capsys, target):
    path = tmp_path / "game.mp4"
    path.symlink_to(target)
    argv = ["--random", "--env", "CartPole-v1", "--episodes", "1", "--video", str(path)]
    assert main(argv) == 2
    assert f"--video {path}" in capsys.readouterr().err
