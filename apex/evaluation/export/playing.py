"""Code of the model card that plays the environment with exported weights, without this package."""

from apex.config import EnvironmentConfig
from apex.environments.factory import atari_game, read_forms
from apex.runs.checkpoints.policy_file import PolicyInfo

# The tests run this code unchanged.
SETUP = """\
{imports}

env = {make}
space = env.action_space

{observe}

def choose(output):  # float32 [1, {outputs}] -> the action for env.step
    a = {choice}
    return {action}
"""
OBSERVE_VECTOR = """\
def observe(x):  # the environment's observation -> float32 {shape}
    return {code}.reshape({shape})
"""
OBSERVE_IMAGE = """\
frames = deque([np.zeros({size}, np.uint8)] * {stack}, {stack})  # Put zeros here again when another episode begins.

def observe(x):  # the environment's observation -> uint8 {shape}
    frames.append({code})
    return np.stack(frames)[None]
"""


def write_setup(info: PolicyInfo) -> str:
    """Returns code that defines `env`, `observe` and `choose`; creates the environment to read its spaces.

    Raises UsageError if the environment cannot be created.
    """
    schema, config = info.schema, info.environment
    _, form, actions = read_forms(config)
    is_image = schema.frame_dtype == "uint8"
    stacked = is_image or bool(info.config.network.factory)
    shape = [1, *(schema.observation_shape if stacked else schema.frame_shape)]
    template = OBSERVE_IMAGE if is_image else OBSERVE_VECTOR
    make_imports, make = _creation(config)
    imports = ["from collections import deque", "", "import cv2"] if is_image else []
    imports += ["import numpy as np", *([] if is_image else ["from gymnasium import spaces"]), *make_imports]
    return SETUP.format(
        imports="\n".join(imports),
        make=make,
        observe=template.format(shape=shape, code=form.code, size=schema.frame_shape, stack=schema.stack).rstrip(),
        outputs=schema.action_size or schema.num_actions,
        choice="output[0]" if schema.action_size else "output[0].argmax()",
        action=actions.code,
    )


def _creation(config: EnvironmentConfig) -> tuple[list[str], str]:
    """Returns lines that import what is needed to create an environment, and the expression that creates it."""
    args = f"**{config.args!r}" if config.args else ""
    game = atari_game(config.id)
    if game is not None:
        settings = f"frameskip={config.frame_skip}, repeat_action_probability={config.sticky_actions}"
        make = f"AtariEnv({game!r}, {settings}, full_action_space={config.full_action_space})"
        return ["from ale_py.env import AtariEnv"], make
    module, colon, name = config.id.partition(":")
    if colon and name.isidentifier():
        return [f"from {module} import {name}"], f"{name}({args})"
    return ["import gymnasium"], f"gymnasium.make({config.id!r}{', ' * bool(args)}{args})"
