"""The file of a sweep: its start settings, its search, and what is refused before anything starts."""

import re

import pytest

from apex.config.presets import PRESETS
from apex.sweep.command import main
from apex.sweep.space import read_sweep, with_settings
from apexreplay.errors import UsageError

pytestmark = pytest.mark.usefixtures("trusts_nothing")

FILE = """
[start]
preset = "cartpole"
stop-score = "none"
max-minutes = 0.5
network.dueling = false
single-process = false
insecure_no_auth = false
run.tensorboard = true
env-arg = ["render_fps=50", "size=8x8"]

[search]
learner.learning-rate = { low = 1, high = 10, log = true }
actor.n_step = { low = 1, high = 8 }
batch-size = [64, 128]
learner.loss = ["huber", "squared"]
network.value_rescaling = [true, false]
"""


def read(tmp_path, text, *words):
    path = tmp_path / "sweep.toml"
    path.write_text(text)
    return read_sweep(path, list(words))


def test_start_settings_are_options_of_train_and_the_command_line_wins(tmp_path):
    start, _ = read(tmp_path, FILE, "--max-minutes", "2", "--seed", "7")
    learner = PRESETS["cartpole"].config.learner
    assert (start.seed, start.run.max_minutes, start.run.stop_score, start.learner) == (7, 2.0, None, learner)
    assert (start.network.dueling, start.run.tensorboard) == (False, True)
    assert (start.run.single_process, start.transport.insecure_no_auth) == (False, False)
    assert start.environment.args == {"render_fps": 50, "size": "8x8"}


def test_the_search_has_the_types_of_the_settings(tmp_path):
    _, search = read(tmp_path, FILE)
    assert search == {
        "learner.learning_rate": {"low": 1.0, "high": 10.0, "log": True},
        "actor.n_step": {"low": 1, "high": 8, "log": False},
        "learner.batch_size": [64, 128],
        "learner.loss": ["huber", "squared"],
        "network.value_rescaling": [True, False],
    }
    kinds = [type(search[name]["low"]) for name in ("learner.learning_rate", "actor.n_step")]
    assert kinds == [float, int]


def test_settings_of_a_trial_replace_those_of_the_start(tmp_path):
    start, _ = read(tmp_path, FILE)
    config = with_settings(start, {"seed": 3, "learner.batch_size": 64, "actor.n_step": 2})
    assert (config.seed, config.learner.batch_size, config.actor.n_step) == (3, 64, 2)
    assert config.learner.learning_rate == start.learner.learning_rate


@pytest.mark.parametrize(
    ("search", "texts"),
    [
        ("lerner.batch_size = [1, 2]", ["lerner.batch_size", "learner.batch_size?"]),
        ("seed = [1, 2]", ["seed"]),
        ("max-minutes = [1, 2]", ["run.max_minutes"]),
        ("batch-size = [64]", ["learner.batch_size", "[64]"]),
        ("batch-size = []", ["learner.batch_size", "[]"]),
        ("batch-size = 64", ["learner.batch_size", "64"]),
        ("batch-size = [64, 128.5]", ["learner.batch_size", "128.5"]),
        ("batch-size = [64, 4096]", ["learner.batch_size 4096", "replay.min_size_to_sample 1000"]),
        ("actor.n_step = { low = 0, high = 5 }", ["actor.n_step", "1 to 64", "0"]),
        ("actor.n_step = { low = 1, high = 65 }", ["actor.n_step", "1 to 64", "65"]),
        ("actor.n_step = { low = 5, high = 5 }", ["actor.n_step", "'low': 5"]),
        ("actor.n_step = { low = 5, high = 1 }", ["actor.n_step", "'high': 1"]),
        ("actor.n_step = { low = 1 }", ["actor.n_step", "'low': 1"]),
        ("actor.n_step = { low = 1, high = 5, step = 2 }", ["actor.n_step", "'step': 2"]),
        ("actor.n_step = { low = 1, high = 5, log = 1 }", ["actor.n_step", "'log': 1"]),
        ("learner.learning_rate = { low = 0.0, high = 1.0 }", ["learner.learning_rate", "above 0", "0.0"]),
        ("dpg.noise = { low = 0, high = 1, log = true }", ["dpg.noise", "'low': 0"]),
        ("learner.loss = { low = 'huber', high = 'squared' }", ["learner.loss", "'huber'"]),
        ("network.dueling = { low = false, high = true }", ["network.dueling", "False"]),
        ("network.factory = ['stranger:make', 'other:make']", ["network.factory", "--allow stranger"]),
        ("", []),
    ],
)
def test_an_impossible_search_is_refused(tmp_path, search, texts):
    with pytest.raises(UsageError) as error:
        read(tmp_path, f"[start]\npreset = 'cartpole'\nmax-minutes = 1\n[search]\n{search}\n")
    assert [text for text in texts if text not in str(error.value)] == []


@pytest.mark.parametrize(
    ("text", "texts"),
    [
        ("[start", ["sweep.toml"]),
        ("", ["sweep.toml", "none"]),
        ("[start]\npreset = 'cartpole'", ["start"]),
        ("[search]\nactor.n_step = [1, 2]\n[other]\n", ["other"]),
        ("search = 3", ["search"]),
        ("[start]\nprest = 'cartpole'\n[search]\nactor.n_step = [1, 2]", ["--prest", "--preset"]),
        ("[start]\npreset = 'cart'\n[search]\nactor.n_step = [1, 2]", ["'cart'", "cartpole"]),
        ("[start]\nbatch-size = 0.5\n[search]\nactor.n_step = [1, 2]", ["learner.batch_size", "0.5"]),
        ("[start]\nenv = 'stranger:Env'\n[search]\nactor.n_step = [1, 2]", ["stranger", "--allow stranger"]),
    ],
)
def test_an_unusable_file_is_refused(tmp_path, text, texts):
    with pytest.raises(UsageError) as error:
        read(tmp_path, text)
    assert [each for each in texts if each not in str(error.value)] == []


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UsageError, match=re.escape(str(tmp_path / "none.toml"))):
        read_sweep(tmp_path / "none.toml", [])


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        ([], ["limit", "got 0", "max-minutes"]),
        (["--max-minutes", "1", "--max-steps", "9000"], ["got 2"]),
        (["--max-minutes", "1", "--jobs", "4096"], ["--jobs", "4096"]),
        (["--max-minutes", "1", "--study", "../here"], ["--study", "'../here'"]),
        (["--max-minutes", "1", "--study", ".."], ["--study", "'..'"]),
        (["--max-minutes", "1", "--run.mirror", "m"], ["run.mirror"]),
        (["--max-minutes", "1", "--trials", "0"], ["--trials", "at least 1"]),
        (["--max-minutes", "1", "--engine", "ray"], ["--engine"]),
    ],
)
def test_a_command_that_cannot_be_carried_out_is_refused(tmp_path, monkeypatch, capsys, words, texts):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.toml").write_text("[start]\npreset = 'cartpole'\n[search]\nactor.n_step = [1, 2]\n")
    assert main(["one.toml", *words]) == 2
    error = capsys.readouterr().err
    assert [text for text in texts if text not in error] == []
    assert not (tmp_path / "sweeps").exists()
