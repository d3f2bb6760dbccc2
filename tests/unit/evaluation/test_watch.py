"""Tests of `apex watch`: films, the window, the newest policy, and refused arguments."""

import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from support.films import read_gif
from support.policy_runs import CARTPOLE, make_run
from support.scripted import ScriptedEnvironment

from apex.config import EnvironmentConfig
from apex.errors import CheckpointError
from apex.evaluation.command import Player
from apex.evaluation.episodes import Episode, play
from apex.evaluation.watch import NewestPlayer, load_newest, main
from apex.facts import EndReason
from apex.runs.checkpoints.policy_file import BEST


@pytest.fixture(autouse=True)
def no_display(monkeypatch):
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)
    yield
    os.environ.pop("SDL_VIDEODRIVER", None)  # The program sets it.


def watch(*argv):
    return main([*map(str, argv)])


def steps_of(line):
    """The steps in a line such as "game 1: score 10, 10 steps, update 90"."""
    return int(line.split(", ")[1].split()[0])


def test_gif_shows_one_game_at_its_speed(tmp_path, capsys):
    out = tmp_path / "game.gif"
    assert watch(make_run(tmp_path, last=[90]).path, "--out", out, "--seed", 1, "--epsilon", 0) == 0
    lines = capsys.readouterr().out.splitlines()
    steps = steps_of(lines[0])
    assert lines[0] == f"game 1: score {steps}, {steps} steps, update 90"
    assert lines[1].startswith(f"{out}: {steps / 50:.1f} s")
    read = read_gif(out)
    assert sum(milliseconds for _, milliseconds in read) == pytest.approx(20 * steps, abs=40)
    assert read[0][0].shape == (400, 600, 3)
    assert (read[0][0] != read[-1][0]).any()  # The pole has moved.


def test_film_of_several_games_has_every_step(tmp_path, capsys):
    out = tmp_path / "game.gif"
    assert watch(make_run(tmp_path, best=7).path, "--out", out, "--episodes", 3, "--epsilon", 0) == 0
    *games, _ = capsys.readouterr().out.splitlines()
    assert len(games) == 3
    milliseconds = sum(duration for _, duration in read_gif(out))
    assert milliseconds == pytest.approx(20 * sum(map(steps_of, games)), abs=40)


def test_film_ends_after_the_given_seconds(tmp_path, capsys):
    pong = EnvironmentConfig(id="ALE/Pong-v5")
    out = tmp_path / "pong.gif"
    assert watch(make_run(tmp_path, environment=pong, best=7).path, "--out", out, "--seconds", 2) == 0
    assert capsys.readouterr().out.startswith(f"{out}: 2.0 s")
    read = read_gif(out)
    assert sum(milliseconds for _, milliseconds in read) == 2_000
    assert read[0][0].shape == (420, 320, 3)
    assert read[-1][0][200, 160].tolist() == [144, 72, 17]  # the exact brown of Pong


def test_same_seed_gives_the_same_film(tmp_path):
    run = make_run(tmp_path, best=1)
    films = [tmp_path / f"{name}.mp4" for name in "abc"]
    for film, seed in zip(films, (1, 1, 2), strict=True):
        assert watch(run.path, "--out", film, "--seed", seed, "--seconds", 0.1) == 0
    a, b, c = (film.read_bytes() for film in films)
    assert (a == b, a == c) == (True, False)


def test_film_is_written_without_a_display(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path, best=1)
    assert watch(run.path, "--seconds", 0.1) == 0
    assert "mine.gif" in capsys.readouterr().err
    assert (tmp_path / "mine.gif").exists()


def test_window_shows_every_step_of_the_given_games(tmp_path, capsys, monkeypatch):
    import pygame

    shown = []
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    monkeypatch.setattr(pygame.display, "flip", lambda: shown.append(pygame.display.get_surface().get_size()))
    assert watch(make_run(tmp_path, best=1).path, "--episodes", 2, "--epsilon", 0) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["game 1", "game 2"]
    assert shown == [(600, 400)] * sum(map(steps_of, lines))


def test_closing_the_window_ends_the_program(tmp_path, capsys, monkeypatch):
    import pygame

    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    monkeypatch.setattr(pygame.event, "get", lambda kinds: kinds == pygame.QUIT)
    assert watch(make_run(tmp_path, best=1).path) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("environment", "remedies"),
    [({"SDL_VIDEODRIVER": "nowhere"}, ["--out game.gif"]), ({"DISPLAY": ":0"}, ["pygame-ce", "--out game.gif"])],
)
def test_missing_screen_or_pygame_is_refused_with_a_remedy(tmp_path, capsys, monkeypatch, environment, remedies):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if "DISPLAY" in environment:
        monkeypatch.setitem(sys.modules, "pygame", None)
    assert watch(make_run(tmp_path, best=1).path) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert all(remedy in err for remedy in remedies)


