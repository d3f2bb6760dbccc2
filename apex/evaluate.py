"""`apex evaluate`: full games of a run's policy, or of a random one, scored by their raw rewards. Needs no GPU, no run.

The games are not those of training: their seeds come from a sequence of their own (`games.evaluation_seed`), and the
same --seed plays the same games again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from apex import arguments
from apex.checkpoint_folder import latest_good
from apex.config import ConfigError, EnvironmentConfig, require
from apex.environment import EnvironmentFailure, VectorEnvironment, describe, kind, make_environment
from apex.evaluator import make_policy
from apex.games import Game, Policy, evaluation_seed, play, summarize
from apex.lifecycle import FAILED, FINISHED, REFUSED, Stop, stop_on_signals
from apex.newest_policy import require_fit
from apex.policies import find_best, load_policy
from apex.run_folder import RunFolder
from apex.types import Array, Step
from apex.video import Video, begin_video, check_video_path, enlarge

DEFAULTS = {"episodes": 30, "epsilon": 0.001, "seed": 0, "envs": 5}  # unless the evaluator's games are played again


class Player(NamedTuple):
    """Who plays what."""

    policy: Policy
    environment: EnvironmentConfig
    epsilon: float
    seed: int  # of environments and random actions
    checkpoint: Path | None = None  # None: a random policy
    updates: int | None = None
    evaluators_score: float | None = None  # that these games had when the evaluator played them


def main(argv: Sequence[str]) -> int:
    """Returns the exit status; a user's mistake is a sentence on standard error."""
    parser = _make_parser()
    try:
        options = parser.parse_args(argv)
    except SystemExit as exit:
        return REFUSED if exit.code else FINISHED
    torch.set_num_threads(1)  # A few observations at a time: more threads would only disturb a training that goes on.
    try:
        with stop_on_signals() as stop:
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
    parser.add_argument("--episodes", type=arguments.positive, metavar="N", help="full games (default 30)")
    parser.add_argument(
        "--epsilon", type=arguments.fraction, metavar="P", help="probability of a random action (default 0.001)"
    )
    parser.add_argument("--seed", type=arguments.seed, metavar="S", help="of games and random actions (default 0)")
    parser.add_argument(
        "--checkpoint",
        metavar="best|last|PATH",
        help="which policy of the run (default: the best by its evaluator, else the last checkpoint)",
    )
    parser.add_argument("--envs", type=arguments.positive, metavar="E", help="games side by side (default 5)")
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
    num_envs = min(options.envs, options.episodes)
    environment = make_environment(
        player.environment, num_envs, seed=player.seed, num_threads=1, pictures=options.video is not None
    )
    games: list[Game] = []

    def on_game(game: Game) -> None:
        games.append(game)
        if sys.stderr.isatty():
            print(f"\r{len(games)} of {options.episodes} games ", end="", file=sys.stderr, flush=True)

    try:
        if options.video is None:
            play(environment, player.policy, options.episodes, stop=stop, on_game=on_game)
        else:
            video = begin_video(options.video, environment.fps, "--video")
            camera = Camera(video, environment, player.policy)
            play(environment, camera.act, options.episodes, stop=stop, on_step=camera.see, on_game=on_game)
            video.close()
    finally:
        environment.close()
        if sys.stderr.isatty() and games:
            print("\r\033[K", end="", file=sys.stderr)
    if len(games) < options.episodes:
        print(f"apex evaluate: stopped after {len(games)} of {options.episodes} games", file=sys.stderr)
        return FAILED
    _report(options, player, games)
    return FINISHED if player.evaluators_score in (None, summarize(games).mean) else FAILED


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
    run = RunFolder.open(options.run)
    path = _find_policy(run, options.checkpoint)
    info, network = load_policy(path)
    require_fit(path, info)
    score = None
    if options.again:
        if info.games is None:
            raise ConfigError(f"{path} does not tell which games it was evaluated by: leave out --again")
        seed, score = info.games.seed, info.score
        options.episodes, options.envs, options.epsilon = info.games.episodes, info.games.num_envs, info.games.epsilon
        torch.set_num_threads(run.config.evaluator.num_threads)  # Sums in another order may differ in the last bit.
    policy = make_policy(network, options.epsilon, np.random.default_rng(seed))
    return Player(policy, info.environment, options.epsilon, seed, path, info.num_updates, score)


