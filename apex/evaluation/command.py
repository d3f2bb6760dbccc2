"""`apex evaluate`: plays full games with a run's policy, or a random one, and scores them by their raw rewards.

It needs no GPU, and the run need not be running. The seeds of the games come from a sequence that training does not use
(`episodes.evaluation_seed`). The same --seed plays the same games again.
"""

import argparse
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from apex.algorithms.interface import Mask, forget
from apex.command_line import ENV_ARG, read_env_args
from apex.config import EnvironmentConfig
from apex.config.algorithm_choice import choose_algorithm
from apex.config.arguments import Parser, check_out, positive_int, probability, seed
from apex.config.validation import PositiveInt, Probability, Seed, checked
from apex.environments.factory import describe, kind, make_environment, makes_batches
from apex.environments.foreign import environment_modules
from apex.evaluation.episodes import ActFunction, Episode, Metric, Summary, evaluation_seed, metrics_of, play, summarize
from apex.evaluation.evaluator import make_policy
from apex.evaluation.policy import EPSILON, add_policy, require_fit
from apex.evaluation.saved_episodes import OPTION, new_dataset
from apex.evaluation.video import FORMATS, Camera, begin_video
from apex.metric_tags import SUCCESS
from apex.runs.checkpoints.policy_file import read_policy
from apex.runs.find_policy import find_policy
from apex.runs.folder import open_run
from apex.runtime import trust
from apex.runtime.seeding import seeded_generators
from apex.sentences import plural
from apex.types import Step
from apexreplay.errors import FAILED, FINISHED, require
from apexreplay.item_kinds import Array
from apexreplay.process.lifecycle import reports_errors, stop_on_signals

DRIVER = "SDL_VIDEODRIVER"  # environment variable that chooses how SDL draws


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation(Summary):
    """The scores of full games, and how they were played: the same `seed` and `num_envs` play the same games again."""

    scores: list[float]  # sum of the raw rewards of each game
    lengths: list[int]  # steps of each game
    metrics: dict[str, Metric]  # by name: info["is_success"] as "success", and the numbers in info["metrics"]
    epsilon: float  # probability of a random action; DPG: standard deviation of noise; SAC: factor on the policy's
    seed: int
    checkpoint: Path | None  # checkpoint of the policy; None: a random policy
    updates: int | None  # updates of the policy; None: a random policy
    environment: str
    video: Path | None


class Player(NamedTuple):
    """A policy, and the settings of the games it plays."""

    policy: ActFunction
    environment: EnvironmentConfig
    epsilon: float
    checkpoint: Path | None = None  # None: a random policy
    updates: int | None = None
    algorithm: str = "random"
    forget: Callable[[NDArray[np.bool_] | None], None] = lambda ended: None  # see `play`


def evaluate(
    run: str | os.PathLike[str],
    episodes: int = 30,
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    epsilon: float | None = None,
    seed: int = 0,
    num_envs: int = 5,
    video: str | os.PathLike[str] | None = None,
    save_episodes: str | os.PathLike[str] | None = None,
    allow: str | Iterable[str] = (),
) -> Evaluation:
    """Plays `episodes` full games with a run's policy, `num_envs` in parallel, as `apex evaluate` does.

    `run`, `checkpoint` and `allow` are as in `apex.load_policy`. The games use other seeds than training. `epsilon`:
    probability of a random action; DPG: standard deviation of noise; SAC: factor on the policy's; None: 0.001, or none.
    `video`: path of a film of the first game, ending in .mp4 or .gif. `save_episodes`: new folder for the games as a
    dataset of Minari, such as "games-v0".

    Raises UsageError if an argument is invalid or the policy cannot be loaded, and EnvironmentFailure if the
    environment fails.
    """
    checked("episodes", PositiveInt, episodes)
    checked("num_envs", PositiveInt, num_envs)
    checked("seed", Seed, seed)
    if epsilon is not None:
        checked("epsilon", Probability, epsilon)
    trust.allow(allow)
    path = None if video is None else Path(video)
    if path is not None:
        check_out(path, *FORMATS, option="video")
    with one_thread():
        player = load_player(find_policy(run, checkpoint), epsilon, seed)
        saved = None if save_episodes is None else Path(save_episodes)
        return _sum_up(player, seed, _play(player, seed, episodes, num_envs, path, saved=saved), path)


