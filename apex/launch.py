"""`apex train`: one command that runs every program of a run on this machine, and shows them until the end."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from apex.config import Config, ConfigError, TransportConfig
from apex.environment import describe, kind
from apex.fitting import fit
from apex.lifecycle import FAILED, FINISHED, REFUSED, Stop, stop_on_signals
from apex.options import parse_config
from apex.resume import ACCEPT, reopen, survey, take_resume
from apex.run_folder import RunFolder
from apex.store_layout import store_path
from apex.supervisor import Ending, Program, last_lines, supervise
from apex.terminal_layout import duration, number
from apex.terminal_picture import History, Status
from apex.terminal_view import LogTail, View, open_view, say
from apex.transport import ControlClient, open_context

log = logging.getLogger("apex")

STATUS_SECONDS = 1.0  # between two questions to the learner, and at most between two pictures
ANSWER_SECONDS = 3.0  # a question that was not answered by then is asked again
NICE = 10  # of what only watches the run
LAST_LINES = 5  # of the log of a program that ended the run


class StatusSource(Protocol):
    """Where the status object comes from."""

    def __call__(self) -> Status | None:
        """The newest status since the last call, without waiting; None if there is none."""


def main(argv: Sequence[str] | None = None) -> int:
    """The composition root; returns the exit status."""
    try:
        with stop_on_signals() as stop:
            arguments = sys.argv[1:] if argv is None else argv
            about = (
                "Trains on this machine: replay, learner, actors, evaluator and TensorBoard. "
                "--resume RUN goes on with a run; only limits may change then, or what --accept-changes is said to."
            )
            name, rest = take_resume(arguments)
            if name is not None:
                return resume(name, rest, stop)
            config = parse_config(arguments, prog="apex train", description=about, kind=kind)
            return train(config, stop, arguments)
    except ConfigError as error:
        say(f"apex train: {error}", sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        say("apex train: told to stop twice; every program was killed", sys.stderr)
        return FAILED


Composer = Callable[[Config, RunFolder, "Watch"], list[Program]]


def train(config: Config, stop: Stop, argv: Sequence[str], compose: Composer | None = None) -> int:
    """Sizes the run to the machine, runs it to its end, and says how it went; `argv` is only noted.

    `compose` names the programs of the run; if it is None, `make_programs` does.
    """
    schema = describe(config.environment, config.actor.n_step)
    config, sizes = fit(config, schema, say)
    if stop.requested:
        return FINISHED
    return _run(RunFolder.create(config, schema, argv=argv), config, sizes, stop, compose)


def resume(name: str, argv: Sequence[str], stop: Stop, compose: Composer | None = None) -> int:
    """Goes on with a run, in its folder, from its newest checkpoint and snapshot; `argv` may change limits."""
    folder, config = reopen(name, argv)
    for line in survey(folder, config, accept=ACCEPT in argv):
        say(line)
    config, sizes = fit(config, folder.schema, say, store_path(folder.run_id))
    if stop.requested:
        return FINISHED
    folder.go_on(config, argv=argv)
    return _run(folder, config, sizes, stop, compose)


def _run(folder: RunFolder, config: Config, sizes: list[str], stop: Stop, compose: Composer | None) -> int:
    curves = f"TensorBoard {tensorboard_url(config)}" if config.run.tensorboard else "no TensorBoard"
    introduction = [f"{config.environment.id}, seed {config.seed}", *sizes, f"run folder: {folder.path}"]
    introduction += [f"{curves} once training has begun"] if config.run.tensorboard else []
    for line in introduction:
        say(line)
    transport = config.transport
    with log_to(folder.logs / "launcher.log"), open_context() as context, open_view(sys.stdout) as view:
        source = StatusClient(ControlClient(context, transport.endpoint("control", local_host(transport))))
        history = History(footer=f"{curves}   logs {folder.logs}   Ctrl-C stops")
        watch = Watch(source, view, LogTail(folder.logs), history)
        programs = (compose or make_programs)(config, folder, watch)
        ending = supervise(programs, stop, logs=folder.logs, tell=watch.tell, tick=watch.tick)
    for line in farewell(ending, watch.status, folder):
        say(line, sys.stdout if ending.status == FINISHED else sys.stderr)
    return ending.status


class StatusClient:
    """Asks the learner for the status and never waits for the answer."""

    def __init__(self, client: ControlClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._asked_at = self._ask_at = 0.0

    def __call__(self) -> Status | None:
        """The newest status since the last call, or None."""
        newest: Status | None = None
        while (answer := self._client.receive(0.0)) is not None:
            if answer["type"] == "status":
                newest = answer
        now = self._clock()
        if newest is not None:
            self._ask_at = min(self._ask_at, self._asked_at + STATUS_SECONDS)
        if now >= self._ask_at:
            self._client.send({"type": "status"})
            self._asked_at, self._ask_at = now, now + ANSWER_SECONDS
        return newest


class Watch:
    """Looks at the run once a second, and shows what it sees."""

    def __init__(
        self,
        source: StatusSource,
        view: View,
        logs: LogTail,
        history: History,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.status: Status | None = None
        self._source = source
        self._view = view
        self._logs = logs
        self._history = history
        self._clock = clock
        self._look_at = 0.0
        self._heard_at = clock()

    @property
    def ending(self) -> bool:
        """Whether the run is coming to its end, so that nothing need be started any more."""
        return (self.status or {}).get("phase") in ("finishing", "finished")

    @property
    def training(self) -> bool:
        """Whether there are curves to look at."""
        return bool((self.status or {}).get("updates"))

    def tick(self) -> None:
        """Shows what is new; reads the logs for warnings, and shows the time that goes by, once a second."""
        now = self._clock()
        status = self._source()
        if status is not None:
            self.status, self._heard_at = status, now
            self._history.add(status)
        elif now < self._look_at:
            return
        for sentence in self._logs.warnings():
            self._note(sentence)
        self._look_at = now + STATUS_SECONDS
        self._history.silent_seconds = now - self._heard_at
        self._view.show(self.status, self._history)

    def tell(self, sentence: str) -> None:
        """Shows what the supervisor has to say, at once, and logs it."""
        log.info(sentence)
        self._note(sentence)
        self._view.show(self.status, self._history)

    def _note(self, sentence: str) -> None:
        if sentence in self._history.notes:
            self._history.notes.remove(sentence)  # Said again, it stands last, and once.
        self._history.notes.append(sentence)
        self._view.note(sentence)


def make_programs(config: Config, folder: RunFolder, watch: Watch) -> list[Program]:
    """The programs of a run, in the order of their start: the last one is stopped first.

    Their grace adds up to less than 10 s, in which a run must be over.
    """
    python = (sys.executable, "-u", "-m")
    control = config.transport.control_port + config.transport.port_offset
    join = ("--learner", f"{local_host(config.transport)}:{control}")
    snapshots = ("--snapshots", str(folder.checkpoints / "replay")) if config.checkpoint.replay else ()
    keep = ("--config", str(folder.config_file), "--run-folder", str(folder.path))

    def goes_on() -> bool:
        return not watch.ending

    num_shards = config.replay.num_shards
    programs = [
        Program(
            role=f"replay-{shard}" if num_shards > 1 else "replay",
            command=(*python, "apex.replay", *join, "--shard", str(shard), *snapshots),
            grace_seconds=1.5,
            stops_with="replay",
            ready=goes_on,
        )
        for shard in range(num_shards)
    ]
    programs.append(Program(role="learner", command=(*python, "apex.learner", *keep), grace_seconds=4.0, ends_run=True))
    if config.evaluator.enabled:
        command = (*python, "apex.evaluator", *join)
        programs.append(Program(role="evaluator", command=command, grace_seconds=1.0, niceness=NICE, ready=goes_on))
    programs.append(Program(role="actor", command=(*python, "apex.actor", *join), grace_seconds=2.0, ready=goes_on))
    if config.run.tensorboard:
        host, port = config.run.tensorboard_bind, str(config.run.tensorboard_port)
        where = ("--logdir", str(folder.tensorboard), "--host", host, "--port", port)
        curves = Program(
            role="tensorboard",
            command=(*python, "tensorboard.main", *where, "--reload_interval", "5"),
            crash_budget=1.0,
            grace_seconds=0.5,
            essential=False,
            niceness=NICE,
            ready=lambda: watch.training and goes_on(),  # Its start takes seconds of a core that the run needs then.
        )
        programs.insert(0, curves)
    return programs


def local_host(transport: TransportConfig) -> str:
    """Where this host's own programs reach what is bound."""
    return "127.0.0.1" if transport.bind in ("0.0.0.0", "localhost", "*") else transport.bind


