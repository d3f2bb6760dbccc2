"""Environments: E of them side by side, whoever made the game. Nothing else knows ALE or Gymnasium."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import ale_py
import gymnasium
import numpy as np

from apex.config import EnvironmentConfig
from apex.config.importer import add_current_folder, find_factory
from apex.environments.atari import AtariEnvironment, action_names
from apex.environments.fault_budget import EnvironmentFailure
from apex.environments.interface import VectorEnvironment
from apex.environments.sync_vector import ObservationForm, SyncVectorEnvironment, read_spaces
from apex.errors import ConfigError, require
from apex.types import FrameCodec, Schema

gymnasium.register_envs(ale_py)  # Importing it has registered its games; this says so.

log = logging.getLogger("apex")

__all__ = ["EnvironmentFailure", "VectorEnvironment", "describe", "kind", "make_environment"]


def describe(config: EnvironmentConfig, n_step: int, tell: Callable[[str], None] = lambda sentence: None) -> Schema:
    """What a transition of this environment looks like; raises ConfigError where there can be none.

    Makes one environment at most and closes it again; no thread is left behind. `tell` is called with one sentence if
    the environment's own images are converted before the agent sees them.
    """
    game = atari_game(config.id)
    if game is not None:
        stack, num_actions = config.frame_stack, len(action_names(config, game))
        shape: tuple[int, ...] = (config.image_size, config.image_size)
        dtype: Literal["uint8", "float32"] = "uint8"
    else:
        form = _examine(config)
        shape, dtype, stack, num_actions = form.shape, form.dtype, form.stack, form.num_actions
        if form.change:
            tell(f"{config.id}: {form.change}")
    codec: FrameCodec = "lz4" if dtype == "uint8" else "raw"
    return Schema(
        frame_shape=shape, frame_dtype=dtype, stack=stack, num_actions=num_actions, n_step=n_step, codec=codec
    )


def kind(config: EnvironmentConfig) -> Literal["atari", "image", "vector"]:
    """What the agent sees: Atari's images, other images, or vectors."""
    if atari_game(config.id) is not None:
        return "atari"
    return "image" if _examine(config).dtype == "uint8" else "vector"


def make_environment(
    config: EnvironmentConfig, num_envs: int, *, seed: int, num_threads: int = 0, pictures: bool = False
) -> VectorEnvironment:
    """Makes `num_envs` environments whose seeds follow from `seed`, and from no neighbour's.

    The same seed plays the same games step for step, and environment i the same one however many stand beside it.
    `num_threads`: of the Atari emulators, 0 for one per core; all other environments are stepped by the caller's.
    """
    seeds = [int(word) >> 1 for word in np.random.SeedSequence(seed).generate_state(num_envs)]  # 31 bits, ALE's range.
    game = atari_game(config.id)
    if game is not None:
        return AtariEnvironment(config, game, seeds, num_threads=num_threads, pictures=pictures)
    return SyncVectorEnvironment(config, lambda i: _make(config, pictures=pictures and i == 0), seeds)


def _examine(config: EnvironmentConfig) -> ObservationForm:
    env = _make(config)
    try:
        return read_spaces(env, config)
    finally:
        try:
            env.close()
        except Exception as error:
            log.warning(
                "%s: raised %s: %s (in its close); nothing depends on it", config.id, type(error).__name__, error
            )


def _make(config: EnvironmentConfig, *, pictures: bool = False) -> gymnasium.Env[Any, Any]:
    """One plain environment; raises ConfigError with the reason why there is none."""
    _, colon, name = config.id.partition(":")
    options: dict[str, Any] = {"render_mode": "rgb_array"} if pictures else {}
    env: Any
    try:
        if colon and name.isidentifier():  # Else it is Gymnasium's own module:Name-v0.
            env = find_factory("environment.id", config.id)(**options)
        else:
            if colon:
                add_current_folder()
            env = gymnasium.make(config.id, disable_env_checker=True, **options)
    except ConfigError:
        raise
    except (gymnasium.error.UnregisteredEnv, gymnasium.error.DeprecatedEnv) as error:
        raise ConfigError(f"environment.id {config.id!r} is unknown{_suggest(config.id)}") from error
    except Exception as error:
        made = "made with render_mode='rgb_array'" if pictures else "made"
        raise ConfigError(f"environment.id {config.id!r} cannot be {made}: {type(error).__name__}: {error}") from error
    if not isinstance(env, gymnasium.Env):
        raise ConfigError(f"environment.id {config.id!r} must return a gymnasium.Env, got {type(env).__name__}")
    require(
        not pictures or env.render_mode == "rgb_array",
        f"environment.id {config.id!r} cannot be drawn: asked for render_mode 'rgb_array', got {env.render_mode!r}",
    )
    return env


def atari_game(name: str) -> str | None:
    """ALE's name of the game that `name` means ("ms_pacman"), or None where it means no Atari game.

    ALE/MsPacman-v5, MsPacmanNoFrameskip-v4, MsPacman-v4, MsPacman and ms_pacman mean the same. An environment of
    another maker goes first: Blackjack-v1 is Gymnasium's, ALE/Blackjack-v5 and blackjack are Atari's.
    """
    match = re.fullmatch(r"(ALE/)?(\w+?)(?:NoFrameskip|Deterministic)?(?:-v\d+)?", name)
    if match is None or (match[1] is None and match[2] in _other_names()):
        return None
    return _games().get(_plain(match[2]))


def _is_atari(spec: Any) -> bool:
    return str(spec.entry_point).startswith("ale_py")


@cache
def _games() -> dict[str, str]:
    """ALE's name of every game that one can play alone, by its plain name."""
    return {_plain(spec.name): spec.kwargs["game"] for spec in gymnasium.registry.values() if _is_atari(spec)}


def _other_names() -> set[str]:
    return {spec.name for spec in gymnasium.registry.values() if spec.namespace is None and not _is_atari(spec)}


def _plain(name: str) -> str:
    return re.sub(r"^ale/|-v\d+$|[^a-z0-9/]", "", name.lower())


def _suggest(name: str) -> str:
    """What an unknown name may have meant, as the end of a sentence."""
    known = {_plain(i): i for i, spec in gymnasium.registry.items() if not _is_atari(spec) or spec.namespace == "ALE"}
    near = [known[plain] for plain in difflib.get_close_matches(_plain(name), known, n=3)]
    if near:
        return f"; did you mean {' or '.join(near)}?"
    return "; it may be an Atari game (ALE/Pong-v5), any Gymnasium id, or package.module:factory"
