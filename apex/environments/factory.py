"""Creates and describes environments of ALE, Gymnasium and the user. Other packages use only this interface."""

import ast
import difflib
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import ale_py
import gymnasium
import numpy as np
from ale_py.env import AtariEnv
from gymnasium.vector import VectorEnv

from apex.config import EnvironmentConfig
from apex.config.presets import EnvironmentKind
from apex.environments.action_form import ActionForm, read_actions
from apex.environments.atari import AtariEnvironment, action_names
from apex.environments.batched import BatchedEnvironment, make_batch, spaces_of
from apex.environments.foreign import environment_modules, register, registrations
from apex.environments.interface import VectorEnvironment
from apex.environments.mujoco import prepare, require_picture, uses_mujoco
from apex.environments.observation_form import ObservationForm, read_observations
from apex.environments.sync_vector import SyncVectorEnvironment
from apex.runtime.importer import find_factory, import_module
from apex.runtime.optional_imports import remedy
from apex.runtime.trust import allow, require_trusted
from apex.schema import Schema
from apexreplay.errors import UsageError, describe_exception, require

gymnasium.register_envs(ale_py)  # Importing ale_py has registered its games; this marks the import as used.

Wrap = Callable[[gymnasium.Env[Any, Any], int], gymnasium.Env[Any, Any]]

log = logging.getLogger("apex")


def describe(
    config: EnvironmentConfig,
    n_step: int,
    report: Callable[[str], None] = lambda change: None,
    play: Callable[[VectorEnvironment, Schema], None] = lambda games, schema: None,
) -> Schema:
    """Returns the schema of this environment's transitions; raises UsageError if the environment cannot be used.

    Creates at most one environment, resets it to find out whether it has action masks, and closes it. Leaves no thread
    behind. `report` is called with one sentence if observations are changed for the agent. `play` can
    step the environment, unless it is an Atari game; a fault in its steps raises UsageError, too.
    """
    game = _atari_game(config)
    if game is not None:
        require(not config.image_crop, "environment.image_crop is not for Atari", remedy="leave it out")
        return Schema(
            frame_shape=(config.atari_size, config.atari_size),
            frame_dtype="uint8",
            stack=config.atari_stack,
            num_actions=len(action_names(config, game)),
            n_step=n_step,
            codec="lz4",
        )
    with _one(config) as env:
        games: VectorEnvironment
        if isinstance(env, VectorEnv):
            games = BatchedEnvironment(config, env, 0, is_trial=True)
        else:
            games = SyncVectorEnvironment(config, lambda i: env, [0], is_trial=True)
        games.reset()
        form, actions = _read_forms(env, config)
        schema = Schema(
            frame_shape=form.shape,
            frame_dtype=form.dtype,
            stack=form.stack,
            num_actions=actions.num_actions,
            n_step=n_step,
            codec="lz4" if form.dtype == "uint8" else "raw",
            action_size=actions.size,
            masked=games.action_mask is not None,
            parts=form.parts,
        )
        play(games, schema)
    if form.change:
        report(f"{config.id}: {form.change}")
    return schema


def kind(config: EnvironmentConfig, schema: Schema | None = None) -> EnvironmentKind:
    """Returns the kind of observations, and whether actions are continuous. `schema`: result of `describe` if known."""
    if _atari_game(config) is not None:
        return "atari"
    schema = schema or describe(config, 1)
    if schema.action_size:
        return "continuous" if schema.is_vector else "continuous-image" if schema.has_images else "continuous-grid"
    return "image" if schema.has_images else "vector" if schema.is_vector else "grid"


def read_forms(config: EnvironmentConfig) -> tuple[gymnasium.Space[Any], ObservationForm, ActionForm]:
    """Returns the observation space of an environment as `gymnasium.make` creates it, and the forms of both spaces.

    Of a vector environment, those of one of its environments.
    """
    game = _atari_game(config)
    if game is None:
        with _one(config) as env:
            return spaces_of(env).observation_space, *_read_forms(env, config)
    screen = AtariEnv(game, full_action_space=config.full_action_space)
    gray = replace(config, grayscale=True, image_size=config.atari_size, frame_stack=config.atari_stack)
    return screen.observation_space, read_observations(screen, gray), read_actions(screen, config)


