"""`apex evaluate`: full games of a run's policy, or of a random one, scored by their raw rewards. Needs no GPU, no run.

The games' seeds come from a sequence that training does not use (`episodes.evaluation_seed`); the same --seed plays the
same games again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from apex.config import EnvironmentConfig
from apex.config.arguments import Parser, positive_int, probability, seed
from apex.config.validation import PositiveInt, Probability, Seed, checked
from apex.environments.factory import describe, kind, make_environment
from apex.errors import ConfigError, require
from apex.evaluation.episodes import ActFunction, Episode, Summary, evaluation_seed, play, summarize
from apex.evaluation.evaluator import make_policy
from apex.evaluation.policy import find_policy, require_fit
from apex.evaluation.video import Camera, begin_video, check_video_path
from apex.runs.checkpoints.policy_file import read_policy
from apex.runs.folder import RunFolder
from apex.runtime.lifecycle import FAILED, FINISHED, Stop, reports_errors, stop_on_signals


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation(Summary):
    """The scores of full games, and which games they were: the same seed and `num_envs` play them again."""

    scores: list[float]  # of each game: the sum of its raw rewards
    lengths: list[int]  # of each game, in steps
    epsilon: float  # probability of a random action
    seed: int
    checkpoint: Path | None  # whose policy played; None: a random one
    updates: int | None  # of that policy
    environment: str
    video: Path | None


class Player(NamedTuple):
    """A policy and the games that it plays."""

    policy: ActFunction
    environment: EnvironmentConfig
    epsilon: float
    seed: int  # as the user gave it
    checkpoint: Path | None = None  # None: a random policy
    updates: int | None = None


def evaluate(
    run: str | os.PathLike[str],
    episodes: int = 30,
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    epsilon: float = 0.001,
    seed: int = 0,
    num_envs: int = 5,
    video: str | os.PathLike[str] | None = None,
) -> Evaluation:
    """Plays `episodes` full games with a run's policy, `num_envs` side by side, as `apex evaluate` does.

    `run` and `checkpoint` are those of `apex.load_policy`. The games' seeds are not those of training. `video`: where
    to write the first game, as .mp4 or .gif. Raises ConfigError for what there is not or cannot be, EnvironmentFailure
    where the environment cannot be played.
    """
    checked("episodes", PositiveInt, episodes)
    checked("num_envs", PositiveInt, num_envs)
    checked("seed", Seed, seed)
    checked("epsilon", Probability, epsilon)
    path = None if video is None else Path(video)
    if path is not None:
        check_video_path(path, "video")
    with _one_thread():
        player = _load_player(run, checkpoint, epsilon, seed)
        return _sum_up(player, _play(player, episodes, num_envs, path), path)


@reports_errors("apex evaluate")
def main(argv: Sequence[str]) -> int:
    """Returns the exit status; a user's mistake is a sentence on standard error."""
    options = _make_parser().parse_args(argv)
    if options.video is not None:
        check_video_path(options.video, "--video")
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # Pictures need no screen, nor a complaint that there is none.
    games: list[Episode] = []

    def on_game(game: Episode) -> None:
        games.append(game)
        if sys.stderr.isatty():
            print(f"\r{len(games)} of {options.episodes} games ", end="", file=sys.stderr, flush=True)

    with stop_on_signals() as stop, _one_thread():
        player = _make_player(options)
        try:
            _play(player, options.episodes, options.envs, options.video, stop=stop, on_game=on_game)
        finally:
            if sys.stderr.isatty() and games:
                print("\r\033[K", end="", file=sys.stderr)
    if len(games) < options.episodes:
        print(f"apex evaluate: stopped after {len(games)} of {options.episodes} games", file=sys.stderr)
        return FAILED
    evaluation = _sum_up(player, games, options.video)
    _report(evaluation, player.environment)
    if options.json:
        print(json.dumps(asdict(evaluation), default=str))
    return FINISHED


