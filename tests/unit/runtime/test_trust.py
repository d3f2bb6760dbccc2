"""Tests which modules a user trusts, the list of modules of earlier runs, and what counts as a factory."""

import fcntl
import functools
import multiprocessing
import os
import stat
import sys
import threading
from types import SimpleNamespace
from unittest.mock import patch

import gymnasium
import pytest
from support.environments import install_planes
from torch import nn

from apex.config import Config, EnvironmentConfig, NetworkConfig
from apex.config.arguments import Parser
from apex.environments import foreign
from apex.environments.factory import make_environment
from apex.errors import ConfigError
from apex.runtime import trust
from apex.runtime.importer import find_factory, import_module
from apexreplay.errors import ForeignFileError, UsageError

SETTING = "environment.id"


@pytest.fixture
def user(trusts_nothing, tmp_path, monkeypatch):
    """A user with the modules `mine` and `other` in the current folder."""
    for name in ("mine", "other"):
        (tmp_path / f"{name}.py").write_text("import pathlib\npathlib.Path('imported').touch()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    return SimpleNamespace(folder=tmp_path, list=trusts_nothing / "apex" / "trusted-modules")


def require(module):
    trust.require_trusted(SETTING, f"{module}:make", module)


def later(monkeypatch):
    """Begins another process of the same user."""
    monkeypatch.setattr(trust, "_allowed", set())


def test_unknown_module_is_refused_with_the_option_to_type(user):
    with pytest.raises(UsageError) as refused:
        require("mine")
    assert SETTING in refused.value.problem
    assert "'mine:make'" in refused.value.problem
    assert "--allow mine " in refused.value.remedy
    assert not (user.folder / "imported").exists()
    assert str(user.folder) not in sys.path


@pytest.mark.parametrize("module", ["", "mine;x", "mine\n", "-x", "a..b", "../mine", "a b"])
def test_text_that_is_no_module_is_refused_without_a_line_to_type(user, module):
    trust.allow(module)
    with pytest.raises(ConfigError) as refused:
        require(module)
    assert not refused.value.remedy


def test_option_and_argument_allow_a_module_until_the_process_ends(user, monkeypatch):
    parser = Parser(prog="apex evaluate")
    trust.add_allow(parser)
    parser.parse_args(["--allow", "mine", "--allow", "a.b:make"])
    trust.allow("other")
    for module in ("mine", "a.b", "other"):
        require(module)
    assert trust.allow_options() == ["--allow", "a.b", "--allow", "mine", "--allow", "other"]
    for module in ("a", "b", "a.b.c"):
        with pytest.raises(UsageError):
            require(module)
    later(monkeypatch)
    with pytest.raises(UsageError):
        require("mine")


def test_module_of_an_earlier_run_is_trusted_from_its_place_only(user, monkeypatch):
    trust.remember(["mine"])
    trust.remember(["mine", "no_such_module"])
    later(monkeypatch)
    require("mine")
    assert trust.allow_options() == ["--allow", "mine"]
    assert len(user.list.read_text().split()) == 2
    later(monkeypatch)
    elsewhere = user.folder / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine.py").touch()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(user.folder)])
    with pytest.raises(UsageError):
        require("mine")


def test_list_is_private_and_a_list_of_others_is_refused(user, monkeypatch, caplog):
    trust.remember(["mine"])
    later(monkeypatch)
    assert stat.S_IMODE(user.list.stat().st_mode) == 0o600
    assert stat.S_IMODE(user.list.parent.stat().st_mode) == 0o700
    assert [path.name for path in user.list.parent.iterdir()] == [user.list.name]
    target, other_user = user.folder / "planted", patch("os.geteuid", lambda: 12_345)
    for plant, undo in (
        (lambda: user.list.chmod(0o644), lambda: user.list.chmod(0o600)),
        (lambda: (user.list.rename(target), user.list.symlink_to(target)), lambda: target.rename(user.list)),
        (other_user.start, other_user.stop),
    ):
        plant()
        with pytest.raises(ForeignFileError) as refused:
            require("mine")
        assert refused.value.remedy
        trust.remember(["other"])  # Training goes on.
        assert caplog.records.pop().levelname == "WARNING"
        undo()


def test_list_that_cannot_be_written_does_not_prevent_training(user, monkeypatch, caplog):
    (user.folder / "file").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(user.folder / "file"))
    trust.remember(["mine"])
    assert caplog.records[0].levelname == "WARNING"
    with pytest.raises(UsageError, match="mine"):
        require("mine")