def makes_batches(config: EnvironmentConfig) -> bool:
    """Returns whether the factory makes vector environments."""
    if _atari_game(config) is not None:
        return False
    with _one(config) as env:
        return isinstance(env, VectorEnv)


def make_environment(
    config: EnvironmentConfig,
    num_envs: int,
    *,
    seed: int,
    num_threads: int = 1,
    pictures: bool = False,
    wrap: Wrap = lambda env, i: env,
) -> VectorEnvironment:
    """Creates `num_envs` environments, whose seeds are derived from `seed`.

    The same seed and actions give the same games. The game of environment i does not depend on `num_envs`, unless the
    factory makes a `gymnasium.vector.VectorEnv`.
    `num_threads`: threads of the Atari emulators, 0 for one per core; the caller's thread steps all other environments.
    `wrap` gets each single environment and its number; Atari games and vector environments have none.
    """
    seeds = [int(word) >> 1 for word in np.random.SeedSequence(seed).generate_state(num_envs)]  # 31 bits, ALE's range.
    game = _atari_game(config)
    if game is not None:
        return AtariEnvironment(config, game, seeds, num_threads=num_threads, pictures=pictures)
    first = _make(config, pictures=pictures, plays=True, num_envs=num_envs, seed=seeds[0])
    if isinstance(first, VectorEnv):
        return BatchedEnvironment(config, first, seeds[0])
    made: list[gymnasium.Env[Any, Any]] = [first]
    return SyncVectorEnvironment(
        config,
        lambda i: wrap(made.pop() if made else _make(config, pictures=pictures and i == 0, plays=True), i),
        seeds,
    )


def _read_forms(env: Any, config: EnvironmentConfig) -> tuple[ObservationForm, ActionForm]:
    single = spaces_of(env)
    return read_observations(single, config), read_actions(single, config)


@contextmanager
def _one(config: EnvironmentConfig) -> Iterator[gymnasium.Env[Any, Any] | VectorEnv[Any, Any, Any]]:
    """Creates one environment to inspect, and closes it afterwards."""
    env = _make(config)
    try:
        yield env
    finally:
        try:
            env.close()
        except Exception as error:
            log.warning("%s: raised %s (in its close). Ignored", config.id, describe_exception(error))


def _make(
    config: EnvironmentConfig, *, pictures: bool = False, plays: bool = False, num_envs: int = 1, seed: int = 0
) -> Any:
    """Creates one environment, to play (`plays`) or only to inspect; raises UsageError with the reason if it fails.

    Or creates a vector environment of `num_envs` environments with this seed, if that is what the factory makes.
    """
    _, colon, name = config.id.partition(":")
    options = {**config.args, **({"render_mode": "rgb_array"} if pictures else {})}
    env: Any
    try:
        if colon and name.isidentifier():  # Otherwise it is Gymnasium's form module:Name-v0.
            factory = find_factory("environment.id", config.id, gymnasium.Env)
            env = make_batch(config, factory, options, num_envs, seed)
        else:
            for module in environment_modules(config.id):
                require_trusted("environment.id", config.id, module)
            if colon:
                import_module("environment.id", config.id)  # It registers the environment.
                allow(environment_modules(config.id))  # It may have named another package.
            register(config.id)
            if uses_mujoco(config.id):
                prepare(config.id, draws=pictures or not plays, pictures=pictures)
            env = gymnasium.make(config.id, disable_env_checker=True, **options)
    except UsageError:
        raise
    except (gymnasium.error.UnregisteredEnv, gymnasium.error.DeprecatedEnv) as error:
        raise UsageError(f"environment.id {config.id!r} is unknown", _suggest(config.id)) from error
    except Exception as error:
        mode = " with render_mode='rgb_array'" if pictures else ""
        problem = f"environment.id {config.id!r} cannot be created{mode}: {describe_exception(error)}"
        needs = isinstance(error, TypeError) and "argument" in str(error)
        advice = "--env-arg NAME=VALUE sets an argument" if needs else ""
        if getattr(error.__cause__, "name", None) == "Box2D":  # a DependencyNotInstalled of Gymnasium
            advice = f"install the extra box2d: {remedy('box2d')}"
        raise UsageError(problem, advice) from error
    if not isinstance(env, gymnasium.Env | VectorEnv):
        raise UsageError(f"environment.id {config.id!r} returned {type(env).__name__}", "return a gymnasium.Env")
    for name in ("observation_space", "action_space"):
        space = getattr(env, name, None)
        problem = f"environment.id {config.id!r}: {name} is {space!r:.80}, not a gymnasium.Space"
        require(isinstance(space, gymnasium.Space), problem, remedy=f"set self.{name} in __init__")
    problem = f"environment.id {config.id!r} cannot be drawn: its render_mode is {env.render_mode!r}, not 'rgb_array'"
    advice = "give its function a parameter render_mode, and the environment this mode" if colon else ""
    require(not pictures or env.render_mode == "rgb_array", problem, remedy=advice)
    if pictures and isinstance(env, gymnasium.Env) and uses_mujoco(config.id):
        require_picture(env, config.id)
    return env