def _find_policy(run: RunFolder, choice: str | None) -> Path:
    best = find_best(run.checkpoints) if choice in (None, "best") else None
    if best is not None:
        return best
    require(choice != "best", f"{run.path} has no best policy: no evaluation was finished; try --checkpoint last")
    if choice in (None, "last"):
        last = latest_good(run.checkpoints)
        if last is None:
            raise ConfigError(f"{run.path} has neither a best policy nor a checkpoint yet: it was trained too shortly")
        return last
    named = (Path(str(choice)), run.checkpoints / str(choice))
    for path in named:
        if path.exists():
            return path
    raise ConfigError(f"--checkpoint must be best, last or a path, got {choice!r}: neither {named[0]} nor {named[1]}")


def _report(options: argparse.Namespace, player: Player, games: Sequence[Game]) -> None:
    summary = summarize(games)
    interval = "" if summary.interval is None else "  (95 %: {:.2f} ... {:.2f})".format(*summary.interval)
    who = "random" if player.checkpoint is None else f"{player.checkpoint}, {player.updates:,} updates"
    drawn = "the evaluator's own" if options.again else f"seed {options.seed}"
    rows = {
        "environment": player.environment.id,
        "policy": f"{who}, epsilon {player.epsilon:g}",
        "games": f"{summary.episodes}, {drawn}",
        "mean score": f"{summary.mean:.2f}{interval}",
        "median": f"{summary.median:.2f}",
        "min ... max": f"{summary.min:.2f} ... {summary.max:.2f}",
        "mean length": f"{summary.length:.0f} steps",
    }
    if kind(player.environment) == "atari":
        rows["games"] += _starts(player.environment)
    if options.again:
        equal = summary.mean == player.evaluators_score
        rows["evaluator's"] = f"{player.evaluators_score:.2f}, {'the same' if equal else 'NOT the same'}"
    if options.video is not None:
        rows["video"] = str(options.video)
    for name, value in rows.items():
        print(f"{name:<12} {value}")
    if options.json:
        result: dict[str, Any] = {
            **asdict(summary),
            "scores": [game.score for game in games],
            "lengths": [game.length for game in games],
            "epsilon": player.epsilon,
            "seed": None if options.again else options.seed,
            "evaluators_score": player.evaluators_score,
            "checkpoint": None if player.checkpoint is None else str(player.checkpoint),
            "updates": player.updates,
            "environment": player.environment.id,
            "video": None if options.video is None else str(options.video),
        }
        print(json.dumps(result))


def _starts(config: EnvironmentConfig) -> str:
    """How an Atari game begins, and what comes between the agent and it; as the end of a row."""
    noops = f", each begun by 0 ... {config.noop_max - 1} no-ops" if config.noop_max > 1 else ""
    return noops + (f", sticky actions {config.sticky_actions:g}" if config.sticky_actions else ", no sticky actions")


# --- the video ------------------------------------------------------------------------------------------------------


class Camera:
    """Films environment 0's first game: a picture of every state that is acted in."""

    def __init__(self, video: Video, environment: VectorEnvironment, policy: Policy) -> None:
        self._video = video
        self._environment = environment
        self._policy = policy
        self._over = False

    def act(self, observation: Array) -> NDArray[np.int64]:
        """The policy, seen at work."""
        if not self._over:
            self._video.add(enlarge(self._environment.picture()))
        return self._policy(observation)

    def see(self, step: Step) -> None:
        """Notes the end of the game."""
        self._over = self._over or bool(step.terminated[0] or step.truncated[0])