def tensorboard_url(config: Config) -> str:
    """Where to point a browser."""
    host = config.run.tensorboard_bind
    return f"http://{socket.gethostname() if host == '0.0.0.0' else host}:{config.run.tensorboard_port}"


# --- last words -------------------------------------------------------------------------------------------------------


def farewell(ending: Ending, status: Status | None, folder: RunFolder) -> list[str]:
    """How the run went, and what to type next."""
    lines = []
    if ending.status != FINISHED:
        lines.append(f"the run ended with status {ending.status}: {ending.cause}")
        context = last_lines(folder.logs / f"{ending.role}.log", LAST_LINES)
        lines += [f"    {line}" for line in context if len(context) > 1]  # The cause has the last one.
    else:
        reason = (status or {}).get("reason") or ending.cause
        lines.append(f"finished: {reason}" if reason else "finished")
    if status is not None:
        lines.append(f"score: {_score(status)}")
        elapsed = duration(status.get("elapsed_seconds"))
        lines.append(f"{number(status.get('steps'))} steps, {number(status.get('updates'))} updates in {elapsed}")
    lines.append(f"run folder: {folder.path}")
    if any(folder.checkpoints.glob("*")):
        where = shlex.quote(str(folder.path))
        lines.append(f"next: {command_name('apex')} evaluate {where} --episodes 30 --video game.mp4")
        if not ((status or {}).get("reason") or "").startswith("reached"):  # Else it would end again at once.
            lines.append(f"go on: {command_name('apex')} train --resume {where}")
    if any(folder.tensorboard.glob("*")):
        where = shlex.quote(str(folder.tensorboard))
        lines.append(f"curves: {command_name('tensorboard')} --logdir {where}")
    return lines


def _score(status: Status) -> str:
    evaluator, actors = status.get("evaluator") or {}, status.get("actors") or {}
    if evaluator.get("score") is not None:
        return f"{number(evaluator['score'])} by the evaluator's last games, {number(evaluator.get('best'))} at best"
    if actors.get("score") is not None:
        return f"{number(actors['score'])} by actor {number(actors.get('highest_id'))}, which explores least"
    return "none yet: no game was over"


def command_name(name: str) -> str:
    """What to type in this folder to run a program of this installation."""
    own = Path(sys.executable).parent / name
    found = shutil.which(name)
    if found is not None and Path(found) == own:
        return name
    return shlex.quote(os.path.relpath(own)) if own.is_relative_to(Path.cwd()) else shlex.quote(str(own))


@contextmanager
def log_to(path: Path) -> Iterator[None]:
    """Within it the launcher's own log goes to a file: the terminal belongs to the view."""
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s launcher %(levelname)s %(message)s", "%H:%M:%S"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        handler.close()
