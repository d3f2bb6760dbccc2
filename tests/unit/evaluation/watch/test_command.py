"""`apex watch`: the newest parameters play, in a window or a film; a user's mistake is a sentence and status 2."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest
from support.scripted import ScriptedEnvironment
from torch import nn

from apex.config import EnvironmentConfig, TransportConfig
from apex.evaluation.policy_sources import NewestPolicy, PoliciesOfFolder
from apex.evaluation.watch.command import Screening, Viewer, main
from apex.runs.checkpoints.checkpoint import MANIFEST
from apex.runs.checkpoints.policy_file import BEST
from apex.runtime.lifecycle import Stop
from apex.types import Schema
from tests.unit.evaluation.test_command import CARTPOLE, make_run
from tests.unit.evaluation.test_video import read_gif

SCHEMA = Schema(frame_shape=(1,), frame_dtype="float32", stack=1, num_actions=2, n_step=3, codec="raw")


@pytest.fixture(autouse=True)
def no_display(monkeypatch):
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)
    yield
    import os

    os.environ.pop("SDL_VIDEODRIVER", None)  # What the program itself has set.


def watch(*argv):
    return main([*map(str, argv)])


def refuse(capsys, *argv):
    assert watch(*argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    return err


# --- films ----------------------------------------------------------------------------------------------------------


def test_a_gif_shows_one_game_at_its_speed_and_its_end_for_a_moment(tmp_path, capsys):
    out = tmp_path / "game.gif"
    assert watch(make_run(tmp_path, last=[90]).path, "--out", out, "--seed", 1, "--epsilon", 0) == 0
    told = capsys.readouterr().out.splitlines()
    steps = int(told[0].split(", ")[1].removesuffix(" steps"))
    assert told[0] == f"game 1: score {steps}, {steps} steps, update 90"
    assert told[1].startswith(f"{out}: {(steps + 35) / 50:.1f} s of play, 0.")
    read = read_gif(out)
    assert sum(milliseconds for _, milliseconds in read) == pytest.approx(20 * (steps + 35), abs=40)
    assert read[0][0].shape == (500, 600, 3)
    assert (read[0][0][:400] != read[-1][0][:400]).any()  # The pole has moved,
    assert (read[0][0][400:] != read[-1][0][400:]).any()  # and so have the words.


def test_an_atari_film_stops_after_its_seconds(tmp_path, capsys):
    pong = EnvironmentConfig(id="ALE/Pong-v5")
    out = tmp_path / "pong.gif"
    assert watch(make_run(tmp_path, environment=pong, best=7).path, "--out", out, "--seconds", 2) == 0
    assert capsys.readouterr().out.startswith(f"{out}: 2.0 s of play")
    read = read_gif(out)
    assert sum(milliseconds for _, milliseconds in read) == 2_000
    assert read[0][0].shape == (520, 320, 3)
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
    assert "there is no display here: this writes mine.gif" in capsys.readouterr().err
    assert (tmp_path / "mine.gif").exists()


# --- the window -----------------------------------------------------------------------------------------------------


def test_a_window_shows_as_many_games_as_it_is_told(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    monkeypatch.setattr("apex.evaluation.watch.command.HOLD_SECONDS", 0.0)
    assert watch(make_run(tmp_path, best=1).path, "--episodes", 2) == 0
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == ["game 1", "game 2"]


# --- which parameters -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("best", "last", "version"), [(70, [80, 90], 90), (95, [80, 90], 95), (70, [], 70)])
def test_the_newest_policy_of_a_folder_is_a_checkpoint_or_the_best(tmp_path, best, last, version):
    policies = PoliciesOfFolder(make_run(tmp_path, best=best, last=last).checkpoints)
    assert policies.newest(0.0).version == version
    assert policies.newest(0.0) is None


def test_a_folder_is_looked_at_again(tmp_path):
    run = make_run(tmp_path, last=[80])
    policies = PoliciesOfFolder(run.checkpoints)
    assert policies.newest(0.0).version == 80
    (make_run(tmp_path / "later", last=[90]).checkpoints / "000000090").rename(run.checkpoints / "000000090")
    assert policies.newest(0.0).version == 90
    (make_run(tmp_path / "best", best=85).checkpoints / BEST).rename(run.checkpoints / BEST)
    assert policies.newest(0.0) is None


def test_a_checkpoint_that_is_damaged_or_just_going_is_passed_over_once(tmp_path, caplog):
    run = make_run(tmp_path, best=70, last=[90])
    (run.checkpoints / "000000090" / "learner.safetensors").unlink()
    assert (run.checkpoints / "000000090" / MANIFEST).exists()
    policies = PoliciesOfFolder(run.checkpoints)
    assert policies.newest(0.0).version == 70
    assert policies.newest(0.0) is None
    assert [record.getMessage().endswith("it is passed over") for record in caplog.records] == [True]


def test_it_waits_for_a_runs_first_parameters_and_says_so(tmp_path, capsys):
    run = make_run(tmp_path)
    best = make_run(tmp_path / "other", best=1).checkpoints / BEST
    timer = threading.Timer(0.3, lambda: best.rename(run.checkpoints / BEST))
    timer.start()
    assert watch(run.path, "--out", tmp_path / "game.gif", "--seconds", 0.1) == 0
    timer.join()
    assert f"waits for the first parameters of {run.path}; Ctrl-C stops" in capsys.readouterr().err


# --- the viewer -----------------------------------------------------------------------------------------------------


class Scripted(ScriptedEnvironment):
    """With a picture and a speed."""

    fps = 10.0

    def picture(self):
        return np.zeros((400, 320, 3), np.uint8)


class Table(nn.Module):
    """Q-values that prefer one action."""

    def __init__(self, action):
        super().__init__()
        self._q = nn.functional.one_hot(nn.Parameter(requires_grad=False).new_tensor(action).long(), 2).float()

    def forward(self, observation):
        return self._q.expand(len(observation), -1)


class Policies:
    """One newer policy for each look."""

    def __init__(self, *policies):
        self._policies = list(policies)

    def newest(self, timeout):
        return self._policies.pop(0) if self._policies else None


class Notes:
    """Stands for the strip: notes what is said of each picture."""

    def __init__(self):
        self.captions = []

    def below(self, picture, caption):
        self.captions.append(caption)
        return picture


def view(games, *later, episodes=None, show=lambda picture: True, most=math.inf, stop=None):
    first, *others = [NewestPolicy(v, Table(v % 2), CARTPOLE, SCHEMA) for v in (10, *later)]
    environment, notes = Scripted([games]), Notes()
    viewer = Viewer(environment, Policies(*others), first, epsilon=0.0, seed=1)
    screening = Screening(show, most)
    ended = viewer.run(screening, notes, stop or Stop(), episodes)
    return ended, environment, notes.captions, screening


def test_every_picture_says_the_score_until_then_and_the_last_one_the_games(capsys):
    ended, _, captions, screening = view([[1.0, 0.0, 2.5]], episodes=1)
    assert ended == 1
    assert [(caption.step, caption.score) for caption in captions] == [(0, 0.0), (1, 1.0), (2, 1.0), (3, 3.5)]
    assert screening.num_pictures == 3 + 7  # The end stays for 0.7 s.
    assert capsys.readouterr().out == "game 1: score 3.5, 3 steps, update 10\n"


def test_a_newer_policy_plays_from_the_next_game_on():
    _, environment, captions, _ = view([[1.0, 1.0]], 11, 14, episodes=3)
    assert [(caption.game, caption.version) for caption in captions if caption.step == 0] == [(1, 10), (2, 11), (3, 14)]
    assert environment.actions == [[0], [0], [1], [1], [0], [0]]


@pytest.mark.parametrize("most", [1, 4, 9, 13])
def test_it_ends_with_the_picture_after_which_nobody_wants_more(most):
    assert view([[1.0, 1.0, 1.0]], most=most)[3].num_pictures == most
    wanted = iter([True] * (most - 1) + [False])
    assert view([[1.0, 1.0, 1.0]], show=lambda picture: next(wanted))[3].num_pictures == most


def test_it_ends_when_asked_to_stop():
    stop = Stop()

    def show(picture):
        stop.request()
        return True

    ended, environment, _, _ = view([[1.0] * 100], show=show, stop=stop)
    assert (ended, len(environment.actions)) == (0, 1)


# --- mistakes -------------------------------------------------------------------------------------------------------


def test_once_does_not_wait(tmp_path, capsys):
    run = make_run(tmp_path)
    assert f"{run.path} has no parameters yet: leave out --once" in refuse(capsys, run.path, "--once", "--out", "x.gif")


def test_once_does_not_wait_for_a_learner_either(capsys, monkeypatch):
    monkeypatch.setattr("apex.evaluation.watch.command.ONCE_SECONDS", 0.5)
    port = TransportConfig().control_port + 7  # Nobody's: the tests take others.
    words = f"no run at tcp://127.0.0.1:{port} has answered in 0.5 s"
    assert words in refuse(capsys, "--learner", f"127.0.0.1:{port}", "--once", "--out", "x.gif")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "which run? The latest: apex watch runs/mine"),
        (["nowhere"], "nowhere is not a run folder: no such folder"),
        (["mine", "--learner", "127.0.0.1"], "--learner 127.0.0.1 or the run mine: give one of the two"),
        (["mine", "--out", "game.avi"], "--out must end in .mp4 or .gif, got game.avi"),
        (["mine", "--out", "no/game.gif"], "there is no folder no"),
        (["mine", "--episodes", "0"], "--episodes: must be a whole number >= 1, got '0'"),
        (["mine", "--seconds", "0"], "--seconds: must be a number of seconds > 0, got '0'"),
        (["mine", "--seconds", "inf"], "--seconds: must be a number of seconds > 0, got 'inf'"),
        (["mine", "--epsilon", "2"], "--epsilon: must be a number 0 ... 1, got '2'"),
        (["mine", "--seed", "-1"], "--seed: must be a whole number 0 ... 2147483647, got '-1'"),
        (["mine", "--learner", "127.0.0.1:x"], "127.0.0.1:x"),
    ],
)
def test_refuses_what_it_does_not_understand(tmp_path, capsys, monkeypatch, argv, words):
    monkeypatch.chdir(tmp_path)
    make_run("runs", best=1)
    assert words in refuse(capsys, *argv)