@pytest.mark.parametrize(
    ("best", "last", "version"), [(70, [80, 90], 90), (95, [80, 90], 95), (70, [], 70), (None, [], None)]
)
def test_newest_policy_is_a_checkpoint_or_the_best(tmp_path, best, last, version):
    folder = make_run(tmp_path, best=best, last=last).checkpoints
    newest = load_newest(folder, None, 1)
    assert (newest and newest.updates) == version


def test_damaged_policy_raises_an_error_with_its_name(tmp_path):
    run = make_run(tmp_path)
    (run.checkpoints / BEST).write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=BEST):
        load_newest(run.checkpoints, None, 1)


def test_the_best_policy_plays_once_the_run_has_ended(tmp_path, capsys, monkeypatch):
    run = make_run(tmp_path, best=70, last=[80, 90])

    def load(*args, **options):
        player = load_newest(*args, **options)
        run.end = EndReason("interrupted")
        return player

    monkeypatch.setattr("apex.evaluation.watch.load_newest", load)
    assert watch(run.path, "--out", tmp_path / "game.gif", "--episodes", 2, "--epsilon", 0) == 0
    first, second, _ = capsys.readouterr().out.splitlines()
    assert first.endswith("update 90")
    assert second.endswith("update 70")


def test_a_gif_that_is_cut_says_so(tmp_path, capsys, caplog, monkeypatch):
    monkeypatch.setattr("apex.evaluation.video.Gif.__init__.__defaults__", (5,))
    out = tmp_path / "game.gif"
    assert watch(make_run(tmp_path, best=1).path, "--out", out, "--episodes", 3) == 0
    assert f"{out}: 0.2 s of play" in capsys.readouterr().out
    assert re.search(r"game\.gif .* 0\.2 s", caplog.text)


def test_program_waits_for_the_first_policy_of_a_run(tmp_path, capsys, monkeypatch):
    run = make_run(tmp_path)
    best = make_run(tmp_path / "other", best=1).checkpoints / BEST
    monkeypatch.setattr("apex.evaluation.watch.sleep", lambda seconds, stop: best.rename(run.checkpoints / BEST))
    assert watch(run.path, "--out", tmp_path / "game.gif", "--seconds", 0.1) == 0
    assert str(run.path) in capsys.readouterr().err


def test_run_that_ended_without_a_policy_is_refused(tmp_path, capsys):
    run = make_run(tmp_path)
    run.end = EndReason("failed")
    assert watch(run.path, "--out", tmp_path / "game.gif") == 2
    assert str(run.path) in capsys.readouterr().err


def make_player(updates):
    return Player(lambda observation, mask: np.full(len(observation), updates), CARTPOLE, 0.0, Path(BEST), updates)


def test_newer_policy_plays_from_the_next_game_on(capsys):
    newer = [make_player(11), make_player(14), None]
    player = NewestPlayer(make_player(10), lambda: newer.pop(0))
    environment = ScriptedEnvironment([[[1.0, 1.0], [2.0], [1.0, 1.0]]])
    play(environment, player.act, 3, on_game=player.end_game)
    assert environment.actions == [[10], [10], [11], [14], [14]]
    assert capsys.readouterr().out.splitlines() == [
        "game 1: score 2, 2 steps, update 10",
        "game 2: score 2, 1 step, update 11",
        "game 3: score 2, 2 steps, update 14",
    ]
    assert player.title == "CartPole-v1, update 14"


def test_previous_policy_plays_on_if_the_newer_one_is_damaged(capsys):
    def load():
        raise CheckpointError("x is damaged")

    player = NewestPlayer(make_player(10), load)
    player.end_game(Episode(1.0, 1))
    assert player.act(np.zeros((1, 4)), None).tolist() == [10]
    assert capsys.readouterr().err.startswith("x is damaged")


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        (["nowhere"], ["nowhere"]),
        (["mine", "--out", "game.avi"], ["--out", "game.avi"]),
        (["mine", "--out", "no/game.gif"], ["--out no/game.gif"]),
        (["mine", "--episodes", "0"], ["--episodes", "0"]),
        (["mine", "--seconds", "0"], ["--seconds", "0.0"]),
        (["mine", "--seconds", "inf"], ["--seconds", "inf"]),
        (["mine", "--epsilon", "2"], ["--epsilon", "2.0"]),
        (["mine", "--seed", "-1"], ["--seed", "-1"]),
    ],
)
def test_invalid_argument_is_refused_with_its_name_and_value(tmp_path, capsys, monkeypatch, argv, names):
    monkeypatch.chdir(tmp_path)
    make_run("runs", best=1)
    assert watch(*argv) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert all(name in err for name in names)
