"""The names of `import apex`, and the libraries that it does not load."""

import subprocess
import sys
from pathlib import Path

import pytest

import apex
from apex.config import presets


def test_import_loads_no_heavy_library():
    program = "import apex, sys; apex.preset('pong'); apex.UsageError; print(*sys.modules)"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "zmq", "gymnasium", "cv2", "rich"} & set(answer.stdout.split())


@pytest.mark.parametrize("name", apex.__all__)
def test_exported_names_exist_and_no_module_hides_them(name):
    assert callable(getattr(apex, name))
    assert name in dir(apex)
    assert not (Path(apex.__file__).parent / f"{name}.py").exists()  # Importing that would hide the function.


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(AttributeError, match=r"'trian'.*Config, .*train"):
        apex.trian  # noqa: B018
    assert not hasattr(apex, "__path_to_nowhere__")


def test_the_package_has_type_information():
    assert (Path(apex.__file__).parent / "py.typed").exists()


def test_a_preset_accepts_and_checks_changes():
    config = apex.preset("pong", seed=2, run={"max_minutes": 5}, learner={"batch_size": 64})
    assert (config.seed, config.run.max_minutes, config.learner.batch_size) == (2, 5.0, 64)
    assert config.learner.target_period == apex.preset("pong").learner.target_period == 500
    with pytest.raises(apex.UsageError, match=r"cartpole, .*'pnog'"):
        apex.preset("pnog")
    with pytest.raises(apex.UsageError, match=r"learner\.batchsize.*learner\.batch_size"):
        apex.preset("pong", learner={"batchsize": 64})


def test_an_environment_id_chooses_the_preset():
    assert apex.preset_for("CartPole-v1", seed=7) == apex.preset("cartpole", seed=7)
    assert apex.preset_for("ALE/Breakout-v5").environment.id == "ALE/Breakout-v5"
    paper, narrow = apex.preset("atari").network, presets.NARROW.network
    assert apex.preset_for("ALE/Breakout-v5", run={"single_process": True}).network == narrow
    assert apex.preset_for("ALE/Breakout-v5", learner={"device": "cuda"}).network == paper
    assert apex.preset_for("ALE/Breakout-v5", learner={"device": "cpu"}).network == narrow
    with pytest.raises(apex.UsageError, match="CartPole-v1"):
        apex.preset_for("CartPool-v1")
