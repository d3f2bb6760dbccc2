"""Steps E Atari games in parallel with ALE's own C++ vector environment.

ALE prepares the images (grayscale, maximum of the last two frames, area-resized, stacked), plays the no-ops and the
FIRE that some games need to start, and limits the frames of a game. Rewards and lives are passed on unchanged.
"""

from collections.abc import Sequence
from typing import Any

import ale_py
import numpy as np
from ale_py import roms
from ale_py.vector_env import AtariVectorEnv
from numpy.typing import NDArray

from apex.config import EnvironmentConfig
from apex.types import Step
from apexreplay.errors import UsageError
from apexreplay.item_kinds import Array

EMULATOR_FPS = 60  # frames per second of the console
SCREEN_HEIGHT, SCREEN_WIDTH = 210, 160  # pixels of a picture; the resolution of the console for all but three games


def action_names(config: EnvironmentConfig, game: str) -> list[str]:
    """Returns the action names of `game` ("ms_pacman"): "noop", "right", ... Raises UsageError without a ROM."""
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # Otherwise ALE prints a banner on stderr.
    emulator = ale_py.ALEInterface()  # Unlike the vector environment, it starts no thread.
    try:
        emulator.loadROM(str(roms.get_rom_path(game)))
    except OSError as error:
        remedy = "unset ALE_ROMS_DIR, or run pip install --force-reinstall ale-py, which includes the ROMs"
        raise UsageError(f"the ROM of {game} cannot be read: {error}", remedy) from error
    actions = emulator.getLegalActionSet() if config.full_action_space else emulator.getMinimalActionSet()
    return [action.name.lower() for action in actions]


class AtariEnvironment:
    """A VectorEnvironment of `game`. seeds[i], 0 ... 2^31 - 1, is the seed of environment i.

    An episode begins with 0 ... `noop_max` - 1 no-ops (ALE's own rule). `max_episode_frames` counts emulator frames
    from the first step on; the step that reaches this number is truncated, unless the game ends in the same step.

    A life lost in the truncated step itself is not reported, so that step still bootstraps. The reason: in SameStep
    mode, ALE returns only the lives of the next game, even with `life_loss_info`. It affects 1 step in 27,000 or fewer.

    With `fire_after_life_loss`, FIRE replaces the chosen action in the step after a lost life, in games that have FIRE.
    `Step.played` contains the actions that were played.
    """

    def __init__(
        self, config: EnvironmentConfig, game: str, seeds: Sequence[int], *, num_threads: int, pictures: bool
    ) -> None:
        self.num_envs = len(seeds)
        self.fps = EMULATOR_FPS / config.frame_skip
        self._seeds: NDArray[np.int64] | None = np.array(seeds, np.int64)
        size = config.atari_size
        self._games = _start(
            config, game, self.num_envs, num_threads, img_height=size, img_width=size, stack_num=config.atari_stack
        )
        self._num_actions: int = self._games.single_action_space.n
        self._lives: NDArray[np.int32] = np.zeros(self.num_envs, np.int32)
        names = action_names(config, game) if config.fire_after_life_loss else []
        self._fire = names.index("fire") if "fire" in names else None
        self._fires_next: NDArray[np.bool_] = np.zeros(self.num_envs, np.bool_)
        # A copy of environment 0 in colour: with the same seed and actions it plays the same game.
        colour = {"grayscale": False, "img_height": SCREEN_HEIGHT, "img_width": SCREEN_WIDTH, "stack_num": 1}
        self._shown = _start(config, game, 1, 1, **colour) if pictures else None
        self._picture: Array | None = None

    @property
    def action_mask(self) -> None:
        """Returns None: every action is allowed."""

    def reset(self) -> Array:
        """Starts an episode in every game; returns uint8[E, S, H, W]. The first call also sets the seeds."""
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
        """Plays `frame_skip` emulator frames in every game. Returns new arrays each time."""
        if actions.min() < 0 or actions.max() >= self._num_actions:  # ALE would play a no-op instead.
            raise ValueError(f"actions must be 0 ... {self._num_actions - 1}, got {actions.tolist()}")
        if self._fire is not None:
            actions = np.where(self._fires_next, self._fire, actions)
        observation, reward, terminated, truncated, info = self._games.step(actions)
        # The lives of games that ended are already those of the next game.
        life_lost = (info["lives"] < self._lives) & ~terminated & ~truncated
        self._lives, self._fires_next = info["lives"], life_lost
        if self._shown is not None:
            self._picture = self._shown.step(actions[:1])[0][0, 0]
        final_observation = info.get("final_obs", observation)  # Absent if no game ended.
        return Step(
            observation, reward.astype(np.float32), terminated, truncated, life_lost, final_observation, played=actions
        )

    def rest(self, i: int) -> None:
        """Does nothing: ALE can only step all games or none."""

    def picture(self) -> NDArray[np.uint8]:
        """Returns the screen of environment 0 after the last `reset` or `step`: uint8[210, 160, 3], RGB."""
        if self._picture is None:
            raise RuntimeError("no picture: create the environment with pictures=True, and reset it")
        return self._picture

    def close(self) -> None:
        """Drops the emulators. Their threads end with the last reference; ALE's own `close` does not end them."""
        self._games = self._shown = None


def _start(config: EnvironmentConfig, game: str, num_envs: int, num_threads: int, **picture: Any) -> Any:
    """Starts games with the settings that the played games and the shown game share."""
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
        life_loss_info=False,  # True would report a lost life as `terminated`.
        **picture,
    )
