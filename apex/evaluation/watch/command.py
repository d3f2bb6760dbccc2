"""`apex watch`: games of a run's newest parameters, in a window, or as a film where there is no screen.

A run that still goes on shows newer parameters with every game.
"""

from __future__ import annotations

import argparse
import math
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from apex.config import argument_types
from apex.dqn.exploration import epsilon_greedy
from apex.environments.factory import make_environment, name_actions
from apex.environments.interface import VectorEnvironment
from apex.errors import ConfigError
from apex.evaluation.episodes import evaluation_seed
from apex.evaluation.policy_sources import NewestPolicy, Policies, PoliciesOfFolder, PoliciesOfLearner
from apex.evaluation.video import Picture, begin_video, check_video_path, enlarge
from apex.evaluation.watch.caption import Caption, Strip
from apex.evaluation.watch.window import Window, has_display
from apex.runs.folder import RunFolder
from apex.runs.lock import is_held
from apex.runtime.lifecycle import FAILED, FINISHED, POLL_SECONDS, REFUSED, Stop, reports_errors, stop_on_signals
from apex.transport.codec import Codec
from apex.transport.curve.key_store import read_keys
from apex.transport.endpoints import ParameterSubscriber
from apex.transport.hello import Route, add_route_options, greet, local_host, read_route, read_welcome
from apex.transport.sockets import open_context
from apex.types import Array

FILM_SECONDS = 60.0  # of a film, unless told otherwise: a GIF of it is a few megabytes
HOLD_SECONDS = 0.7  # how long the last picture of a game stays, with its score
ONCE_SECONDS = 5.0  # how long --once waits for a learner's answer, and then for its parameters


class Screening:
    """Shows pictures until there were enough, or nobody wants more."""

    def __init__(self, show: Callable[[Picture], bool | None], max_pictures: float = math.inf) -> None:
        """`show` returns False when nobody wants more."""
        self._show = show
        self._max_pictures = max_pictures
        self.num_pictures = 0
        self.over = False

    def show(self, picture: Picture) -> bool:
        """Shows it; False when that was the last one."""
        wanted = self._show(picture) is not False
        self.num_pictures += 1
        self.over = not wanted or self.num_pictures >= self._max_pictures
        return not self.over


class Source(NamedTuple):
    """Whose games are shown."""

    name: str  # in sentences
    policies: Policies
    seconds: float  # that --once waits for the first


class Viewer:
    """Plays one game after the other; between two games it looks for a newer policy."""

    def __init__(
        self, environment: VectorEnvironment, policies: Policies, policy: NewestPolicy, *, epsilon: float, seed: int
    ) -> None:
        self._environment = environment
        self._policies = policies
        self._policy = policy
        self._epsilon = np.array([epsilon])
        self._rng = np.random.default_rng(seed)

    def run(self, screening: Screening, strip: Strip, stop: Stop, episodes: int | None) -> int:
        """Plays until asked to stop, or nobody wants more, or for so many games; returns how many were ended."""
        observation = self._environment.reset()
        ended = 0
        while ended != episodes and not screening.over and not stop.requested:
            played = self._play(observation, screening, strip, stop, ended + 1)
            if played is None:
                break
            observation, caption = played
            ended += 1
            print(
                f"game {ended}: score {caption.score:g}, {caption.step:,} steps, update {caption.version:,}", flush=True
            )
            self._policy = self._policies.newest(0.0) or self._policy
        return ended

    def _play(
        self, observation: Array, screening: Screening, strip: Strip, stop: Stop, game: int
    ) -> tuple[Array, Caption] | None:
        """One game: the next one's first observation, and what is said of the end; None where it was cut off."""
        score, num_steps = 0.0, 0
        while not stop.requested:
            with torch.inference_mode():
                q = self._policy.network(torch.from_numpy(observation)).numpy()
            action = epsilon_greedy(q, self._epsilon, self._rng)
            caption = Caption(self._policy.version, game, num_steps, score, q[0], int(action[0]))
            picture = enlarge(self._environment.picture())
            if not screening.show(strip.below(picture, caption)):
                return None
            step = self._environment.step(action)
            observation = step.observation
            score, num_steps = score + float(step.reward[0]), num_steps + 1
            if step.failed is not None:
                score, num_steps = 0.0, 0  # It is played again.
            if step.terminated[0] or step.truncated[0]:
                caption = caption._replace(step=num_steps, score=score)
                # Of the end itself there is no picture: the next game has begun.
                last = strip.below(picture, caption)
                for _ in range(round(HOLD_SECONDS * self._environment.fps)):
                    if not screening.show(last) or stop.requested:
                        break
                return observation, caption
        return None


