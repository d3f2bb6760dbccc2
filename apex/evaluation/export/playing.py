"""Code of the model card that plays the environment with exported weights, without this package."""

from apex.config import EnvironmentConfig
from apex.environments.atari import action_names
from apex.environments.factory import atari_game, makes_batches, read_forms
from apex.environments.foreign import registrations
from apex.environments.mujoco import DM_CONTROL
from apex.runs.checkpoints.policy_file import PolicyInfo
from apexreplay.errors import require

# The tests run this code unchanged.
SETUP = """\
{imports}

{wrapper}env = {make}
space = env.action_space

{observe}

def choose(output):  # float32 [1, {outputs}] -> the action for env.step
    a = {choice}
    return {action}
"""
FIRE = """\
class Fire(gymnasium.Wrapper):  # Presses FIRE when a game begins{when}, as in training.
    def reset(self, **options):
        self.env.reset(**options)
        observation, *_, info = self.env.step({fire})
        self.fires, self.lives = False, info["lives"]
        return observation, info

    def step(self, action):
        step = self.env.step({fire} if self.fires else action)
        self.fires, self.lives = {fires}, step[4]["lives"]
        return step

"""
ALLOWED = """

def allowed(mask):  # of all combinations, or a tuple with the mask of each part -> [1, actions]
    if isinstance(mask, tuple) and any(map(np.ndim, mask)):
        mask = reduce(np.multiply.outer, map(np.asarray, mask))
    return np.reshape(mask, (1, -1))
"""
OBSERVE_VECTOR = """\
def observe(x):  # the environment's observation -> float32 {shape}
    return {code}.reshape({shape})
"""
OBSERVE_PARTS = """\
frames = deque(maxlen={stack})  # Call frames.clear() when another episode begins.

def observe(x):  # the environment's observation -> the inputs of the network by name
    parts = {code}
    parts = {{name: np.asarray(part, "u1" if part.dtype == bool else part.dtype) for name, part in parts.items()}}
    zeros = {{name: np.zeros_like(part) for name, part in parts.items()}}
    frames.extend([zeros] * ({stack} - 1 - len(frames)))
    frames.append(parts)
    return {{name: np.stack([frame[name] for frame in frames])[None] for name in parts}}
"""
OBSERVE_FRAMES = """\
frames = deque([np.zeros({size}, np.{dtype})] * {stack}, {stack})  # Put zeros here again when another episode begins.

def observe(x):  # the environment's observation -> {dtype} {shape}
    frames.append({code})
    return np.stack(frames)[None]
"""


def write_setup(info: PolicyInfo) -> tuple[str, str]:
    """Returns code that defines `env`, `observe` and `choose`, and what `observe` changes, in words.

    Creates the environment to read its spaces.

    Raises UsageError if the environment cannot be created.
    """
    schema, config = info.schema, info.environment
    _, form, actions = read_forms(config)
    problem = f"{config.id} makes vector environments, for which there is no example"
    require(not makes_batches(config), problem)
    is_one = schema.is_vector and schema.stack == 1 and not info.config.network.factory
    shape = [1, *(schema.frame_shape if is_one else schema.observation_shape)]
    template = (
        OBSERVE_PARTS
        if schema.parts
        else OBSERVE_FRAMES
        if schema.stack > 1 or not schema.is_vector
        else OBSERVE_VECTOR
    )
    make_imports, make = _creation(config)
    observe = template.format(
        shape=shape, code=form.code, size=schema.frame_shape, stack=schema.stack, dtype=schema.frame_dtype
    ).rstrip()
    wrapper = write_fire(config)
    joins_masks = schema.masked and "unravel_index" in actions.code
    imports = ["from collections import deque"] if "deque(" in observe else []
    imports += ["from functools import reduce"] * joins_masks
    imports += [""] * bool(imports)
    imports += ["import cv2"] if "cv2." in observe else []
    imports += [
        *(["import gymnasium"] if wrapper else []),
        "import numpy as np",
        *(["from gymnasium import spaces"] if "spaces." in observe else []),
        *make_imports,
    ]
    if wrapper:
        make = f"Fire({make})"
    code = SETUP.format(
        imports="\n".join(imports),
        wrapper=wrapper,
        make=make,
        observe=observe,
        outputs=schema.action_size or schema.num_actions,
        choice="output[0]" if schema.action_size else "output[0].argmax()",
        action=actions.code,
    )
    return code + ALLOWED * joins_masks, form.change


def write_fire(config: EnvironmentConfig) -> str:
    """Returns code of a wrapper that presses FIRE where training does; "" for games that begin without it."""
    game = atari_game(config.id)
    names = [] if game is None else action_names(config, game)
    if "fire" not in names:
        return ""
    after = config.fire_after_life_loss
    fires, when = 'step[4]["lives"] < self.lives' if after else "False", " and after a lost life" if after else ""
    return FIRE.format(fire=names.index("fire"), fires=fires, when=when)


def _creation(config: EnvironmentConfig) -> tuple[list[str], str]:
    """Returns lines that import what is needed to create an environment, and the expression that creates it."""
    args = f"**{config.args!r}" if config.args else ""
    game = atari_game(config.id)
    if game is not None:
        settings = f"frameskip={config.frame_skip}, repeat_action_probability={config.sticky_actions}"
        settings += f", full_action_space={config.full_action_space}"
        make = f"AtariEnv({game!r}, {settings}, max_num_frames_per_episode={config.max_episode_frames})"
        return ["from ale_py.env import AtariEnv"], make
    module, colon, name = config.id.partition(":")
    if colon and name.isidentifier():
        return [f"from {module} import {name}"], f"{name}({args})"
    if config.id.startswith(DM_CONTROL):
        return ["import dm_control.suite", "import gymnasium", "import shimmy"], _call(config.id, args)
    registering = [f"from {each.module} import {each.attr}\n\n{each.attr}()" for each in registrations(config.id)]
    return ["import gymnasium", *registering], _call(config.id, args)


def _call(name: str, args: str) -> str:
    return f"gymnasium.make({name!r}{', ' * bool(args)}{args})"
