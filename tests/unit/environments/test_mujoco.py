"""MuJoCo's environments and dm_control's are played by name and drawn without a screen, or say what is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import gymnasium
import pytest
from support.environments import make_config

from apex.environments import mujoco
from apex.environments.factory import describe
from apex.errors import UsageError

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
    words = [sys.executable, "-c", PLAY, name, "drawn" if drawn else "played"]
    variables = {**kept, "PYTHONPATH": str(Path(__file__).parents[3]), **variables}
    return subprocess.run(words, env=variables, cwd=folder, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("InvertedPendulum-v5", "(4,) 1 float32 None 480 480 3"),
        ("dm_control/cartpole-swingup-v0", "(5,) 1 float32 None 240 320 3"),
    ],
)
def test_mujoco_task_runs_and_renders_without_a_screen(name, told):
    done = play(name, drawn=True)
    if done.returncode and "cannot be rendered on this host" in done.stderr:  # As on a host without EGL and OSMesa.
        assert "install libegl1 and libgl1, or libosmesa6" in done.stderr
        done, told = play(name, drawn=False), told.rpartition("None")[0] + "None"
    assert (done.returncode, done.stdout.strip()) == (0, told), done.stderr


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

    with pytest.raises(
        UsageError, match=r"'Mine-v0' cannot be rendered on this host: RuntimeError: No OpenGL .* \(install libegl1"
    ):
        mujoco.require_picture(Undrawable(), "Mine-v0")


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
    with pytest.raises(UsageError, match=rf"'{name}' needs the extra {extra}: .venv/bin/pip install -e '.\[{extra}\]'"):
        describe(make_config(name), 3)


def test_other_environments_do_not_import_mujoco():
    code = "import sys; from apex.environments.factory import *; from apex.config import EnvironmentConfig as E; "
    code += "make_environment(E(id='CartPole-v1'), 1, seed=0); assert 'mujoco' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