@reports_errors("apex watch")
def main(argv: Sequence[str] | None = None) -> int:
    """The composition root; returns the exit status. A user's mistake is a sentence on standard error."""
    parser = _make_parser()
    try:
        options = parser.parse_args(argv)
    except SystemExit as exit:
        return REFUSED if exit.code else FINISHED
    torch.set_num_threads(1)  # One observation at a time: more threads would only disturb a training that goes on.
    try:
        with stop_on_signals() as stop, _open_source(options, stop) as source:
            return FINISHED if source is None else _watch(options, source, stop)
    except KeyboardInterrupt:
        return FAILED


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="apex watch",
        description="Shows games of a run's newest parameters: in a window, until it is closed or Ctrl-C; without a "
        "display, or with --out, as a film of one game.",
    )
    parser.add_argument("run", nargs="?", metavar="RUN", help="a run folder, or its name below runs/")
    add_route_options(parser)
    parser.set_defaults(learner=None)
    parser.add_argument("--out", type=Path, metavar="FILE.gif|.mp4", help="write a film instead of opening a window")
    parser.add_argument(
        "--episodes", type=argument_types.positive, metavar="N", help="games (default: of a film 1; else no limit)"
    )
    parser.add_argument(
        "--seconds",
        type=argument_types.seconds,
        metavar="S",
        help=f"of pictures at most (default: of a film {FILM_SECONDS:g})",
    )
    parser.add_argument(
        "--epsilon",
        type=argument_types.fraction,
        default=0.001,
        metavar="P",
        help="probability of a random action (default 0.001)",
    )
    parser.add_argument(
        "--seed", type=argument_types.seed, metavar="S", help="of games and random actions (default: others each time)"
    )
    parser.add_argument("--once", action="store_true", help="one game; do not wait for a run's first parameters")
    return parser


@contextmanager
def _open_source(options: argparse.Namespace, stop: Stop) -> Iterator[Source | None]:
    """Where policies come from; None if the run is over, or asked to stop, before the learner has answered."""
    if options.learner is None:
        if options.run is None:
            latest = RunFolder.find_latest()
            raise ConfigError(f"which run? The latest: apex watch {latest.path}")
        with _open_run(RunFolder.open(options.run), stop) as source:
            yield source
        return
    if options.run is not None:
        raise ConfigError(f"--learner {options.learner} or the run {options.run}: give one of the two")
    route = read_route(options)
    answer = greet(route, "evaluator", _Patience(stop, ONCE_SECONDS) if options.once else stop)
    if answer:
        with _listen(route, answer, f"the learner at {route.endpoint}") as source:
            yield source
    elif options.once and not stop.requested:
        raise ConfigError(f"no run at {route.endpoint} has answered in {ONCE_SECONDS:g} s")
    else:
        yield None


