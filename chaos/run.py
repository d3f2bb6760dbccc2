"""A real run under test: starts and observes it, resumes it after its launcher died, and audits it."""

import os
import re
import secrets
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from apex.config import Config
from apex.facts import ProgramEvent
from apex.learning.run_save import snapshot_folder
from apex.replay_memory.settings import store_settings
from apex.runs.folder import KEYS, RunFolder
from apex.transport.curve.key_store import read_keys
from apex.transport.messages.control import Answer, StatusRequest, decode_answer
from apex.transport.messages.run_status import RunStatus
from apex.types import Role
from apexreplay.errors import UsageError, require
from apexreplay.process.spawn import spawn
from apexreplay.snapshots.restore import restore
from apexreplay.store.location import remove, store_path
from apexreplay.transport.control_socket import ControlSocket
from apexreplay.transport.sockets import open_context
from chaos.audit import Content, Follower, Verdict, judge
from chaos.ledger import Entries, LedgerReader
from chaos.processes import Process, find, is_alive, kill, send
from chaos.programs.launcher import EVENTS

TICK_SECONDS = 0.05
# interval between two looks of the followers, in which a full store must not overwrite unread transitions
AUDIT_SECONDS = 1.0
ASK_SECONDS = 0.25  # interval between two questions to the learner
ANSWER_SECONDS = 2.0  # time after which an unanswered question is asked again
START_SECONDS = 240.0  # time until a run trains
ASSERTION = re.compile(r"^Assertion failed", re.MULTILINE)  # libzmq prints it before it aborts the process
CLOCK = Path(__file__).with_name("clock")  # folder of the module that changes the wall clock of a program
END_SECONDS = 20.0  # time for a run to end after SIGTERM


class Look(NamedTuple):
    """The data of an audit. It is compared later, because that takes long and the run continues meanwhile."""

    entries: Entries
    contents: list[Content]

    def judge(self) -> Verdict:
        """Compares."""
        return judge(self.entries, self.contents)