def remember_some(first):
    for i in range(first, first + 20):
        trust.remember([f"module_{i}"])


def test_processes_that_write_the_list_together_lose_no_module(user):
    for i in range(80):
        (user.folder / f"module_{i}.py").touch()
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=remember_some, args=[20 * i]) for i in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert len(user.list.read_text().split()) == 160


def test_a_process_writes_the_list_after_the_one_that_has_locked_it(user):
    trust.remember(["other"])
    with user.list.open("a") as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
        other = threading.Thread(target=trust.remember, args=[["mine"]])
        other.start()
        other.join(0.5)  # Without a lock, it writes now.
        locked.write(f"\nmine {os.path.realpath('mine.py')}")
    other.join()
    assert user.list.read_text().split().count("mine") == 1


# Names of a configuration


def test_only_environments_of_other_packages_need_trust(monkeypatch):
    own = ("CartPole-v1", "CartPole", "ALE/Pong-v5", "pong", "PongNoFrameskip-v4", "dm_control/x-v0", "No-v0", "@", "")
    assert [name for name in own if foreign.environment_modules(name)] == []
    monkeypatch.setattr(gymnasium, "registry", dict(gymnasium.registry))
    monkeypatch.setattr(gymnasium.envs.registration, "registry", gymnasium.registry)
    gymnasium.register("plugin/Maze-v0", entry_point="plugin.mazes:Maze")
    gymnasium.register("plugin/Maze-v2", entry_point="gymnasium.envs.classic_control:CartPoleEnv")
    for name in ("plugin/Maze-v0", "plugin/Maze-v2", "plugin/Maze"):
        assert foreign.environment_modules(name) == ["plugin.mazes"]
    assert foreign.environment_modules("plugin.mazes:Maze-v0") == ["plugin.mazes"]


@pytest.fixture
def registry(monkeypatch):
    """Forgets the environments that a test registers."""
    monkeypatch.setattr(gymnasium, "registry", dict(gymnasium.registry))
    monkeypatch.setattr(gymnasium.envs.registration, "registry", gymnasium.registry)


def test_a_trusted_module_opens_no_environment_of_another_package(user, registry):
    gymnasium.register("Theirs-v0", entry_point="other:make")
    gymnasium.register("Made-v0", entry_point=make)
    gymnasium.register("Partly-v0", entry_point=make_partial)
    trust.allow("mine")
    for name, module in (("Theirs-v0", "other"), ("Made-v0", __name__), ("Partly-v0", "functools")):
        for prefix in ("", "apex:", "mine:"):
            with pytest.raises(UsageError) as refused:
                make_environment(EnvironmentConfig(id=prefix + name), 1, seed=0)
            assert f"--allow {module} " in refused.value.remedy
    assert not (user.folder / "imported").exists()


def test_an_installed_package_registers_the_namespace_it_declares(user, registry, monkeypatch):
    monkeypatch.syspath_prepend(install_planes(user.folder))
    monkeypatch.setattr(foreign, "_registered", [])
    config = EnvironmentConfig(id="Planes/Race-v1")
    with pytest.raises(UsageError) as refused:
        make_environment(config, 1, seed=0)
    assert "--allow planes " in refused.value.remedy
    assert not (user.folder / "imported").exists()
    trust.allow("planes")
    for _ in range(2):  # The second one would warn if it registered again.
        make_environment(config, 1, seed=0).close()
    for name in ("Planes/Race!-v1", "Planes/", "dm_control/Race-v1", "/Race-v1", "Planes/x/Race-v1"):
        assert foreign.registrations(name) == []
    with pytest.raises(UsageError, match="Planes/Rice-v1"):
        make_environment(EnvironmentConfig(id="Planes/Rice-v1"), 1, seed=0)