@reports_errors("apex evaluate")
def main(argv: Sequence[str]) -> int:
    """Runs `apex evaluate`; returns the exit status. A user's mistake is reported in one sentence."""
    options = _make_parser().parse_args(argv)
    if options.video is not None:
        check_out(options.video, *FORMATS, option="--video")
    require(bool(options.video or not options.video_steps), "--video-steps needs --video FILE.mp4", remedy="add it")
    games: list[Episode] = []

    def on_game(game: Episode) -> None:
        games.append(game)
        if sys.stderr.isatty():
            print(f"\r{len(games)} of {options.episodes} games ", end="", file=sys.stderr, flush=True)

    with stop_on_signals() as stop, one_thread():
        player = _choose_player(options)
        try:
            _play(
                player,
                options.seed,
                options.episodes,
                options.envs,
                options.video,
                max_pictures=options.video_steps or math.inf,
                saved=options.save_episodes,
                stop=stop.poll,
                on_game=on_game,
            )
        finally:
            if sys.stderr.isatty() and games:
                print("\r\033[K", end="", file=sys.stderr)
    if games:
        evaluation = _sum_up(player, options.seed, games, options.video)
        _report(evaluation, player.environment)
        if options.json:
            print(json.dumps(asdict(evaluation), default=str))
    if len(games) < options.episodes:
        bias = "; short games are over-represented" if games else ""
        bias += f"; {options.save_episodes} was not written" if options.save_episodes else ""
        print(f"apex evaluate: stopped after {len(games)} of {options.episodes} games{bias}", file=sys.stderr)
    return FINISHED if len(games) == options.episodes or stop.signum == signal.SIGINT else FAILED


def _make_parser() -> Parser:
    parser = Parser(
        prog="apex evaluate", description="Plays full games with a run's policy and prints their raw scores."
    )
    add_policy(parser)
    add = parser.add_argument
    add("--episodes", type=positive_int, default=30, metavar="N", help="number of full games (default 30)")
    add("--epsilon", type=probability, metavar="P", help=EPSILON)
    add("--seed", type=seed, default=0, metavar="S", help="seed of games and random actions (default 0)")
    add("--envs", type=positive_int, default=5, metavar="E", help="number of games played in parallel (default 5)")
    add("--json", action="store_true", help="print one JSON object as the last line")
    add("--video", type=Path, metavar="FILE.mp4|.gif", help="write a film of the first game, at normal speed")
    add("--video-steps", type=positive_int, metavar="N", help="film only the first N steps (default: the whole game)")
    add(OPTION, type=Path, metavar="DIR-v0", help="write the games to this new folder, as a dataset of Minari")
    add("--random", action="store_true", help="play random actions; needs --env instead of RUN")
    add("--env", metavar="ID", help="environment for --random")
    add("--env-arg", action="append", default=[], metavar="KEY=VALUE", help=f"for --random: {ENV_ARG}")
    return parser


