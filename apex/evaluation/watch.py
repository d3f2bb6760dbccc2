"""`apex watch`: shows games of a run's newest policy in a window; without a display, or with --out, writes a film."""

import os
import secrets
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from apex.algorithms.interface import Mask
from apex.config.arguments import Parser, check_out, positive_float, positive_int, probability, seed
from apex.environments.factory import make_environment
from apex.errors import CheckpointError
from apex.evaluation.command import Player, load_player, one_thread
from apex.evaluation.episodes import Episode, play
from apex.evaluation.policy import EPSILON, RUN
from apex.evaluation.video import FORMATS, Camera, Gif, Mp4, Window, begin_video
from apex.runs.checkpoints.paths import newest_update
from apex.runs.checkpoints.policy_file import find_best
from apex.runs.folder import open_run
from apex.runs.lock import is_held
from apex.runtime.trust import add_allow
from apex.sentences import describe_outcome, plural
from apexreplay.errors import FINISHED, require
from apexreplay.item_kinds import Array
from apexreplay.process.lifecycle import Stop, reports_errors, sleep, stop_on_signals

FOREVER = 10**12  # games or pictures
FILM_SECONDS = 60.0  # default length of a film; a GIF of this length has a few megabytes


def load_newest(
    checkpoints: Path, epsilon: float | None, seed: int, *, has_ended: bool = False, checks: bool = False
) -> Player | None:
    """Returns the policy of a run's newest checkpoint or its best policy, whichever is newer; None if both are missing.

    `has_ended`: returns the best policy if there is one.

    `checks`: as in `load_player`. Raises CheckpointError if either is damaged.
    """
    number, best = newest_update(checkpoints), find_best(checkpoints)
    newest = None if number is None or (has_ended and best) else checkpoints / f"{number:09d}"
    paths = [newest, best]
    players = [load_player(path, epsilon, seed, checks=checks) for path in paths if path is not None]
    return max(players, key=lambda player: player.updates or 0, default=None)


class NewestPlayer:
    """Plays each game with the newest policy of a run and prints its score."""

    def __init__(self, first: Player, load: Callable[[], Player | None]) -> None:
        """`load` returns the newest policy."""
        self._player = first
        self._load = load
        self._num_games = 0

    @property
    def title(self) -> str:
        """The game and the policy that plays it."""
        return f"{self._player.environment.id}, update {self._player.updates or 0:,}"

    def act(self, observation: Array, mask: Mask) -> Array:
        """Returns the policy's actions."""
        return self._player.policy(observation, mask)

    def forget(self, ended: NDArray[np.bool_] | None) -> None:
        """Passes on which episodes have ended."""
        self._player.forget(ended)

    def end_game(self, game: Episode) -> None:
        """Prints the score and loads the newest policy; if that is damaged, the previous one continues to play."""
        self._num_games += 1
        update = f"update {self._player.updates or 0:,}"
        print(f"game {self._num_games}: score {game.score:g}, {plural(game.length, 'step')}, {update}", flush=True)
        try:
            self._player = self._load() or self._player
        except (CheckpointError, OSError) as error:
            print(f"{error}; the previous policy continues to play", file=sys.stderr)


@reports_errors("apex watch")
def main(argv: Sequence[str]) -> int:
    """Runs `apex watch`; returns the exit status. A user's mistake is reported in one sentence."""
    options = _make_parser().parse_args(argv)
    run, out = open_run(options.run), options.out
    if out is None and not any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"))):
        out = Path(f"{run.name}.gif")
        print(f"apex watch: no display found; writing {out} instead", file=sys.stderr)
    if out is not None:
        check_out(out, *FORMATS)
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # The pictures need no display.

    def load(*, checks: bool = False) -> Player | None:
        has_ended = run.end is not None  # It may end while its games are watched.
        return load_newest(run.checkpoints, options.epsilon, options.seed, has_ended=has_ended, checks=checks)

    with stop_on_signals() as stop, one_thread():
        while (first := load(checks=True)) is None:
            if stop.poll():
                return FINISHED
            problem = f"{run.path} has no policy: {describe_outcome(run.end, running=run.end is None)}"
            require(run.end is None, problem, remedy="choose another run")
            where = "" if is_held(run.path) else ", which no process of this host trains"
            print(f"waiting for the first policy of {run.path}{where}; Ctrl-C stops", file=sys.stderr, flush=True)
            sleep(2.0, stop)
        player = NewestPlayer(first, load)
        with closing(make_environment(first.environment, 1, seed=options.seed, pictures=True)) as game:
            screen = _open_screen(out, game.fps, stop, lambda: player.title)
            seconds = options.seconds or (None if out is None else FILM_SECONDS)
            max_pictures = FOREVER if seconds is None else seconds * game.fps
            num_games = options.episodes or (FOREVER if out is None else 1)
            camera = Camera(screen, game, player.act, num_games)
            play(
                game,
                camera.act,
                num_games,
                stop=lambda: stop.poll() or camera.num_pictures >= max_pictures,
                on_step=camera.see,
                on_game=player.end_game,
                forget=player.forget,
            )
            camera.close()
        if out is not None and not isinstance(screen, Window) and camera.num_pictures:
            print(f"{out}: {screen.seconds:.1f} s of play, {out.stat().st_size / 1e6:.1f} MB")
        return FINISHED


def _open_screen(out: Path | None, fps: float, stop: Stop, title: Callable[[], str]) -> Mp4 | Gif | Window:
    return Window(fps, stop.request, title) if out is None else begin_video(out, fps, "--out")


def _make_parser() -> Parser:
    parser = Parser(
        prog="apex watch",
        description="Shows games of a run's newest policy in a window, or writes a film if there is no display.",
    )
    add = parser.add_argument
    add("run", nargs="?", metavar="RUN", help=RUN)
    add("--out", type=Path, metavar="FILE.gif|.mp4", help="write a film instead of opening a window")
    default = "(default: 1 in a film, no limit in a window)"
    add("--episodes", type=positive_int, metavar="N", help=f"number of games {default}")
    default = f"(default: {FILM_SECONDS:.0f} in a film, no limit in a window)"
    add("--seconds", type=positive_float, metavar="S", help=f"maximum seconds of play {default}")
    add("--epsilon", type=probability, metavar="P", help=EPSILON)
    default = "seed of games and actions (default: random)"
    add("--seed", type=seed, default=secrets.randbits(31), metavar="S", help=default)
    add_allow(parser)
    return parser