def test_a_trusted_module_may_register_an_environment_of_another_package(user, registry):
    (user.folder / "outer_maze.py").write_text("import gymnasium; gymnasium.register('Maze-v0', 'inner_maze:Maze')")
    (user.folder / "inner_maze.py").write_text("from gymnasium.envs.classic_control import CartPoleEnv as Maze")
    trust.allow("outer_maze")
    for _ in range(2):
        make_environment(EnvironmentConfig(id="outer_maze:Maze-v0"), 1, seed=0).close()


def test_an_installed_module_imports_nothing_from_the_current_folder(user, monkeypatch):
    (user.folder / "installed").mkdir()
    (user.folder / "installed" / "roomy.py").write_text("try:\n    import other\nexcept ImportError:\n    pass\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(user.folder / "installed")])
    trust.remember(["roomy"])
    later(monkeypatch)
    import_module(SETTING, "roomy:make")
    assert not (user.folder / "imported").exists()


NAMED = Config(
    environment=EnvironmentConfig(id="mine:make"), network=NetworkConfig(factory="other.nets:make"), algorithm="a.b:C"
)


def test_each_setting_that_names_a_module_needs_trust(user):
    for number, module in enumerate(("mine", "other.nets", "a.b")):
        with pytest.raises(UsageError) as refused:
            foreign.require_trust(NAMED)
        assert ("environment.id", "network.factory", "algorithm")[number] in refused.value.problem
        trust.allow(module)
    assert foreign.require_trust(NAMED) == ["mine", "other.nets", "a.b"]
    assert foreign.require_trust(Config(algorithm="dqn")) == []


def test_names_that_the_user_has_given_are_trusted(user):
    with pytest.raises(UsageError):
        foreign.require_trust(NAMED)
    foreign.require_trust(NAMED, given=True)
    require("mine")


# Factories


class Level(gymnasium.Env):
    pass


class Plain:
    pass


def make():
    return Level()


@functools.wraps(make)
def decorated():
    return make()


make_partial = functools.partial(make)
cached = functools.cache(make)
make_elsewhere = os.makedirs
LIST = [1]


def test_factories_are_functions_and_environments_of_the_module():
    for name in ("Level", "make", "decorated"):
        assert find_factory(SETTING, f"{__name__}:{name}", gymnasium.Env) is globals()[name]
    assert find_factory("network.factory", "torch.nn:Linear", nn.Module) is nn.Linear
    assert find_factory("algorithm", f"{__name__}:Plain", object) is Plain


@pytest.mark.parametrize("name", ["Plain", "make_partial", "cached", "make_elsewhere", "LIST", "stat", "missing"])
def test_anything_else_is_refused_before_it_is_called(name):
    with pytest.raises(ConfigError) as refused:
        find_factory(SETTING, f"{__name__}:{name}", gymnasium.Env)
    assert f"{__name__}:{name}" in refused.value.problem
    assert ("its own are" in refused.value.remedy) == (name == "missing")


@pytest.mark.parametrize(
    ("name", "kind", "meant"),
    [("Levle", gymnasium.Env, "Level"), ("Plian", object, "Plain"), ("mkae", nn.Module, "make")],
)
def test_a_misspelled_name_is_answered_with_one_that_fits(name, kind, meant):
    with pytest.raises(ConfigError) as refused:
        find_factory(SETTING, f"{__name__}:{name}", kind)
    assert f" {__name__}:{meant}?" in refused.value.remedy


def test_an_imported_class_is_no_algorithm():
    with pytest.raises(ConfigError, match="SimpleNamespace"):
        find_factory("algorithm", f"{__name__}:SimpleNamespace", object)


def test_functions_of_this_package_are_no_factories(trusts_nothing):
    with pytest.raises(ConfigError, match="import_module"):
        find_factory(SETTING, "apex.runtime.importer:import_module", gymnasium.Env)
    assert find_factory("algorithm", "apex.dqn.algorithm:DqnAlgorithm", object).name == "dqn"