@contextmanager
def one_thread() -> Iterator[None]:
    """Limits torch to one thread: batches are small, and more threads would slow down a run on this machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _play(
    player: Player,
    seed: int,
    episodes: int,
    num_envs: int,
    path: Path | None,
    *,
    max_pictures: float = math.inf,
    saved: Path | None = None,
    stop: Callable[[], bool] = lambda: False,
    on_game: Callable[[Episode], None] = lambda game: None,
) -> list[Episode]:
    """Plays the games, films the first one to `path`, writes all to `saved`, and returns them; fewer after a stop."""
    policy, config, watchers = player.policy, player.environment, list[Callable[[Step], None]]()
    with ExitStack() as stack:
        if not any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY", DRIVER))):
            os.environ[DRIVER] = "dummy"  # Avoids a warning of SDL, which would look for a display.
            stack.callback(os.environ.pop, DRIVER, None)  # `apex watch` would take it for a display.
        stack.enter_context(seeded_generators(evaluation_seed(seed)))
        dataset = None
        if saved is not None:
            require(not makes_batches(config), f"{OPTION} cannot record a gymnasium.vector.VectorEnv")
            origin = f"Games of {config.id} by apex evaluate, seed {seed}, epsilon {player.epsilon:g}"
            dataset = stack.enter_context(new_dataset(saved, player.algorithm, origin))
            if kind(config) == "atari":
                policy = partial(dataset.act_in_atari, policy, describe(config, n_step=1).num_actions)
                watchers.append(dataset.see_atari)
        environment = make_environment(
            config,
            min(num_envs, episodes),
            seed=evaluation_seed(seed),
            pictures=path is not None,
            wrap=(lambda env, i: env) if dataset is None else dataset.record,
        )
        stack.enter_context(closing(environment))
        if path is not None:
            camera = Camera(
                begin_video(path, environment.fps, "--video"), environment, policy, max_pictures=max_pictures
            )
            policy = camera.act
            watchers.append(camera.see)

        def watch(step: Step) -> None:
            for see in watchers:
                see(step)

        games = play(
            environment,
            policy,
            episodes,
            stop=stop,
            on_step=watch,
            on_game=on_game,
            on_end=(lambda i: None) if dataset is None else dataset.write,
            forget=player.forget,
        )
        if path is not None:
            camera.close()
        if dataset is not None:
            dataset.is_complete = len(games) == episodes
        return games


def _choose_player(options: argparse.Namespace) -> Player:
    if not options.random:
        given = f"--env {options.env}" if options.env else "--env-arg" if options.env_arg else ""
        require(not given, f"{given} needs --random", remedy="leave it out: a run defines its environment itself")
        path = find_policy(options.run or open_run(None, with_policy=True).path, options.checkpoint)
        return load_player(path, options.epsilon, options.seed)
    require(options.env is not None, "--random needs --env ID", remedy="add an id, for example --env ALE/Pong-v5")
    for given in filter(None, (options.run, options.checkpoint and f"--checkpoint {options.checkpoint}")):
        require(False, f"--random and {given} exclude each other", remedy="leave one out")
    trust.allow(environment_modules(options.env))
    config = EnvironmentConfig(id=options.env, args=read_env_args(options.env_arg))
    schema, rng = describe(config, n_step=1), np.random.default_rng(evaluation_seed(options.seed))

    def choose(observation: Array, mask: Mask) -> Array:
        if schema.action_size:
            return rng.uniform(-1, 1, (len(observation), schema.action_size)).astype(np.float32)
        if mask is None:
            return rng.integers(schema.num_actions, size=len(observation))
        shares: Array = mask.cumsum(1) / mask.sum(1, keepdims=True)
        action: Array = (shares > rng.random((len(mask), 1))).argmax(1)
        return action

    return Player(choose, config, 1.0)


def load_player(path: Path, epsilon: float | None, seed: int, *, checks: bool = True) -> Player:
    """Returns the player of a checkpoint or a file of weights. `epsilon` None: the default of evaluations.

    `checks`: raise UsageError if the environment on this machine differs from the one of the training.
    """
    info, agent = read_policy(path)
    if checks:
        require_fit(path, info)
    if epsilon is None:
        epsilon = 0.0 if info.schema.action_size else 0.001  # Some deterministic games never end without it.
    policy = make_policy(agent, epsilon, np.random.default_rng(evaluation_seed(seed)))
    algorithm = choose_algorithm(info.config, info.schema)
    return Player(policy, info.environment, epsilon, path, info.num_updates, algorithm, partial(forget, agent))


def _sum_up(player: Player, seed: int, games: Sequence[Episode], video: Path | None) -> Evaluation:
    return Evaluation(
        **asdict(summarize(games)),
        scores=[game.score for game in games],
        lengths=[game.length for game in games],
        metrics=metrics_of(games),
        epsilon=player.epsilon,
        seed=seed,
        checkpoint=player.checkpoint,
        updates=player.updates,
        environment=player.environment.id,
        video=video,
    )


def _report(evaluation: Evaluation, environment: EnvironmentConfig) -> None:
    interval = ""
    if evaluation.interval is not None:
        interval = "  (95 % interval: {:.2f} ... {:.2f})".format(*evaluation.interval)
    policy = "random" if evaluation.checkpoint is None else f"{evaluation.checkpoint}, {evaluation.updates:,} updates"
    rows = {
        "environment": evaluation.environment,
        "policy": f"{policy}, epsilon {evaluation.epsilon:g}",
        "games": f"{evaluation.episodes}, seed {evaluation.seed}",
        "mean score": f"{evaluation.mean:.2f}{interval}",
        "median": f"{evaluation.median:.2f}",
        "min ... max": f"{evaluation.min:.2f} ... {evaluation.max:.2f}",
        "mean length": f"{evaluation.length:.0f} steps",
    }
    if kind(environment) == "atari":
        most, sticky = environment.noop_max - 1, environment.sticky_actions
        rows["games"] += f", each begins with 0 ... {most} no-ops" if most > 0 else ""
        rows["games"] += f", sticky actions {sticky:g}" if sticky else ", no sticky actions"
    if evaluation.video is not None:
        rows["video"] = str(evaluation.video)
    metrics = {name: _describe(name, metric, evaluation.episodes) for name, metric in evaluation.metrics.items()}
    for name, value in (*rows.items(), *metrics.items()):
        print(f"{name:<12} {value}")


def _describe(name: str, metric: Metric, episodes: int) -> str:
    """Returns a metric with its interval, and the number of its games unless they are all."""
    scale, unit = (100, " %") if name == SUCCESS else (1, "")
    bounds = [f"{scale * each:.4g}" for each in metric.interval or ()]
    interval = f"  (95 % interval: {' ... '.join(bounds)})" if bounds else ""
    games = "" if metric.games == episodes else f", of {plural(metric.games, 'game')}"
    return f"{scale * metric.mean:.4g}{unit}{interval}{games}"
