"""`apex evaluate`: full games of a run's policy or at random; a user's mistake is a sentence and status 2."""

from __future__ import annotations

import json
from dataclasses import asdict

import cv2
import numpy as np
import pytest
import torch
from support.policy_runs import CARTPOLE, NETWORK, make_run

import apex
from apex.algorithms.parameters import flatten_parameters
from apex.config import Config, EnvironmentConfig
from apex.dqn.networks import make_network
from apex.environments.factory import describe
from apex.evaluation.command import main
from apex.runs.checkpoints.policy_file import BEST, PolicyInfo, save_policy


def evaluate(capsys, *argv):
    """The last line of --json, read; the run must end well."""
    status = main([*map(str, argv), "--json"])
    out, err = capsys.readouterr()
    assert status == 0, err
    return json.loads(out.splitlines()[-1])


def refuse(capsys, *argv):
    """What it says to a mistake."""
    assert main([*map(str, argv)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    return err


# --- games ----------------------------------------------------------------------------------------------------------


def test_the_last_line_of_json_is_one_object_with_everything(tmp_path, capsys):
    run = make_run(tmp_path, best=70)
    result = evaluate(capsys, run.path, "--episodes", 7, "--envs", 3, "--epsilon", 0, "--seed", 5)
    assert result["episodes"] == len(result["scores"]) == len(result["lengths"]) == 7
    assert result["scores"] == result["lengths"]  # CartPole pays 1 a step.
    assert all(8 <= score <= 11 for score in result["scores"])  # So long does it stand when always pushed one way.
    assert result["mean"] == pytest.approx(np.mean(result["scores"]))
    assert result["median"] == np.median(result["scores"])
    low, high = result["interval"]
    assert low <= result["mean"] <= high
    assert (result["epsilon"], result["seed"], result["updates"]) == (0.0, 5, 70)
    assert (result["environment"], result["checkpoint"]) == ("CartPole-v1", str(run.checkpoints / BEST))


def test_a_person_is_shown_a_small_table(tmp_path, capsys):
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


def test_the_same_seed_plays_the_same_games_and_another_one_does_not(capsys):
    def scores(seed):
        return evaluate(capsys, "--random", "--env", "CartPole-v1", "--episodes", 8, "--seed", seed)["scores"]

    assert scores(1) == scores(1)
    assert scores(1) != scores(2)


def test_a_random_policy_needs_no_run(capsys):
    result = evaluate(capsys, "--random", "--env", "CartPole-v1", "--episodes", 40)
    # The mean of a random policy is 22.3, with a standard deviation of 12: four of the mean's are 7.6.
    assert result["mean"] == pytest.approx(22.3, abs=7.6)
    assert (result["checkpoint"], result["epsilon"], result["updates"]) == (None, 1.0, None)


def test_a_random_policy_acts_with_values_where_actions_are_continuous(capsys):
    result = evaluate(capsys, "--random", "--env", "Pendulum-v1", "--episodes", 10)
    assert -1_600 < result["mean"] < -900  # about -1,220 with a standard deviation of 290 of one game


def test_one_game_has_no_interval(capsys):
    assert evaluate(capsys, "--random", "--env", "CartPole-v1", "--episodes", 1)["interval"] is None


# --- the function ---------------------------------------------------------------------------------------------------


def test_the_function_plays_the_games_of_the_command(tmp_path, capsys):
    run = make_run(tmp_path, best=70)
    said = evaluate(capsys, run.path, "--episodes", 6, "--envs", 2, "--seed", 3, "--epsilon", 0.5)
    result = apex.evaluate(run.path, 6, num_envs=2, seed=3, epsilon=0.5)
    assert json.loads(json.dumps(asdict(result), default=str)) == said
    assert capsys.readouterr() == ("", "")


def test_torchs_threads_are_the_callers_again(tmp_path):
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
        ({"episodes": 0}, "episodes must be an integer of at least 1, got 0"),
        ({"episodes": 2.0}, r"episodes must be an integer of at least 1, got 2\.0"),
        ({"num_envs": 0}, "num_envs must be an integer of at least 1, got 0"),
        ({"seed": -1}, r"seed must be an integer from 0 to 2147483647, got -1"),
        ({"epsilon": 1.5}, r"epsilon must be a number from 0 to 1, got 1\.5"),
        ({"video": "game.avi"}, r"must end in \.mp4 or \.gif, got game\.avi"),
        ({"checkpoint": "bets"}, "must be best, last or a path, got 'bets'"),
    ],
)
def test_the_function_refuses_what_the_command_does(tmp_path, options, message):
    run = make_run(tmp_path, best=70)
    with pytest.raises(apex.UsageError, match=message):
        apex.evaluate(run.path, **options)