class ChaosRun:
    """One run, from its first start to its audit."""

    def __init__(self, config: Config, folder: Path, options: Sequence[str], hosts: Sequence[int]):
        """`config` is the result of `options`. `hosts`: streams of each actor host; none: as in the product."""
        self._config = config
        self.folder = folder
        self._options = list(options)
        self._hosts = ",".join(map(str, hosts))
        self._ledgers = folder / "ledgers"
        self._ledgers.mkdir(parents=True)
        self._clock = folder / "clock"
        self._clock.write_bytes(bytes(8))
        self.ledger = LedgerReader(self._ledgers)
        self._launcher: subprocess.Popen[bytes] | None = None
        self._last_processes: list[Process] = []
        self._client: ControlSocket[Answer] | None = None
        self._opened = ExitStack()  # the context of the client
        self._asked_at = self._look_at = 0.0
        self.run_folder: RunFolder | None = None
        self.stores: list[Follower] = []
        self.status: RunStatus | None = None
        self.status_at = 0.0
        self.most_updates = 0  # updates of the learner; updates that are repeated after a crash count once
        self.num_updates = 0  # updates as they were seen; repeated updates count again
        self._updates_before = 0
        self.num_resumes = 0

    def start(self, wanted: Callable[[], bool] | None = None) -> None:
        """Starts the run, and waits until it trains. Raises UsageError if it does not."""
        self._start(self._options)
        deadline = time.monotonic() + START_SECONDS
        while not (wanted or self._trains)():
            if time.monotonic() > deadline or self._launcher is None or self._launcher.poll() is not None:
                raise UsageError(f"the run did not begin to train; see {self.folder}")
            self.tick()

    def tick(self, may_resume: bool = True) -> None:
        """Observes everything once, and sleeps for a moment."""
        time.sleep(TICK_SECONDS)
        now = time.monotonic()
        if may_resume and self._launcher is not None and self._launcher.poll() is not None:
            self._resume()
        self._open()
        self._connect()
        self._receive_status(now)
        if now >= self._look_at:
            self._look_at = now + AUDIT_SECONDS
            self._last_processes = self.processes() or self._last_processes
            self.read()

    def wait(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Ticks for this time; returns True early if `until` returns True."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.tick()
            if until():
                return True
        return False

    def read(self) -> None:
        """Reads new entries of the ledgers, then of the stores, because transitions are stored before they are
        acknowledged.
        """
        self.ledger.read()
        for store in self.stores:
            store.read()

    @property
    def num_stored(self) -> int:
        """Returns the number of transitions that were stored, as the followers saw it last."""
        return sum(store.end_key for store in self.stores)

    @property
    def num_acknowledged(self) -> int:
        """Returns the number of acknowledged transitions."""
        return self.ledger.num_acknowledged

    @property
    def newest_incarnation(self) -> int:
        """Returns the actor ids with an acknowledged segment."""
        return self.ledger.newest_incarnation

    def processes(self) -> list[Process]:
        """Returns all living processes."""
        return [] if self._launcher is None else find(self._launcher.pid)

    def count_aborts(self) -> int:
        """Returns how often an assertion of libzmq failed, plus how often a program ended by SIGABRT."""
        assert self.run_folder is not None
        texts = [path.read_text(errors="replace") for path in self.run_folder.logs.glob("*.log")]
        path = self.folder / EVENTS
        events = path.read_bytes().splitlines() if path.exists() else []
        failures = [msgspec.json.decode(event, type=ProgramEvent).failure for event in events]
        aborted = [f for f in failures if f is not None and (f.kind, f.value) == ("signal", signal.SIGABRT)]
        return sum(len(ASSERTION.findall(text)) for text in texts) + len(aborted)

    @property
    def run_id(self) -> int:
        """The id of the run; 0 before it has a folder."""
        return 0 if self.run_folder is None else self.run_folder.run_id

    def set_clock(self, seconds: float) -> None:
        """Sets by how much the wall clock of all programs of the run differs from the true time."""
        with self._clock.open("r+b") as file:
            file.write(struct.pack("d", seconds))

    def look(self) -> Look:
        """Returns the present contents of ledgers and stores.

        Acknowledgements are older than the contents of the stores; sent segments may be newer.
        """
        self.ledger.read()
        acknowledged = dict(self.ledger.entries.acknowledged)
        for store in self.stores:
            store.read()
            store.look_again()
        contents = [store.content for store in self.stores]
        self.ledger.read()
        return Look(self.ledger.entries.copy()._replace(acknowledged=acknowledged), contents)

    def look_at_end(self) -> Look:
        """Returns the contents of the ledgers, and of the memory or else the newest snapshot of the ended run."""
        assert self.run_folder is not None
        self.ledger.read()
        contents = []
        for shard, live in enumerate(self.stores):
            if live.read():
                live.look_again()
                contents.append(live.content)
            else:
                contents.append(self._restored(shard).on_top_of(live.content))
        return Look(self.ledger.entries.copy(), contents)

    def _restored(self, shard: int) -> Content:
        """Returns the contents of a shard's newest snapshot."""
        assert self.run_folder is not None
        folder, config = self.run_folder, self.run_folder.config
        path = store_path(folder.run_id, shard).with_suffix(".audit.replay")
        restored = restore(
            snapshot_folder(folder.checkpoints, config.replay.num_shards, shard),
            path,
            folder.schema.table,
            store_settings(config.replay, config.actor.num_actors),
            run_id=folder.run_id,
            store_incarnation=secrets.randbits(62) + 1,
        )
        if restored is None:
            raise UsageError(f"{folder.path} has neither replay memory nor a snapshot")
        restored.close()
        try:
            follower = Follower(path, folder.schema)
            follower.read()
            return follower.content
        finally:
            remove(path)

    def end(self) -> None:
        """Ends the run, and kills remaining processes; its replay memory stays."""
        everybody = self.processes() or self._last_processes
        if self._launcher is not None:
            for process in everybody:
                send(process.pid, signal.SIGCONT)
            self._launcher.terminate()
            deadline = time.monotonic() + END_SECONDS
            while self._launcher.poll() is None:
                if time.monotonic() > deadline:
                    self._launcher.kill()
                self.read()  # The run stores transitions until it ends.
                time.sleep(TICK_SECONDS)
        _wait_for_death(everybody)
        self._opened.close()

    def clear(self) -> None:
        """Removes the replay memory of the run."""
        if self.run_folder is not None:
            for shard in range(self._config.replay.num_shards):
                remove(store_path(self.run_folder.run_id, shard))

    def _trains(self) -> bool:
        return self.most_updates > 0 and self.num_stored > 0

    def _start(self, options: Sequence[str]) -> None:
        self._opened.close()
        self._client = None
        if self.run_folder is not None:  # The launcher removes old keys too, but perhaps after the next look.
            shutil.rmtree(self.run_folder.path / KEYS, ignore_errors=True)
        command = [sys.executable, "-m", "chaos.programs.launcher", str(self._ledgers), self._hosts, *options]
        paths = os.pathsep.join(filter(None, (str(CLOCK), os.environ.get("PYTHONPATH"))))
        with open(self.folder / "run.log", "ab") as log:
            environment = {"CHAOS_CLOCK": str(self._clock), "PYTHONPATH": paths}
            self._launcher = spawn(command, output=log, environment=environment)

    def _resume(self) -> None:
        """Resumes the run, as a user would, after its last program has ended."""
        _wait_for_death(self._last_processes)
        self.num_resumes += 1
        again = self._options if self.run_folder is None else ["--resume", str(self.run_folder.path)]
        self._start(again)

    def _open(self) -> None:
        """Finds the run's folder and stores when they exist."""
        if self.run_folder is not None:
            return
        for path in Path(self._config.run.folder).glob(f"{self._config.run.name}/manifest.json"):
            self.run_folder = RunFolder.open(path.parent)
            self.stores = [
                Follower(store_path(self.run_folder.run_id, shard), self.run_folder.schema)
                for shard in range(self._config.replay.num_shards)
            ]

    def _connect(self) -> None:
        """Connects to the learner as soon as the launcher has made the keys of this start."""
        if self._client is not None or self.run_folder is None:
            return
        transport, keys = self._config.transport, self.run_folder.keys
        with suppress(UsageError):
            require(bool(keys) or transport.insecure_no_auth, "there are no keys yet")
            context = self._opened.enter_context(open_context(read_keys(keys, Role.OBSERVER)))
            self._client = ControlSocket(context, transport.endpoint("control"), decode_answer)

    def _receive_status(self, now: float) -> None:
        if self._client is None:
            return
        while (answer := self._client.receive(0.0)) is not None:
            if isinstance(answer, RunStatus):
                self.status, self.status_at, self._asked_at = answer, now, min(self._asked_at, now - ANSWER_SECONDS)
                updates = answer.updates
                self.most_updates = max(self.most_updates, updates)
                self.num_updates += max(0, updates - self._updates_before) if self._updates_before else 0
                self._updates_before = updates
        if now - self._asked_at >= ANSWER_SECONDS and now - self.status_at >= ASK_SECONDS:
            self._client.send(StatusRequest())
            self._asked_at = now


def _wait_for_death(processes: Sequence[Process]) -> None:
    """Waits until the processes have ended, and kills the others (a stopped process handles no other signal)."""
    deadline = time.monotonic() + END_SECONDS
    while living := [process for process in processes if process.pid != os.getpid() and is_alive(process.pid)]:
        if time.monotonic() > deadline:
            for process in living:
                kill(process)
        time.sleep(TICK_SECONDS)