def _make_parser() -> Parser:
    parser = Parser(
        prog="apex evaluate", description="Plays full games with a run's policy and prints their raw scores."
    )
    add = parser.add_argument
    add("run", nargs="?", metavar="RUN", help="a run folder, or its name below runs/")
    add("--episodes", type=positive_int, default=30, metavar="N", help="full games (default 30)")
    words = "probability of a random action (default 0.001)"
    add("--epsilon", type=probability, default=0.001, metavar="P", help=words)
    add("--seed", type=seed, default=0, metavar="S", help="of games and random actions (default 0)")
    words = "which policy of the run (default: the best by its evaluator, else the last checkpoint)"
    add("--checkpoint", metavar="best|last|PATH", help=words)
    add("--envs", type=positive_int, default=5, metavar="E", help="games side by side (default 5)")
    add("--json", action="store_true", help="print one JSON object as the last line")
    add("--video", type=Path, metavar="FILE.mp4|.gif", help="write the first game, at normal speed")
    add("--random", action="store_true", help="play at random; takes --env instead of RUN")
    add("--env", metavar="ID", help="environment of --random")
    return parser


@contextmanager
def _one_thread() -> Iterator[None]:
    """A few observations at a time: more threads of torch would only disturb a training that goes on."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _play(
    player: Player,
    episodes: int,
    num_envs: int,
    path: Path | None,
    *,
    stop: Stop | None = None,
    on_game: Callable[[Episode], None] = lambda game: None,
) -> list[Episode]:
    """Plays the games and films the first one to `path`; returns fewer if `stop` was requested."""
    seed, num_envs = evaluation_seed(player.seed), min(num_envs, episodes)
    environment = make_environment(player.environment, num_envs, seed=seed, num_threads=1, pictures=path is not None)
    with closing(environment):
        if path is None:
            return play(environment, player.policy, episodes, stop=stop, on_game=on_game)
        video = begin_video(path, environment.fps, "--video")
        camera = Camera(video, environment, player.policy)
        games = play(environment, camera.act, episodes, stop=stop, on_step=camera.see, on_game=on_game)
        video.close()
        return games


def _make_player(options: argparse.Namespace) -> Player:
    if not options.random:
        require(options.env is None, f"--env {options.env} belongs to --random; a run knows its environment")
        if options.run is None:
            raise ConfigError(f"which run? The latest: apex evaluate {RunFolder.find_latest().path}")
        return _load_player(options.run, options.checkpoint, options.epsilon, options.seed)
    require(options.env is not None, "--random needs --env ID, for example --env ALE/Pong-v5")
    require(options.run is None, f"--random plays {options.env}, not the run {options.run}: give one of the two")
    require(options.checkpoint is None, "--checkpoint belongs to a run, not to --random")
    config = EnvironmentConfig(id=options.env)
    num_actions = describe(config, n_step=1).num_actions
    rng = np.random.default_rng(evaluation_seed(options.seed))
    return Player(lambda observation: rng.integers(num_actions, size=len(observation)), config, 1.0, options.seed)


def _load_player(
    run: str | os.PathLike[str], checkpoint: str | os.PathLike[str] | None, epsilon: float, seed: int
) -> Player:
    path = find_policy(run, checkpoint)
    info, network = read_policy(path)
    require_fit(path, info)
    policy = make_policy(network, epsilon, np.random.default_rng(evaluation_seed(seed)))
    return Player(policy, info.environment, epsilon, seed, path, info.num_updates)


def _sum_up(player: Player, games: Sequence[Episode], video: Path | None) -> Evaluation:
    return Evaluation(
        **asdict(summarize(games)),
        scores=[game.score for game in games],
        lengths=[game.length for game in games],
        epsilon=player.epsilon,
        seed=player.seed,
        checkpoint=player.checkpoint,
        updates=player.updates,
        environment=player.environment.id,
        video=video,
    )


def _report(evaluation: Evaluation, environment: EnvironmentConfig) -> None:
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
    if kind(environment) == "atari":
        most, sticky = environment.noop_max - 1, environment.sticky_actions
        rows["games"] += f", each begun by 0 ... {most} no-ops" if most > 0 else ""
        rows["games"] += f", sticky actions {sticky:g}" if sticky else ", no sticky actions"
    if evaluation.video is not None:
        rows["video"] = str(evaluation.video)
    for name, value in rows.items():
        print(f"{name:<12} {value}")
