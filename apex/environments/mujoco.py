"""Prepares MuJoCo environments, from Gymnasium or dm_control (through Shimmy), and rendering without a screen."""

import logging
import os
from functools import cache
from importlib import import_module
from typing import Any

import gymnasium

from apexreplay.errors import UsageError, describe_exception

DM_CONTROL = "dm_control/"
BACKEND = "MUJOCO_GL"  # variable that names the renderer; dm_control and MuJoCo read it only when they are imported

log = logging.getLogger("apex")


def uses_mujoco(name: str) -> bool:
    """Returns whether the Gymnasium id `name` is a MuJoCo environment."""
    spec = gymnasium.registry.get(name)
    return name.startswith(DM_CONTROL) or (spec is not None and "envs.mujoco" in str(spec.entry_point))


def prepare(name: str, *, draws: bool, pictures: bool) -> None:
    """Registers the tasks of dm_control with Gymnasium, and chooses a renderer if there is no screen.

    `draws`: this process may render a MuJoCo environment, now or later. `pictures`: it renders this environment. A
    renderer chosen by the user is kept. Raises UsageError if the required extra is not installed.
    """
    has_choice = any(variable in os.environ for variable in (BACKEND, "DISPLAY", "WAYLAND_DISPLAY"))
    if not has_choice:
        os.environ[BACKEND] = "egl" if draws and _egl_works() else "disabled"  # Otherwise GLFW warns.
    is_dm_control = name.startswith(DM_CONTROL)
    try:
        for module in ("dm_control.suite", "shimmy") if is_dm_control else ("mujoco",):  # shimmy registers the tasks.
            import_module(module)
        import_module("mujoco").set_mju_user_warning(_warn)  # Otherwise it writes MUJOCO_LOG.TXT to the current folder.
    except ImportError as error:
        extra = "dm-control" if is_dm_control else "mujoco"
        remedy = f"in the checkout, run .venv/bin/pip install -e ./apexreplay -e '.[{extra}]'"
        raise UsageError(f"environment.id {name!r} needs the extra {extra} ({error})", remedy) from error
    finally:
        if not (has_choice or pictures):
            del os.environ[BACKEND]  # Child processes choose their own renderer.


def require_picture(env: gymnasium.Env[Any, Any], name: str) -> None:
    """Raises UsageError with the cause unless the environment can be rendered on this host."""
    try:
        env.reset(seed=0)
        env.render()
    except Exception as error:
        cause = describe_exception(error).rstrip(".")
        remedy = f"without a screen, install libegl1 and libgl1, or install libosmesa6 and set {BACKEND}=osmesa"
        raise UsageError(f"environment.id {name!r} cannot be rendered on this host: {cause}", remedy) from error


@cache
def _warn(text: str) -> None:
    """Logs each different warning of MuJoCo once."""
    log.warning("MuJoCo: %s", text.strip())


def _egl_works() -> bool:
    """Returns whether EGL has a device. If it has none, choosing EGL would make the import of MuJoCo fail."""
    os.environ[BACKEND] = "egl"
    try:
        import_module("mujoco.egl")
    except Exception:
        return False
    return True
