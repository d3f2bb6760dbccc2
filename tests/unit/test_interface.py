"""The names of `import apex`, and the libraries that it does not load."""

import subprocess
import sys
from pathlib import Path

import pytest
from gymnasium.envs.classic_control import CartPoleEnv

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


def test_only_public_names_are_listed():
    assert dir(apex) == sorted([*apex.__all__, "__version__"])


@pytest.mark.parametrize(
    ("changes", "known"),
    [
        ({"learner": {"lr": 1e-3}}, "learner.learning_rate"),
        ({"lr": 1e-3}, "learner.learning_rate"),
        ({"learnr": {}}, "learner"),
        ({"stop_score": 1}, "run.stop_score"),
        ({"learner": {"zzz": 1}}, "--help-all"),
    ],
)
def test_an_unknown_setting_names_a_known_one(changes, known):
    with pytest.raises(apex.ConfigError) as error:
        apex.preset("pong", **changes)
    assert known in error.value.remedy


class Anywhere(CartPoleEnv):
    class Within(CartPoleEnv):
        pass


def make_anywhere():
    return Anywhere()


@pytest.mark.parametrize("factory", [CartPoleEnv, Anywhere, make_anywhere])
def test_an_environment_is_a_class_or_function_of_a_module(factory, trusts_nothing):
    config = apex.preset_for(factory, seed=3)
    assert config.environment.id == f"{factory.__module__}:{factory.__name__}"
    assert config == apex.preset_for(config.environment.id, seed=3)


def test_a_network_and_an_algorithm_are_classes_of_modules():
    config = apex.preset("cartpole", network={"factory": Anywhere}, algorithm=make_anywhere)
    assert (config.network.factory, config.algorithm) == (f"{__name__}:Anywhere", f"{__name__}:make_anywhere")


def test_a_class_of_a_notebook_cell_is_refused_with_a_remedy():
    with pytest.raises(apex.ConfigError, match=r"environment\.id.*__main__:Cell") as error:
        apex.preset_for(type("Cell", (CartPoleEnv,), {"__module__": "__main__"}))
    assert "%%writefile" in error.value.remedy


@pytest.mark.parametrize("factory", [Anywhere.Within, lambda: Anywhere()])
def test_what_is_not_at_the_top_level_of_a_module_is_refused(factory):
    for setting, changes in (
        ("environment.id", {"environment": {"id": factory}}),
        ("network.factory", {"network": {"factory": factory}}),
        ("algorithm", {"algorithm": factory}),
    ):
        with pytest.raises(apex.ConfigError) as error:
            apex.preset("pong", **changes)
        assert all(name in error.value.problem for name in (setting, __name__, factory.__qualname__))
        assert error.value.remedy


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
