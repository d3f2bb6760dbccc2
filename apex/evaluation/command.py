"""`apex evaluate`: full games of a run's policy, or of a random one, scored by their raw rewards. Needs no GPU, no run.

The seeds are not those of training: they come from a sequence of their own (`episodes.evaluation_seed`), and the same
--seed plays the same games again.
An Atari game without sticky actions has 30 beginnings, by its no-ops, so one may go as one of another seed did.
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

import numpy as np
import torch

from apex.config import EnvironmentConfig, argument_types
from apex.environments.factory import describe, kind, make_environment
from apex.errors import ConfigError, require
from apex.evaluation.episodes import ActFunction, Episode, Summary, evaluation_seed, play, summarize
from apex.evaluation.evaluator import make_policy
from apex.evaluation.policy import find_policy
from apex.evaluation.policy_sources import require_fit
from apex.evaluation.video import Camera, begin_video, check_video_path
from apex.runs.checkpoints.policy_file import read_policy
from apex.runs.folder import RunFolder
from apex.runtime.lifecycle import FAILED, FINISHED, REFUSED, Stop, reports_errors, stop_on_signals

DEFAULTS = {"episodes": 30, "epsilon": 0.001, "seed": 0, "envs": 5}  # unless the evaluator's games are played again


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation(Summary):
    """What full games gave, and which games these were: the same seed and number of `num_envs` plays them again."""

    scores: list[float]  # of each game: the sum of its raw rewards
    lengths: list[int]  # of each game, in steps
    epsilon: float  # probability of a random action
    seed: int | None  # None: the evaluator's own games again
    evaluators_score: float | None  # that it had for these
    checkpoint: Path | None  # whose policy played; None: a random one
    updates: int | None  # of that policy
    environment: str
    video: Path | None


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
    for name, value in (("episodes", episodes), ("num_envs", num_envs)):
        require(isinstance(value, int) and value >= 1, f"{name} must be a whole number >= 1, got {value!r}")
    require(isinstance(seed, int) and 0 <= seed < 2**31, f"seed must be 0 ... 2147483647, got {seed!r}")
    require(0 <= epsilon <= 1, f"epsilon must be 0 ... 1, got {epsilon!r}")
    path = None if video is None else Path(video)
    if path is not None:
        check_video_path(path, "video")
    with _one_thread():
        found = find_policy(run, checkpoint)
        info, network = read_policy(found)
        require_fit(found, info)
        policy = make_policy(network, epsilon, np.random.default_rng(evaluation_seed(seed)))
        player = Player(policy, info.environment, epsilon, evaluation_seed(seed), found, info.num_updates)
        games = _play(player, episodes, num_envs, path)
    return _sum_up(player, games, seed, path)


class Player(NamedTuple):
    """Who plays what."""

    policy: ActFunction
    environment: EnvironmentConfig
    epsilon: float
    seed: int  # of environments and random actions
    checkpoint: Path | None = None  # None: a random policy
    updates: int | None = None
    evaluators_score: float | None = None  # that these games had when the evaluator played them


@reports_errors("apex evaluate")
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
    except KeyboardInterrupt:
        return FAILED


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="apex evaluate", description="Plays full games with a run's policy and prints their raw scores."
    )
    parser.add_argument("run", nargs="?", metavar="RUN", help="a run folder, or its name below runs/")
    parser.add_argument("--episodes", type=argument_types.positive, metavar="N", help="full games (default 30)")
    parser.add_argument(
        "--epsilon", type=argument_types.fraction, metavar="P", help="probability of a random action (default 0.001)"
    )
    parser.add_argument("--seed", type=argument_types.seed, metavar="S", help="of games and random actions (default 0)")
    parser.add_argument(
        "--checkpoint",
        metavar="best|last|PATH",
        help="which policy of the run (default: the best by its evaluator, else the last checkpoint)",
    )
    parser.add_argument("--envs", type=argument_types.positive, metavar="E", help="games side by side (default 5)")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--video", type=Path, metavar="FILE.mp4|.gif", help="write the first game, at normal speed")
    parser.add_argument(
        "--again",
        action="store_true",
        help="the evaluator's own games of this policy once more: is the score the same?",
    )
    parser.add_argument("--random", action="store_true", help="play at random; takes --env instead of RUN")
    parser.add_argument("--env", metavar="ID", help="environment of --random")
    return parser


def _evaluate(options: argparse.Namespace, stop: Stop) -> int:
    if options.video is not None:
        check_video_path(options.video, "--video")
    _settle(options)
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # Pictures need no screen, nor a complaint that there is none.
    player = _make_player(options)
    games: list[Episode] = []

    def on_game(game: Episode) -> None:
        games.append(game)
        if sys.stderr.isatty():
            print(f"\r{len(games)} of {options.episodes} games ", end="", file=sys.stderr, flush=True)

    try:
        _play(player, options.episodes, options.envs, options.video, stop=stop, on_game=on_game)
    finally:
        if sys.stderr.isatty() and games:
            print("\r\033[K", end="", file=sys.stderr)
    if len(games) < options.episodes:
        print(f"apex evaluate: stopped after {len(games)} of {options.episodes} games", file=sys.stderr)
        return FAILED
    evaluation = _sum_up(player, games, None if options.again else options.seed, options.video)
    _report(evaluation, player.environment)
    if options.json:
        print(json.dumps(asdict(evaluation), default=str))
    return FINISHED if evaluation.evaluators_score in (None, evaluation.mean) else FAILED


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
    """The games, the first one filmed if `path` says where to; fewer if `stop` was requested."""
    environment = make_environment(
        player.environment, min(num_envs, episodes), seed=player.seed, num_threads=1, pictures=path is not None
    )
    try:
        if path is None:
            return play(environment, player.policy, episodes, stop=stop, on_game=on_game)
        video = begin_video(path, environment.fps, "--video")
        camera = Camera(video, environment, player.policy)
        games = play(environment, camera.act, episodes, stop=stop, on_step=camera.see, on_game=on_game)
        video.close()
        return games
    finally:
        environment.close()


def _settle(options: argparse.Namespace) -> None:
    """Gives what was not typed its default; with --again the policy file says all of it."""
    typed = [f"--{name}" for name in DEFAULTS if getattr(options, name) is not None]
    if options.again:
        require(not options.random, "--again plays a run's policy, not --random")
        require(not typed, f"--again plays the evaluator's own games: leave out {', '.join(typed)}")
    for name, value in DEFAULTS.items():
        if getattr(options, name) is None:
            setattr(options, name, value)


def _make_player(options: argparse.Namespace) -> Player:
    seed = evaluation_seed(options.seed)
    if options.random:
        require(options.env is not None, "--random needs --env ID, for example --env ALE/Pong-v5")
        require(options.run is None, f"--random plays {options.env}, not the run {options.run}: give one of the two")
        require(options.checkpoint is None, "--checkpoint belongs to a run, not to --random")
        config = EnvironmentConfig(id=options.env)
        num_actions = describe(config, n_step=1).num_actions
        rng = np.random.default_rng(seed)
        return Player(lambda observation: rng.integers(num_actions, size=len(observation)), config, 1.0, seed)
    require(options.env is None, f"--env {options.env} belongs to --random; a run knows its environment")
    if options.run is None:
        latest = RunFolder.find_latest()
        raise ConfigError(f"which run? The latest: apex evaluate {latest.path}")
    path = find_policy(options.run, options.checkpoint)
    info, network = read_policy(path)
    require_fit(path, info)
    score = None
    if options.again:
        if info.games is None:
            raise ConfigError(f"{path} does not tell which games it was evaluated by: leave out --again")
        seed, score = info.games.seed, info.score
        options.episodes, options.envs, options.epsilon = info.games.episodes, info.games.num_envs, info.games.epsilon
        if not Path(options.run).is_file():  # Weights alone do not tell; nearly every evaluator has one thread.
            torch.set_num_threads(
                RunFolder.open(options.run).config.evaluator.num_threads
            )  # Sums in another order may differ in the last bit.
    policy = make_policy(network, options.epsilon, np.random.default_rng(seed))
    return Player(policy, info.environment, options.epsilon, seed, path, info.num_updates, score)


def _sum_up(player: Player, games: Sequence[Episode], seed: int | None, video: Path | None) -> Evaluation:
    return Evaluation(
        **asdict(summarize(games)),
        scores=[game.score for game in games],
        lengths=[game.length for game in games],
        epsilon=player.epsilon,
        seed=seed,
        evaluators_score=player.evaluators_score,
        checkpoint=player.checkpoint,
        updates=player.updates,
        environment=player.environment.id,
        video=video,
    )


def _report(evaluation: Evaluation, environment: EnvironmentConfig) -> None:
    interval = "" if evaluation.interval is None else "  (95 %: {:.2f} ... {:.2f})".format(*evaluation.interval)
    who = "random" if evaluation.checkpoint is None else f"{evaluation.checkpoint}, {evaluation.updates:,} updates"
    drawn = "the evaluator's own" if evaluation.seed is None else f"seed {evaluation.seed}"
    rows = {
        "environment": evaluation.environment,
        "policy": f"{who}, epsilon {evaluation.epsilon:g}",
        "games": f"{evaluation.episodes}, {drawn}",
        "mean score": f"{evaluation.mean:.2f}{interval}",
        "median": f"{evaluation.median:.2f}",
        "min ... max": f"{evaluation.min:.2f} ... {evaluation.max:.2f}",
        "mean length": f"{evaluation.length:.0f} steps",
    }
    if kind(environment) == "atari":
        rows["games"] += _starts(environment)
    if evaluation.evaluators_score is not None:
        equal = evaluation.mean == evaluation.evaluators_score
        rows["evaluator's"] = f"{evaluation.evaluators_score:.2f}, {'the same' if equal else 'NOT the same'}"
    if evaluation.video is not None:
        rows["video"] = str(evaluation.video)
    for name, value in rows.items():
        print(f"{name:<12} {value}")


def _starts(config: EnvironmentConfig) -> str:
    """How an Atari game begins, and what comes between the agent and it; as the end of a row."""
    noops = f", each begun by 0 ... {config.noop_max - 1} no-ops" if config.noop_max > 1 else ""
    return noops + (f", sticky actions {config.sticky_actions:g}" if config.sticky_actions else ", no sticky actions")


# --- the video ------------------------------------------------------------------------------------------------------