# --- which policy ---------------------------------------------------------------------------------------------------


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
def test_plays_the_best_policy_if_there_is_one_or_what_it_is_told_to(tmp_path, capsys, best, options, updates):
    run = make_run(tmp_path, best=best, last=[80, 90])
    assert evaluate(capsys, run.path, "--episodes", 1, *options)["updates"] == updates


def test_a_run_whose_name_is_a_number_is_no_checkpoint(tmp_path, capsys):
    run = make_run(tmp_path, name="7", best=70, last=[80])
    assert evaluate(capsys, run.path, "--episodes", 1)["updates"] == 70
    assert evaluate(capsys, run.checkpoints / "000000080", "--episodes", 1)["updates"] == 80


def test_a_checkpoint_may_be_given_by_its_path(tmp_path, capsys):
    run = make_run(tmp_path, best=70)
    other = make_run(tmp_path, name="other", best=75)
    result = evaluate(capsys, run.path, "--episodes", 1, "--checkpoint", other.checkpoints / BEST)
    assert result["updates"] == 75


def test_a_damaged_last_checkpoint_gives_way_to_the_one_before(tmp_path, capsys):
    run = make_run(tmp_path, last=[80, 90])
    (run.checkpoints / "000000090" / "learner.safetensors").write_bytes(b"")
    assert evaluate(capsys, run.path, "--episodes", 1)["updates"] == 80


# --- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["nowhere"], "nowhere is not a run folder: no such folder"),
        (["--random"], "--random needs --env ID"),
        (["--random", "--env", "CartPole-v1", "mine"], "--random and the run mine exclude each other"),
        (["--random", "--env", "CartPole-v1", "--checkpoint", "best"], "--checkpoint and --random exclude each other"),
        (["--env", "CartPole-v1"], "--env CartPole-v1 needs --random"),
        (["--env-arg", "gravity=3"], "--env-arg needs --random"),
        (["--random", "--env", "CartPool-v1"], "did you mean CartPole-v1"),
        (["--episodes", "0"], "--episodes: must be an integer of at least 1, got 0"),
        (["--envs", "many"], "--envs: must be an integer of at least 1, got 'many'"),
        (["--epsilon", "2"], "--epsilon: must be a number from 0 to 1, got 2.0"),
        (["--epsilon", "nan"], "--epsilon: must be a number from 0 to 1, got nan"),
        (["--epsilon", "few"], "--epsilon: must be a number from 0 to 1, got 'few'"),
        (["--seed", "-1"], "--seed: must be an integer from 0 to 2147483647, got -1"),
        (["--sead", "1"], "unrecognized arguments: --sead"),
        (["--random", "--env", "CartPole-v1", "--video", "game.avi"], "--video must end in .mp4 or .gif, got game.avi"),
        (["--random", "--env", "CartPole-v1", "--video", "no/game.mp4"], "there is no folder no"),
    ],
)
def test_refuses_what_it_does_not_understand(tmp_path, capsys, monkeypatch, argv, words):
    monkeypatch.chdir(tmp_path)
    assert words in refuse(capsys, *argv)


def test_help_is_no_mistake(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["--help"])
    assert exit.value.code == 0
    assert "full games (default 30)" in capsys.readouterr().out


