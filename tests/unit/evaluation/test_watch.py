"""`apex watch`: the newest policy plays, in a window or a film; a user's mistake is a sentence and status 2."""

from __future__ import annotations

import os
import sys
import threading
from types import SimpleNamespace

import pytest
from support.films import read_gif
from support.policy_runs import make_run

from apex.config import EnvironmentConfig
from apex.errors import CheckpointError
from apex.evaluation.watch import load_newest, main, play_games
from apex.runs.checkpoints.policy_file import BEST
from apex.runtime.lifecycle import Stop


@pytest.fixture(autouse=True)
def no_display(monkeypatch):
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)
    yield
    os.environ.pop("SDL_VIDEODRIVER", None)  # The program sets it.


def watch(*argv):
    return main([*map(str, argv)])


def refuse(capsys, *argv):
    assert watch(*argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    return err


# --- films ----------------------------------------------------------------------------------------------------------


def test_a_gif_shows_one_game_at_its_speed(tmp_path, capsys):
    out = tmp_path / "game.gif"
    assert watch(make_run(tmp_path, last=[90]).path, "--out", out, "--seed", 1, "--epsilon", 0) == 0
    told = capsys.readouterr().out.splitlines()
    steps = int(told[0].split(", ")[1].removesuffix(" steps"))
    assert told[0] == f"game 1: score {steps}, {steps} steps, update 90"
    assert told[1].startswith(f"{out}: {steps / 50:.1f} s of play, 0.")
    read = read_gif(out)
    assert sum(milliseconds for _, milliseconds in read) == pytest.approx(20 * steps, abs=40)
    assert read[0][0].shape == (400, 600, 3)
    assert (read[0][0] != read[-1][0]).any()  # The pole has moved.


def test_an_atari_film_stops_after_its_seconds(tmp_path, capsys):
    pong = EnvironmentConfig(id="ALE/Pong-v5")
    out = tmp_path / "pong.gif"
    assert watch(make_run(tmp_path, environment=pong, best=7).path, "--out", out, "--seconds", 2) == 0
    assert capsys.readouterr().out.startswith(f"{out}: 2.0 s of play")
    read = read_gif(out)
    assert sum(milliseconds for _, milliseconds in read) == 2_000
    assert read[0][0].shape == (420, 320, 3)
    assert read[-1][0][200, 160].tolist() == [144, 72, 17]  # Pong's brown, to the last bit.


def test_the_same_seed_is_the_same_film(tmp_path):
    run = make_run(tmp_path, best=1)
    films = [tmp_path / f"{name}.mp4" for name in "abc"]
    for film, seed in zip(films, (1, 1, 2), strict=True):
        assert watch(run.path, "--out", film, "--seed", seed, "--seconds", 0.1) == 0
    a, b, c = (film.read_bytes() for film in films)
    assert (a == b, a == c) == (True, False)


def test_without_a_display_it_writes_a_film_and_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path, best=1)
    assert watch(run.path, "--seconds", 0.1) == 0
    assert "apex watch: no display found; writing mine.gif instead" in capsys.readouterr().err
    assert (tmp_path / "mine.gif").exists()


# --- the window -----------------------------------------------------------------------------------------------------


def test_a_window_shows_as_many_games_as_it_is_told_to(tmp_path, capsys, monkeypatch):
    import pygame

    shown = []
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    monkeypatch.setattr(pygame.display, "flip", lambda: shown.append(pygame.display.get_surface().get_size()))
    assert watch(make_run(tmp_path, best=1).path, "--episodes", 2, "--epsilon", 0) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["game 1", "game 2"]
    steps = sum(int(line.split(", ")[1].removesuffix(" steps")) for line in lines)
    assert shown == [(600, 400)] * (steps + 2)  # One for each step, and one for each beginning.


def test_a_closed_window_ends_it(tmp_path, capsys, monkeypatch):
    import pygame

    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    monkeypatch.setattr(pygame.event, "get", lambda kinds: kinds == pygame.QUIT)
    assert watch(make_run(tmp_path, best=1).path) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("environment", [{"SDL_VIDEODRIVER": "nowhere"}, {"DISPLAY": ":0"}])
