"""`apex watch`: games of a run's newest policy, in Gymnasium's window; without a display, or with --out, as a film."""

from __future__ import annotations

import math
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import torch
from gymnasium.wrappers import HumanRendering

from apex.config.arguments import Parser, positive_float, positive_int, probability, seed
from apex.errors import ConfigError
from apex.evaluation.policy import Policy, load_policy, require_fit
from apex.evaluation.video import begin_video, check_video_path, enlarge
from apex.runs.checkpoints.checkpoint import CheckpointError
from apex.runs.checkpoints.paths import newest_update
from apex.runs.checkpoints.policy_file import find_best
from apex.runs.folder import RunFolder
from apex.runtime.lifecycle import FINISHED, Stop, reports_errors, sleep, stop_on_signals

Load = Callable[[], Policy | None]  # returns the newest policy


class _Enlarged(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Draws pictures of at least MIN_HEIGHT pixels."""

    def render(self) -> Any:
        return enlarge(self.env.render())  # type: ignore[arg-type]


def load_newest(checkpoints: Path, *, epsilon: float, seed: int) -> Policy | None:
    """The policy with the most updates, a run's newest checkpoint or its best policy; None before there is one.

    Raises CheckpointError if one of the two is damaged.
    """
    number, best = newest_update(checkpoints), find_best(checkpoints)
    paths = [None if number is None else checkpoints / f"{number:09d}", best]
    policies = [load_policy(path, epsilon=epsilon, seed=seed) for path in paths if path is not None]
    return max(policies, key=lambda policy: policy.info.num_updates, default=None)


def play_games(
    game: gymnasium.Env[Any, Any],
    load: Load,
    show: Callable[[Policy], object],
    stop: Stop,
    episodes: float,
    steps: float,
) -> int:
    """Plays until `episodes`, `steps` or `stop`, and calls `show` before each step; returns the number of steps.

    Each game is played by the policy that `load` returns then. A failed environment's game does not count.
    """
    policy, number, shown = load(), 0, 0
    while policy is not None and number < episodes:
        observation, _ = game.reset()
        score, num_steps, over = 0.0, 0, False
        while not over:
            if stop.requested or shown >= steps:
                return shown
            show(policy)
            observation, reward, terminated, truncated, info = game.step(policy(observation))
            score, num_steps, over = score + float(reward), num_steps + 1, terminated or truncated
            shown += 1
        if not info["failed"]:
            number += 1
            update = policy.info.num_updates
            print(f"game {number}: score {score:g}, {num_steps:,} steps, update {update:,}", flush=True)
        try:
            policy = load() or policy
        except (CheckpointError, OSError) as error:
            print(f"{error}; the policy before it plays on", file=sys.stderr)
    return shown


@reports_errors("apex watch")
def main(argv: Sequence[str]) -> int:
    """Returns the exit status; a user's mistake is a sentence on standard error."""
    options = _make_parser().parse_args(argv)
    if options.run is None:
        raise ConfigError(f"which run? The latest: apex watch {RunFolder.find_latest().path}")
    run, out = RunFolder.open(options.run), options.out
    if out is None and not any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"))):
        out = Path(f"{run.name}.gif")
        print(f"there is no display here: this writes {out}", file=sys.stderr)
    if out is not None:
        check_video_path(out, "--out")
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # Gymnasium's pictures need no screen then.
    torch.set_num_threads(1)  # One observation at a time: more threads would only disturb a training that goes on.
    load = partial(load_newest, run.checkpoints, epsilon=options.epsilon, seed=options.seed)
    with stop_on_signals() as stop:
        while (policy := load()) is None:
            if stop.requested:
                return FINISHED
            print(f"waits for the first policy of {run.path}; Ctrl-C stops", file=sys.stderr, flush=True)
            sleep(2.0, stop)
        require_fit(policy.path, policy.info)
        with closing(_Enlarged(policy.make_environment("rgb_array"))) as game:
            game.reset(seed=options.seed)  # Only now it has a "render_fps".
            fps: float = game.metadata["render_fps"]
            if out is None:
                return _open_window(game, load, stop, options.episodes or math.inf, (options.seconds or math.inf) * fps)
            video, steps = begin_video(out, fps, "--out"), (options.seconds or 60) * fps  # A GIF of some megabytes.
            shown = play_games(game, load, lambda policy: video.add(game.render()), stop, options.episodes or 1, steps)
            video.close()
            if shown:
                print(f"{out}: {shown / fps:.1f} s of play, {out.stat().st_size / 1e6:.1f} MB")
            return FINISHED


def _make_parser() -> Parser:
    words = "Shows games of a run's newest policy in a window; without a display, or with --out, a film of one game."
    parser = Parser(prog="apex watch", description=words)
    add = parser.add_argument
    add("run", nargs="?", metavar="RUN", help="a run folder, or its name below runs/")
    add("--out", type=Path, metavar="FILE.gif|.mp4", help="write a film instead of opening a window")
    add("--episodes", type=positive_int, metavar="N", help="games (default: of a film 1; else no limit)")
    add("--seconds", type=positive_float, metavar="S", help="of play at most (default: of a film 60; else no limit)")
    add(
        "--epsilon", type=probability, default=0.001, metavar="P", help="probability of a random action (default 0.001)"
    )
    add("--seed", type=seed, default=secrets.randbits(31), metavar="S", help="of games and actions (default: random)")
    return parser


def _open_window(game: _Enlarged, load: Load, stop: Stop, episodes: float, steps: float) -> int:
    try:
        import pygame
    except ImportError as error:
        raise ConfigError(f"a window needs pygame ({error}): pip install pygame-ce, or use --out game.gif") from error

    def show(policy: Policy) -> None:
        pygame.display.set_caption(f"{policy.info.environment.id}, update {policy.info.num_updates:,}")
        if pygame.event.get(pygame.QUIT):
            stop.request()

    try:
        pygame.display.init()
        play_games(HumanRendering(game), load, show, stop, episodes, steps)
    except pygame.error as error:
        raise ConfigError(f"no window can be shown here: {error}; --out game.gif writes a film instead") from error
    return FINISHED
