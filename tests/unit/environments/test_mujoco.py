"""Tests environments of MuJoCo and dm_control: they run and render without a screen, or name what is missing."""

import os
import subprocess
import sys
from pathlib import Path

import gymnasium
import pytest
from support.environments import make_config

from apex.environments import mujoco
from apex.environments.factory import describe
from apexreplay.errors import UsageError

pytest.importorskip("mujoco", reason="needs the extras mujoco and dm-control, which dev has")

PLAY = """
import os, sys
import numpy as np
from apex.config import EnvironmentConfig
from apex.environments.factory import describe, make_environment

config = EnvironmentConfig(id=sys.argv[1])
schema = describe(config, 3)
chosen = os.environ.get("MUJOCO_GL")  # Programs that this one starts choose for themselves, unless the user has.
environment = make_environment(config, 2, seed=1, pictures=sys.argv[2] == "drawn")
first = environment.reset()
step = environment.step(np.ones((2, schema.action_size), np.float32))
assert step.failed is None
shape = environment.picture().shape if sys.argv[2] == "drawn" else ()
print(schema.frame_shape, schema.action_size, first.dtype, chosen, *shape)
"""
CHOICES = ("MUJOCO_GL", "DISPLAY", "WAYLAND_DISPLAY")


def play(name, drawn, folder=None, **variables):
    kept = {key: value for key, value in os.environ.items() if key not in CHOICES}
    command = [sys.executable, "-c", PLAY, name, "drawn" if drawn else "played"]
    variables = {**kept, "PYTHONPATH": str(Path(__file__).parents[3]), **variables}
    return subprocess.run(command, env=variables, cwd=folder, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize(
    ("name", "output"),
    [
        ("InvertedPendulum-v5", "(4,) 1 float32 None 480 480 3"),
        ("dm_control/cartpole-swingup-v0", "(5,) 1 float32 None 240 320 3"),
    ],
)
def test_mujoco_task_runs_and_renders_without_a_screen(name, output):
    done = play(name, drawn=True)
    if done.returncode and "libosmesa6" in done.stderr:  # a host without EGL and OSMesa
        done, output = play(name, drawn=False), output.rpartition("None")[0] + "None"
    assert (done.returncode, done.stdout.strip()) == (0, output), done.stderr


def test_mujoco_warnings_are_logged_once_without_a_file(tmp_path):
    done = play("HalfCheetah-v5", drawn=False, folder=tmp_path)  # Its model has an attribute that is deprecated.
    assert (done.returncode, list(tmp_path.iterdir())) == (0, [])
    assert done.stderr.count("settotalmass") <= 1


def test_users_renderer_is_kept():
    done = play("dm_control/cartpole-swingup-v0", drawn=False, MUJOCO_GL="disabled")
    assert done.stdout.strip() == "(5,) 1 float32 disabled", done.stderr


def test_missing_renderer_is_reported_with_its_remedy(monkeypatch):
    class Undrawable(gymnasium.Env):
        def reset(self, *, seed=None, options=None):
            return 0, {}

        def render(self):
            raise RuntimeError("No OpenGL rendering backend is available.")

    with pytest.raises(UsageError, match=r"'Mine-v0'.*RuntimeError: No OpenGL") as refused:
        mujoco.require_picture(Undrawable(), "Mine-v0")
    assert "libegl1" in refused.value.remedy


@pytest.mark.parametrize(
    ("name", "module", "extra"),
    [
        ("HalfCheetah-v5", "mujoco", "mujoco"),
        ("dm_control/cartpole-swingup-v0", "shimmy", "dm-control"),
        ("dm_control/cartpole-swingup-v0", "dm_control.suite", "dm-control"),
    ],
)
def test_missing_extra_is_reported_with_its_command(monkeypatch, name, module, extra):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UsageError, match=rf"'{name}'.*\b{extra}\b") as refused:
        describe(make_config(name), 3)
    assert f"pip install -e ./apexreplay -e '.[{extra}]'" in refused.value.remedy


def test_other_environments_do_not_import_mujoco():
    code = "import sys; from apex.environments.factory import *; from apex.config import EnvironmentConfig as E; "
    code += "make_environment(E(id='CartPole-v1'), 1, seed=0); assert 'mujoco' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