def atari_game(name: str) -> str | None:
    """Returns ALE's name of the game `name`, such as "ms_pacman"; None if `name` is not an Atari game.

    ALE/MsPacman-v5, MsPacmanNoFrameskip-v4, MsPacman-v4, MsPacman and ms_pacman are the same game. Names of other
    registered environments take precedence: Blackjack-v1 is Gymnasium's, ALE/Blackjack-v5 and blackjack are Atari's.
    """
    match = re.fullmatch(r"(ALE/)?(\w+?)(?:NoFrameskip|Deterministic)?(?:-v\d+)?", name)
    if match is None or (match[1] is None and match[2] in _other_names()):
        return None
    return _games().get(_plain(match[2]))


def _atari_game(config: EnvironmentConfig) -> str | None:
    """Returns `atari_game` of the configured id; raises UsageError if an Atari game is given arguments."""
    game = atari_game(config.id)
    problem = f"environment.args {config.args}: {config.id} takes no arguments"
    require(game is None or not config.args, problem, remedy="use settings like --environment.frame-skip")
    return game


def _is_atari(spec: Any) -> bool:
    return str(spec.entry_point).startswith("ale_py")


@cache
def _games() -> dict[str, str]:
    """Returns {plain name: ALE's name} of every single-player game."""
    return {_plain(spec.name): spec.kwargs["game"] for spec in gymnasium.registry.values() if _is_atari(spec)}


def _other_names() -> set[str]:
    return {spec.name for spec in gymnasium.registry.values() if spec.namespace is None and not _is_atari(spec)}


def _plain(name: str) -> str:
    return re.sub(r"^ale/|-v\d+$|[^a-z0-9/]", "", name.lower())


def _suggest(name: str) -> str:
    """Returns the remedy for an unknown name."""
    known = {_plain(i): i for i, spec in gymnasium.registry.items() if not _is_atari(spec) or spec.namespace == "ALE"}
    near = [known[plain] for plain in difflib.get_close_matches(_plain(name), known, n=3)]
    if classes := _find_classes(name):
        return f"give {' or '.join(f'{name}:{each}' for each in classes)}"
    if "MinAtar/" in name and not registrations(name):
        return f"install the extra minatar: {remedy('minatar')}"
    if near:
        return f"did you mean {' or '.join(near)}? If a package registers it, give package:{name}"
    return f"use an Atari game (ALE/Pong-v5), a Gymnasium id, package:{name} if a package registers it, or module:class"


def _find_classes(name: str) -> list[str]:
    """Returns the public classes of the module `name` in the current folder, without importing it; [] if none."""
    path = Path(f"{name}.py")
    if not name.isidentifier() or not path.is_file():
        return []
    with suppress(SyntaxError, ValueError, OSError):
        nodes = ast.parse(path.read_bytes()).body
        return [node.name for node in nodes if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    return []
