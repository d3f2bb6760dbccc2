"""`apex watch`: shows games of a run's newest policy in a window; without a display, or with --out, writes a film."""

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
from apex.errors import FINISHED, CheckpointError, UsageError
from apex.evaluation.policy import EPSILON, Policy, default_epsilon, load_policy, require_fit
from apex.evaluation.video import begin_video, check_video_path, enlarge
from apex.runs.checkpoints.paths import newest_update
from apex.runs.checkpoints.policy_file import find_best
from apex.runs.folder import open_run
from apex.runtime.lifecycle import Stop, reports_errors, sleep, stop_on_signals

Load = Callable[[], Policy | None]  # returns the newest policy


class _Enlarged(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Renders pictures that are at least MIN_HEIGHT pixels high."""

    def render(self) -> Any:
        return enlarge(self.env.render())  # type: ignore[arg-type]


def load_newest(checkpoints: Path, *, epsilon: float, seed: int) -> Policy | None:
    """Returns the policy of a run's newest checkpoint or its best policy, whichever is newer; None if both are missing.

    Raises CheckpointError if either is damaged.
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
    """Plays until `episodes` games or `steps` steps are over or `stop` is requested; returns the number of steps.

    `show` is called before each step, and `load` before each game, so that the newest policy plays. A game whose
    environment failed does not count.
    """
    policy, number, shown = load(), 0, 0
    while policy is not None and number < episodes:
        observation, info = game.reset()
        score, num_steps, over = 0.0, 0, False
        while not over:
            if stop.poll() or shown >= steps:
                return shown
            show(policy)
            observation, reward, terminated, truncated, info = game.step(policy(observation, info.get("action_mask")))
            score, num_steps, over = score + float(reward), num_steps + 1, terminated or truncated
            shown += 1
        if not info["failed"]:
            number += 1
            update = policy.info.num_updates
            print(f"game {number}: score {score:g}, {num_steps:,} steps, update {update:,}", flush=True)
        try:
            policy = load() or policy
        except (CheckpointError, OSError) as error:
            print(f"{error}; the previous policy continues to play", file=sys.stderr)
    return shown


@reports_errors("apex watch")
def main(argv: Sequence[str]) -> int:
    """Runs `apex watch`; returns the exit status. A user's mistake is reported in one sentence."""
    options = _make_parser().parse_args(argv)
    run, out = open_run(options.run), options.out
    if out is None and not any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"))):
        out = Path(f"{run.name}.gif")
        print(f"apex watch: no display found; writing {out} instead", file=sys.stderr)
    if out is not None:
        check_video_path(out, "--out")
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # The pictures need no display.
    torch.set_num_threads(1)  # One thread is enough for one observation; more would slow down a run on this machine.
    epsilon = default_epsilon(run.schema) if options.epsilon is None else options.epsilon
    load = partial(load_newest, run.checkpoints, epsilon=epsilon, seed=options.seed)
    with stop_on_signals() as stop:
        while (policy := load()) is None:
            if stop.poll():
                return FINISHED
            print(f"waiting for the first policy of {run.path}; press Ctrl-C to stop", file=sys.stderr, flush=True)
            sleep(2.0, stop)
        require_fit(policy.path, policy.info)
        with closing(_Enlarged(policy.make_environment("rgb_array"))) as game:
            game.reset(seed=options.seed)  # Sets metadata["render_fps"].
            fps: float = game.metadata["render_fps"]
            if out is None:
                return _open_window(game, load, stop, options.episodes or math.inf, (options.seconds or math.inf) * fps)
            video, steps = (
                begin_video(out, fps, "--out"),
                (options.seconds or 60) * fps,
            )  # A GIF of 60 s has a few megabytes.
            shown = play_games(game, load, lambda policy: video.add(game.render()), stop, options.episodes or 1, steps)
            video.close()
            if shown:
                print(f"{out}: {shown / fps:.1f} s of play, {out.stat().st_size / 1e6:.1f} MB")
            return FINISHED


def _make_parser() -> Parser:
    words = "Shows games of a run's newest policy in a window; without a display, or with --out, a film of one game."
    parser = Parser(prog="apex watch", description=words)
    add = parser.add_argument
    add("run", nargs="?", metavar="RUN", help="a run folder, or its name below runs/ (default: the newest run)")
    add("--out", type=Path, metavar="FILE.gif|.mp4", help="write a film instead of opening a window")
    add(
        "--episodes",
        type=positive_int,
        metavar="N",
        help="number of games (default: 1 in a film, no limit in a window)",
    )
    add(
        "--seconds",
        type=positive_float,
        metavar="S",
        help="maximum seconds of play (default: 60 in a film, no limit in a window)",
    )
    add("--epsilon", type=probability, metavar="P", help=EPSILON)
    add(
        "--seed",
        type=seed,
        default=secrets.randbits(31),
        metavar="S",
        help="seed of games and actions (default: random)",
    )
    return parser


def _open_window(game: _Enlarged, load: Load, stop: Stop, episodes: float, steps: float) -> int:
    try:
        import pygame
    except ImportError as error:
        raise UsageError(
            f"pygame is not installed ({error}): pip install pygame-ce, or write a film with --out game.gif"
        ) from error

    def show(policy: Policy) -> None:
        pygame.display.set_caption(f"{policy.info.environment.id}, update {policy.info.num_updates:,}")
        if pygame.event.get(pygame.QUIT):
            stop.request()

    try:
        pygame.display.init()
        play_games(HumanRendering(game), load, show, stop, episodes, steps)
    except pygame.error as error:
        raise UsageError(f"no window can be opened: {error}; write a film with --out game.gif instead") from error
    return FINISHED