@contextmanager
def _open_run(run: RunFolder, stop: Stop) -> Iterator[Source]:
    """What the learner publishes, while it goes on on this host; else what the run has left on its disk."""
    if is_held(run.path) and not run.config.run.single_process:
        transport, answer = run.config.transport, {}
        route = Route(local_host(transport), transport.port("control"), transport.keys, transport.insecure_no_auth)
        try:
            answer = greet(route, "evaluator", _Patience(stop, ONCE_SECONDS))
        except ConfigError as error:
            print(f"{error}; this shows checkpoints", file=sys.stderr)
        if answer and answer["run_id"] == run.run_id:
            with _listen(route, answer, str(run.path)) as source:
                yield source
            return
    yield Source(str(run.path), PoliciesOfFolder(run.checkpoints), 0.0)


@contextmanager
def _listen(route: Route, answer: dict[str, Any], name: str) -> Iterator[Source]:
    """The parameters of the learner that has answered."""
    welcome = read_welcome(answer)
    with open_context(read_keys(route.keys, "evaluator")) as context:
        subscriber = ParameterSubscriber(
            context,
            welcome.endpoint("parameters"),
            Codec(welcome.run_id, welcome.schema),
            num_parameters=welcome.num_parameters,
        )
        yield Source(name, PoliciesOfLearner(welcome, subscriber), ONCE_SECONDS)


class _Patience(Stop):
    """A stop that also comes by itself, after so many seconds."""

    def __init__(self, stop: Stop, seconds: float) -> None:
        super().__init__()
        self._stop = stop
        self._until = time.monotonic() + seconds

    @property
    def requested(self) -> bool:
        return self._stop.requested or time.monotonic() > self._until


def _watch(options: argparse.Namespace, source: Source, stop: Stop) -> int:
    out = options.out
    if out is None and not has_display():
        out = Path(f"{Path(options.run).resolve().name if options.run else 'watch'}.gif")
        print(f"there is no display here: this writes {out}", file=sys.stderr)
    if out is not None:
        check_video_path(out, "--out")
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # Gymnasium's pictures need no screen then.
    policy = _first(source, stop, once=options.once)
    if policy is None:
        return FINISHED
    config = policy.environment
    seed = evaluation_seed(secrets.randbits(31) if options.seed is None else options.seed)
    environment = make_environment(config, 1, seed=seed, num_threads=1, pictures=True)
    with closing(environment):
        strip = Strip(config.id, options.epsilon, name_actions(config, policy.schema.num_actions))
        viewer = Viewer(environment, source.policies, policy, epsilon=options.epsilon, seed=seed)
        episodes, seconds = 1 if options.once else options.episodes, options.seconds
        if out is not None:
            return _film(out, viewer, strip, stop, environment.fps, episodes or 1, seconds or FILM_SECONDS)
        with closing(Window(f"{config.id}: {source.name}", environment.fps)) as window:
            viewer.run(Screening(window.show, (seconds or math.inf) * environment.fps), strip, stop, episodes)
    return FINISHED


def _film(out: Path, viewer: Viewer, strip: Strip, stop: Stop, fps: float, episodes: int, seconds: float) -> int:
    """Writes it; who asks to stop gets what there is until then."""
    video = begin_video(out, fps, "--out")
    screening = Screening(video.add, seconds * fps)
    viewer.run(screening, strip, stop, episodes)
    if not screening.num_pictures:
        return FAILED
    video.close()
    print(f"{out}: {screening.num_pictures / fps:.1f} s of play, {out.stat().st_size / 1e6:.1f} MB")
    return FINISHED


def _first(source: Source, stop: Stop, *, once: bool) -> NewestPolicy | None:
    """Waits for the run's first policy, and says so; None if asked to stop."""
    policy = source.policies.newest(source.seconds if once else 0.0)
    if policy is None and once:
        raise ConfigError(f"{source.name} has no parameters yet: leave out --once to wait for its first ones")
    if policy is None:
        print(f"waits for the first parameters of {source.name}; Ctrl-C stops", file=sys.stderr, flush=True)
    while policy is None and not stop.requested:
        policy = source.policies.newest(POLL_SECONDS)
    return policy


if __name__ == "__main__":
    sys.exit(main())