def test_without_a_run_it_takes_the_newest_and_names_it(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "no run in runs; start one with apex train" in refuse(capsys)
    make_run("runs")
    said = refuse(capsys)
    assert "using the newest run: runs/mine\n" in said
    assert "has neither a best policy nor a checkpoint yet" in said


def test_a_run_without_a_policy_says_what_is_missing(tmp_path, capsys):
    run = make_run(tmp_path)
    assert "has neither a best policy nor a checkpoint yet" in refuse(capsys, run.path)
    assert "has no best policy, because no evaluation was finished" in refuse(capsys, run.path, "--checkpoint", "best")
    assert "--checkpoint must be best, last or a path, got 'bets'" in refuse(capsys, run.path, "--checkpoint", "bets")


def test_a_damaged_policy_is_refused_by_its_name(tmp_path, capsys):
    run = make_run(tmp_path, best=1)
    (run.checkpoints / BEST).write_bytes(b"nothing of the kind")
    assert f"{run.checkpoints / BEST} cannot be read: " in refuse(capsys, run.path)


def test_a_policy_of_other_observations_is_refused(tmp_path, capsys):
    run = make_run(tmp_path)
    network = make_network(NETWORK, describe(EnvironmentConfig(id="Acrobot-v1"), 3), seed=1)
    info = PolicyInfo(
        schema=describe(EnvironmentConfig(id="Acrobot-v1"), 3),
        config=Config(network=NETWORK, environment=CARTPOLE),
        num_updates=1,
        score=None,
    )
    save_policy(run.checkpoints / BEST, flatten_parameters(network), info)
    words = "was trained with float32[1, 6] and 3 actions"
    assert words in refuse(capsys, run.path)


# --- video ----------------------------------------------------------------------------------------------------------


def read_video(path):
    video = cv2.VideoCapture(str(path))
    fps, pictures = video.get(cv2.CAP_PROP_FPS), []
    while (frame := video.read())[0]:
        pictures.append(frame[1])
    video.release()
    return fps, pictures


def test_a_video_shows_the_first_game_picture_by_picture(tmp_path, capsys):
    path = tmp_path / "game.mp4"
    result = evaluate(capsys, "--random", "--env", "CartPole-v1", "--episodes", 3, "--envs", 1, "--video", path)
    fps, pictures = read_video(path)
    assert (fps, len(pictures)) == (50.0, result["lengths"][0])
    assert pictures[0].shape == (400, 600, 3)
    assert result["video"] == str(path)
    assert (pictures[0] != pictures[-1]).any()


def test_an_atari_video_runs_at_the_consoles_speed_in_its_colours(tmp_path, capsys):
    path = tmp_path / "pong.mp4"
    pong = EnvironmentConfig(id="ALE/Pong-v5", max_episode_frames=400)
    result = evaluate(capsys, make_run(tmp_path, environment=pong, best=1).path, "--episodes", 1, "--video", path)
    fps, pictures = read_video(path)
    assert (fps, len(pictures)) == (15.0, result["lengths"][0])
    assert pictures[50].shape == (420, 320, 3)
    # Pong's brown background is RGB (144, 72, 17); the codec is lossy.
    assert pictures[50][200, 160].tolist() == pytest.approx([17, 72, 144], abs=12)


def test_a_video_that_cannot_be_written_is_refused_with_its_name(tmp_path, capsys):
    path = tmp_path / "game.mp4"
    path.symlink_to("/proc/nowhere/game.mp4")
    argv = ["--random", "--env", "CartPole-v1", "--episodes", "1", "--video", str(path)]
    assert main(argv) == 2
    assert f"--video {path}" in capsys.readouterr().err


def test_a_video_on_a_full_disk_is_told(tmp_path, capsys):
    path = tmp_path / "game.mp4"
    path.symlink_to("/dev/full")
    argv = ["--random", "--env", "CartPole-v1", "--episodes", "1", "--video", str(path)]
    assert main(argv) == 2
    assert f"--video {path}" in capsys.readouterr().err
