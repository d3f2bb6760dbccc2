"""Full games of a run's policy, or of a random one, scored by their raw rewards: `apex evaluate`, and its function.

The games are not those of training: their seeds come from a sequence of their own (`games.evaluation_seed`), and the
same --seed plays the same games again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
import torch
from numpy.typing import NDArray

from apex.agent import find_policy
from apex.config import ConfigError, EnvironmentConfig, require
from apex.environment import EnvironmentFailure, VectorEnvironment, describe, kind, make_environment
from apex.evaluator import make_policy
from apex.games import Game, Policy, Summary, evaluation_seed, play, summarize
from apex.lifecycle import FAILED, FINISHED, REFUSED, Stop, stop_on_signals
from apex.policies import load_policy
from apex.run_folder import RunFolder
from apex.types import Array, Schema, Step

EMULATOR_FPS = 60  # of the console, and so of an Atari game at its true speed
OTHER_FPS = 30  # of all other environments
MIN_HEIGHT = 420  # pixels of a video; smaller pictures are enlarged by a whole number


EPISODES, EPSILON, NUM_ENVS = 30, 0.001, 5  # unless others are asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation(Summary):
    """What full games gave, and which games these were: the same seed and number of `num_envs` plays them again."""

    scores: list[float]  # of each game: the sum of its raw rewards
    lengths: list[int]  # of each game, in steps
    epsilon: float  # probability of a random action
    seed: int
    checkpoint: Path | None  # whose policy played; None: a random one
    updates: int | None  # of that policy
    environment: str
    video: Path | None


def evaluate(
    run: str | os.PathLike[str],
    episodes: int = EPISODES,
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    epsilon: float = EPSILON,
    seed: int = 0,
    num_envs: int = NUM_ENVS,
    video: str | os.PathLike[str] | None = None,
) -> Evaluation:
    """Plays `episodes` full games with a run's policy, `num_envs` side by side, as `apex evaluate` does.

    `run` and `checkpoint` are those of `apex.load_policy`. The games are not those of training. `video`: where to write
    the first game as .mp4. Raises ConfigError for what there is not or cannot be, EnvironmentFailure where the
    environment cannot be played.
    """
    for name, value in (("episodes", episodes), ("num_envs", num_envs)):
        require(isinstance(value, int) and value >= 1, f"{name} must be a whole number >= 1, got {value!r}")
    require(isinstance(seed, int) and 0 <= seed < 2**31, f"seed must be 0 ... 2147483647, got {seed!r}")
    require(0 <= epsilon <= 1, f"epsilon must be 0 ... 1, got {epsilon!r}")
    path = None if video is None else Path(video)
    _check_video(path)
    with _one_thread():
        player = _trained_player(find_policy(run, checkpoint), epsilon, _rng(seed))
        games = _play(player, episodes, seed=seed, num_envs=num_envs, video=path)
    return _sum_up(player, games, seed, path)


class Player(NamedTuple):
    """Who plays what."""

    policy: Policy
    environment: EnvironmentConfig
    epsilon: float
    checkpoint: Path | None  # None: a random policy
    updates: int | None


def main(argv: Sequence[str]) -> int:
    """Returns the exit status; a user's mistake is a sentence on standard error."""
    parser = _make_parser()
    try:
        options = parser.parse_args(argv)
    except SystemExit as exit:
        return REFUSED if exit.code else FINISHED
    try:
        with stop_on_signals() as stop, _one_thread():
            return _evaluate(options, stop)
    except ConfigError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return REFUSED
    except EnvironmentFailure as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return FAILED


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="apex evaluate", description="Plays full games with a run's policy and prints their raw scores."
    )
    parser.add_argument("run", nargs="?", metavar="RUN", help="a run folder, or its name below runs/")
    parser.add_argument(
        "--episodes", type=_positive, default=EPISODES, metavar="N", help=f"full games (default {EPISODES})"
    )
    parser.add_argument(
        "--epsilon",
        type=_fraction,
        default=EPSILON,
        metavar="P",
        help=f"probability of a random action (default {EPSILON})",
    )
    parser.add_argument("--seed", type=_seed, default=0, metavar="S", help="of games and random actions (default 0)")
    parser.add_argument(
        "--checkpoint",
        metavar="best|last|PATH",
        help="which policy of the run (default: the best by its evaluator, else the last checkpoint)",
    )
    parser.add_argument(
        "--envs", type=_positive, default=NUM_ENVS, metavar="E", help=f"games side by side (default {NUM_ENVS})"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--video", type=Path, metavar="FILE.mp4", help="write the first game, at normal speed")
    parser.add_argument("--random", action="store_true", help="play at random; takes --env instead of RUN")
    parser.add_argument("--env", metavar="ID", help="environment of --random")
    return parser


def _evaluate(options: argparse.Namespace, stop: Stop) -> int:
    _check_video(options.video)
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # Pictures need no screen, nor a complaint that there is none.
    player = _make_player(options, _rng(options.seed))
    games: list[Game] = []

    def on_game(game: Game) -> None:
        games.append(game)
        if sys.stderr.isatty():
            print(f"\r{len(games)} of {options.episodes} games ", end="", file=sys.stderr, flush=True)

    try:
        _play(
            player,
            options.episodes,
            seed=options.seed,
            num_envs=options.envs,
            video=options.video,
            stop=stop,
            on_game=on_game,
        )
    finally:
        if sys.stderr.isatty() and games:
            print("\r\033[K", end="", file=sys.stderr)
    if len(games) < options.episodes:
        print(f"apex evaluate: stopped after {len(games)} of {options.episodes} games", file=sys.stderr)
        return FAILED
    evaluation = _sum_up(player, games, options.seed, options.video)
    _report(evaluation)
    if options.json:
        print(json.dumps(asdict(evaluation), default=str))
    return FINISHED


@contextmanager
def _one_thread() -> Iterator[None]:
    """A few observations at a time: more threads of torch would only disturb a training that goes on."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(evaluation_seed(seed))


def _play(
    player: Player,
    episodes: int,
    *,
    seed: int,
    num_envs: int,
    video: Path | None,
    stop: Stop | None = None,
    on_game: Callable[[Game], None] = lambda game: None,
) -> list[Game]:
    """The games; fewer if `stop` was requested."""
    num_envs = min(num_envs, episodes)
    environment = make_environment(
        player.environment, num_envs, seed=evaluation_seed(seed), num_threads=1, pictures=video is not None
    )
    try:
        if video is None:
            return play(environment, player.policy, episodes, stop=stop, on_game=on_game)
        with Video(video, environment, player.policy, _fps(player.environment)) as film:
            return play(environment, film.act, episodes, stop=stop, on_step=film.see, on_game=on_game)
    finally:
        environment.close()


def _make_player(options: argparse.Namespace, rng: np.random.Generator) -> Player:
    if options.random:
        require(options.env is not None, "--random needs --env ID, for example --env ALE/Pong-v5")
        require(options.run is None, f"--random plays {options.env}, not the run {options.run}: give one of the two")
        require(options.checkpoint is None, "--checkpoint belongs to a run, not to --random")
        config = EnvironmentConfig(id=options.env)
        num_actions = describe(config, n_step=1).num_actions
        return Player(lambda observation: rng.integers(num_actions, size=len(observation)), config, 1.0, None, None)
    require(options.env is None, f"--env {options.env} belongs to --random; a run knows its environment")
    if options.run is None:
        latest = RunFolder.find_latest()
        raise ConfigError(f"which run? The latest: apex evaluate {latest.path}")
    return _trained_player(find_policy(options.run, options.checkpoint), options.epsilon, rng)


def _trained_player(path: Path, epsilon: float, rng: np.random.Generator) -> Player:
    info, network = load_policy(path)
    schema = describe(info.environment, info.schema.n_step)
    require(
        _interface(schema) == _interface(info.schema),
        f"{info.environment.id} is another environment here than the one that {path} was trained in: "
        f"{_interface(schema)}, not {_interface(info.schema)}",
    )
    return Player(make_policy(network, epsilon, rng), info.environment, epsilon, path, info.num_updates)


def _interface(schema: Schema) -> str:
    shape = ", ".join(map(str, schema.observation_shape))
    return f"{schema.frame_dtype}[{shape}] and {schema.num_actions} actions"


def _sum_up(player: Player, games: Sequence[Game], seed: int, video: Path | None) -> Evaluation:
    return Evaluation(
        **asdict(summarize(games)),
        scores=[game.score for game in games],
        lengths=[game.length for game in games],
        epsilon=player.epsilon,
        seed=seed,
        checkpoint=player.checkpoint,
        updates=player.updates,
        environment=player.environment.id,
        video=video,
    )


def _report(evaluation: Evaluation) -> None:
    interval = "" if evaluation.interval is None else "  (95 %: {:.2f} ... {:.2f})".format(*evaluation.interval)
    who = "random" if evaluation.checkpoint is None else f"{evaluation.checkpoint}, {evaluation.updates:,} updates"
    rows = {
        "environment": evaluation.environment,
        "policy": f"{who}, epsilon {evaluation.epsilon:g}",
        "games": f"{evaluation.episodes}, seed {evaluation.seed}",
        "mean score": f"{evaluation.mean:.2f}{interval}",
        "median": f"{evaluation.median:.2f}",
        "min ... max": f"{evaluation.min:.2f} ... {evaluation.max:.2f}",
        "mean length": f"{evaluation.length:.0f} steps",
    }
    if evaluation.video is not None:
        rows["video"] = str(evaluation.video)
    for name, value in rows.items():
        print(f"{name:<12} {value}")


# --- the video ------------------------------------------------------------------------------------------------------


class Video:
    """Environment 0's first game as an mp4: a picture of every state that is acted in."""

    def __init__(self, path: Path, environment: VectorEnvironment, policy: Policy, fps: float) -> None:
        self._path = path
        self._environment = environment
        self._policy = policy
        self._fps = fps
        self._writer: cv2.VideoWriter | None = None
        self._over = False
        self.num_pictures = 0

    def __enter__(self) -> Video:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if self._writer is not None:
            self._writer.release()
        if error is None:
            self._check()

    def act(self, observation: Array) -> NDArray[np.int64]:
        """The policy, seen at work."""
        if not self._over:
            self._write(self._environment.picture())
        return self._policy(observation)

    def see(self, step: Step) -> None:
        """Notes the end of the game."""
        self._over = self._over or bool(step.terminated[0] or step.truncated[0])

    def _write(self, picture: Array) -> None:
        factor = -(-MIN_HEIGHT // len(picture))
        enlarged = picture.repeat(factor, 0).repeat(factor, 1)
        height, width = (2 * (side // 2) for side in enlarged.shape[:2])  # The codec takes even sizes only.
        if self._writer is None:
            codec = cv2.VideoWriter.fourcc(*"mp4v")
            self._writer = cv2.VideoWriter(str(self._path), codec, self._fps, (width, height))
            require(self._writer.isOpened(), f"--video {self._path}: OpenCV cannot write mp4v here")
        self._writer.write(np.ascontiguousarray(enlarged[:height, :width, ::-1]))  # It takes BGR.
        self.num_pictures += 1

    def _check(self) -> None:
        """Opens the file again: OpenCV does not tell when a disk is full."""
        video = cv2.VideoCapture(str(self._path))
        found = int(video.get(cv2.CAP_PROP_FRAME_COUNT)) if video.isOpened() else 0
        readable = found > 0 and video.read()[0]
        video.release()
        require(
            readable and found == self.num_pictures,
            f"--video {self._path}: {found} of {self.num_pictures} pictures can be read back; is the disk full?",
        )


def _check_video(path: Path | None) -> None:
    """Refuses before any game is played."""
    if path is None:
        return
    require(path.suffix.lower() == ".mp4", f"--video must end in .mp4, got {path}")
    require(path.parent.is_dir(), f"--video {path}: there is no folder {path.parent}")
    require(not path.is_dir(), f"--video {path} is a folder")


def _fps(config: EnvironmentConfig) -> float:
    """Pictures per second that show a game as a person would play it."""
    return EMULATOR_FPS / config.frame_skip if kind(config) == "atari" else OTHER_FPS


# --- options --------------------------------------------------------------------------------------------------------


def _positive(text: str) -> int:
    if not (text.isdecimal() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1, got {text!r}")
    return int(text)


def _seed(text: str) -> int:
    if not (text.isdecimal() and int(text) < 2**31):
        raise argparse.ArgumentTypeError(f"must be a whole number 0 ... 2147483647, got {text!r}")
    return int(text)


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must be a number 0 ... 1, got {text!r}")
    return value