def test_without_a_screen_or_pygame_the_remedy_is_told(tmp_path, capsys, monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if "DISPLAY" in environment:
        monkeypatch.setitem(sys.modules, "pygame", None)
    words = {"SDL_VIDEODRIVER": "no window can be opened", "DISPLAY": "pip install pygame-ce"}
    said = refuse(capsys, make_run(tmp_path, best=1).path)
    assert words[next(iter(environment))] in said
    assert "--out game.gif" in said


# --- which policy ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("best", "last", "version"), [(70, [80, 90], 90), (95, [80, 90], 95), (70, [], 70)])
def test_the_newest_policy_of_a_run_is_a_checkpoint_or_the_best(tmp_path, best, last, version):
    folder = make_run(tmp_path, best=best, last=last).checkpoints
    assert load_newest(folder, epsilon=0.0, seed=1).info.num_updates == version


def test_before_there_is_a_policy_there_is_none_and_a_damaged_one_is_an_error(tmp_path):
    run = make_run(tmp_path)
    assert load_newest(run.checkpoints, epsilon=0.0, seed=1) is None
    (run.checkpoints / BEST).write_bytes(b"nothing of the kind")
    with pytest.raises(CheckpointError, match=BEST):
        load_newest(run.checkpoints, epsilon=0.0, seed=1)


def test_it_waits_for_a_runs_first_policy_and_says_so(tmp_path, capsys):
    run = make_run(tmp_path)
    best = make_run(tmp_path / "other", best=1).checkpoints / BEST
    timer = threading.Timer(0.3, lambda: best.rename(run.checkpoints / BEST))
    timer.start()
    assert watch(run.path, "--out", tmp_path / "game.gif", "--seconds", 0.1) == 0
    timer.join()
    assert f"waiting for the first policy of {run.path}; press Ctrl-C to stop" in capsys.readouterr().err


class Games:
    """A Gymnasium environment that pays 1 a step. A game of length 0 fails in its first step."""

    def __init__(self, *lengths):
        self._lengths = list(lengths)

    def reset(self):
        self._left = self._lengths.pop(0)
        return None, {}

    def step(self, action):
        self._left -= 1
        return None, 1.0, self._left == 0, self._left < 0, {"failed": self._left < 0}


class Player:
    """Stands for a policy of so many updates."""

    def __init__(self, num_updates):
        self.info = SimpleNamespace(num_updates=num_updates)

    def __call__(self, observation, mask):
        return 0


def play(lengths, *policies, episodes=9, max_steps=100, stop=None, show=lambda: None):
    """Plays games; returns the steps, and the updates of the policy of each step. An exception is raised by `load`."""
    left, shown = list(policies), []

    def load():
        policy = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(policy, Exception):
            raise policy
        return policy

    def note(policy):
        shown.append(policy.info.num_updates)
        show()

    steps = play_games(Games(*lengths), load, note, stop or Stop(), episodes, max_steps)
    return steps, shown


def test_a_newer_policy_plays_from_the_next_game_on(capsys):
    assert play([2, 1, 2], Player(10), Player(11), Player(14), episodes=3) == (5, [10, 10, 11, 14, 14])
    assert capsys.readouterr().out.splitlines()[2] == "game 3: score 2, 2 steps, update 14"


def test_a_damaged_newer_policy_leaves_the_one_before(capsys):
    assert play([1, 1], Player(10), CheckpointError("x is torn"), episodes=2) == (2, [10, 10])
    assert capsys.readouterr().err.startswith("x is torn; the previous policy continues to play\n")


def test_a_game_in_which_the_environment_failed_does_not_count(capsys):
    assert play([0, 1], Player(10), episodes=1)[0] == 2
    assert capsys.readouterr().out == "game 1: score 1, 1 steps, update 10\n"


def test_it_ends_after_so_many_steps_or_when_asked_to_stop():
    assert play([2, 2], Player(10), max_steps=3)[0] == 3
    stop = Stop()
    assert play([9], Player(10), stop=stop, show=stop.request)[0] == 1


# --- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["nowhere"], "nowhere is not a run folder: no such folder"),
        (["mine", "--out", "game.avi"], "--out must end in .mp4 or .gif, got game.avi"),
        (["mine", "--out", "no/game.gif"], "there is no folder no"),
        (["mine", "--episodes", "0"], "--episodes: must be an integer of at least 1, got 0"),
        (["mine", "--seconds", "0"], "--seconds: must be a number above 0, got 0.0"),
        (["mine", "--seconds", "inf"], "--seconds: must be a finite number, got inf"),
        (["mine", "--epsilon", "2"], "--epsilon: must be a number from 0 to 1, got 2.0"),
        (["mine", "--seed", "-1"], "--seed: must be an integer from 0 to 2147483647, got -1"),
    ],
)
def test_refuses_what_it_does_not_understand(tmp_path, capsys, monkeypatch, argv, words):
    monkeypatch.chdir(tmp_path)
    make_run("runs", best=1)
    assert words in refuse(capsys, *argv)
