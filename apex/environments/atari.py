"""E Atari games side by side, played by ALE's own C++ vector environment.

ALE does the pixels (gray, the maximum of the last two frames, area-resized, stacked), the no-ops, the FIRE that some
games wait for at their start, and the limit on frames. Rewards and lives are passed on as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ale_py
import numpy as np
from ale_py import roms
from ale_py.vector_env import AtariVectorEnv
from numpy.typing import NDArray

from apex.config import EnvironmentConfig
from apex.errors import ConfigError
from apex.types import Array, Step

EMULATOR_FPS = 60  # of the console
SCREEN_HEIGHT, SCREEN_WIDTH = 210, 160  # of a picture; the console's own pixels, for all but three games


def action_names(config: EnvironmentConfig, game: str) -> list[str]:
    """What each action of `game` ("ms_pacman") is called: "noop", "right" ...; raises ConfigError without its ROM."""
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # Else it greets on standard error.
    emulator = ale_py.ALEInterface()  # Starts no thread.
    try:
        emulator.loadROM(str(roms.get_rom_path(game)))
    except OSError as error:
        raise ConfigError(
            f"the ROM of {game} cannot be read: {error}; ale-py brings it along: unset ALE_ROMS_DIR, or "
            "pip install --force-reinstall ale-py"
        ) from error
    actions = emulator.getLegalActionSet() if config.full_action_space else emulator.getMinimalActionSet()
    return [action.name.lower() for action in actions]


class AtariEnvironment:
    """A VectorEnvironment of `game`; environment i is seeded by seeds[i], 0 ... 2^31 - 1.

    With `noop_max` n an episode begins with 0 ... n - 1 no-ops (ALE's own rule), and `max_episode_frames` counts
    emulator frames from the first step on: the step that reaches it is truncated, unless the game ended in it.

    With `fire_after_life_loss` the step after a lost life is FIRE in games that have it, whatever action was chosen.
    """

    def __init__(
        self, config: EnvironmentConfig, game: str, seeds: Sequence[int], *, num_threads: int, pictures: bool
    ) -> None:
        self.num_envs = len(seeds)
        self.fps = EMULATOR_FPS / config.frame_skip
        self._seeds: NDArray[np.int64] | None = np.array(seeds, np.int64)
        size = config.image_size
        self._games = _start(
            config, game, self.num_envs, num_threads, img_height=size, img_width=size, stack_num=config.frame_stack
        )
        self._num_actions: int = self._games.single_action_space.n
        self._lives: NDArray[np.int32] = np.zeros(self.num_envs, np.int32)
        names = action_names(config, game) if config.fire_after_life_loss else []
        self._fire = names.index("fire") if "fire" in names else None
        self._fires_next: NDArray[np.bool_] = np.zeros(self.num_envs, np.bool_)
        # Environment 0 once more, in colour: with the same seed and the same actions it is the same game.
        colour = {"grayscale": False, "img_height": SCREEN_HEIGHT, "img_width": SCREEN_WIDTH, "stack_num": 1}
        self._shown = _start(config, game, 1, 1, **colour) if pictures else None
        self._picture: Array | None = None

    def reset(self) -> Array:
        """Begins an episode everywhere; uint8[E, S, H, W]. The first time it also seeds."""
        seeds, self._seeds = self._seeds, None
        observation: Array
        observation, info = self._games.reset(seed=seeds)
        self._lives = info["lives"]
        self._fires_next = np.zeros(self.num_envs, np.bool_)
        if self._shown is not None:
            shown, _ = self._shown.reset(seed=None if seeds is None else seeds[:1])
            self._picture = shown[0, 0]
        return observation

    def step(self, actions: NDArray[np.int64]) -> Step:
        """Plays `frame_skip` emulator frames everywhere. The arrays are new ones each time."""
        if actions.min() < 0 or actions.max() >= self._num_actions:  # ALE would take it for a no-op.
            raise ValueError(f"actions must be 0 ... {self._num_actions - 1}, got {actions.tolist()}")
        if self._fire is not None:
            actions = np.where(self._fires_next, self._fire, actions)
        observation, reward, terminated, truncated, info = self._games.step(actions)
        # The lives of what ended are those of the next game already.
        life_lost = (info["lives"] < self._lives) & ~terminated & ~truncated
        self._lives, self._fires_next = info["lives"], life_lost
        if self._shown is not None:
            self._picture = self._shown.step(actions[:1])[0][0, 0]
        final_observation = info.get("final_obs", observation)  # Absent while nothing ends.
        return Step(observation, reward.astype(np.float32), terminated, truncated, life_lost, final_observation)

    def rest(self, i: int) -> None:
        """ALE steps all of its games or none, so this one goes on."""

    def picture(self) -> NDArray[np.uint8]:
        """uint8[210, 160, 3], RGB: the screen of environment 0 after the last `reset` or `step`."""
        if self._picture is None:
            raise RuntimeError("no picture: make the environment with pictures=True, and reset it")
        return self._picture

    def close(self) -> None:
        """Ends the emulators. Their threads run for as long as something refers to them: ALE's `close` ends none."""
        self._games = self._shown = None


def _start(config: EnvironmentConfig, game: str, num_envs: int, num_threads: int, **picture: Any) -> Any:
    """What must be the same for the games that are played and for the one that is shown."""
    return AtariVectorEnv(
        game,
        num_envs,
        num_threads=num_threads,
        autoreset_mode="SameStep",
        frameskip=config.frame_skip,
        maxpool=config.frame_skip > 1,
        noop_max=config.noop_max,
        use_fire_reset=True,
        repeat_action_probability=config.sticky_actions,
        full_action_space=config.full_action_space,
        max_num_frames_per_episode=config.max_episode_frames,
        reward_clipping=False,
        episodic_life=False,
        life_loss_info=False,  # It would report a lost life as `terminated`.
        **picture,
    )
