"""The fork server: starts programs as forks of a process that has loaded torch, in 0.05 s instead of 3 s.

The fork server is a child of the supervisor. It loads what every role needs while the supervisor reads its options. To
start a program it forks twice, so that the new process loses its parent at once. The supervisor is a subreaper at that
moment and becomes the new parent: the program is then a child like any other and does not need the fork server. If
anything fails here, the supervisor starts the program as a normal process.
"""

from __future__ import annotations

import gc
import importlib
import json
import logging
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import setproctitle

from apex.runtime.lifecycle import FAILED, FINISHED, NEIGHBOUR_GONE, become_subreaper
from apex.runtime.spawn import be_nice, belong_to, spawn

MODULES = ("torch", "gymnasium", "apex.learner", "apex.evaluator", "apex.actor")  # loaded once for all
LOAD_SECONDS = 60.0  # that a fork server may take to load; past them nobody waits for it any more
FORK_SECONDS = 2.0  # that it may take to start a program
KILL_SECONDS = 1.0  # the kernel's time to end what was sent SIGKILL
ADOPT_SECONDS = 2.0  # that a program waits for the supervisor to become its parent
MAX_BYTES = 1 << 20  # of a request: mostly the environment's variables
GO = b"!"  # what a copy waits for: its supervisor knows of it

log = logging.getLogger("apex")


class ChildProcess(Protocol):
    """A child of this process: what the supervisor uses of `subprocess.Popen`."""

    @property
    def pid(self) -> int:
        """Its process id."""

    def poll(self) -> int | None:
        """Its exit status, negative: minus the signal; None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """The same once it has ended; raises subprocess.TimeoutExpired."""

    def send_signal(self, sig: int) -> None:
        """Sends a signal if it runs still."""


class ForkedProcess:
    """A child of this process that the fork server has forked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        """Its exit status, negative: minus the signal; None while it runs."""
        if self._status is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # Somebody else in this process has asked before: its status is lost.
                pid, status = self.pid, FAILED << 8
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        """The same once it has ended; raises subprocess.TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(0.01)
        return status

    def send_signal(self, sig: int) -> None:
        """Sends a signal if it runs still."""
        if self.poll() is None:  # So its number is not yet another's.
            os.kill(self.pid, sig)


class ForkServer:
    """The supervisor's end."""

    def __init__(self, environment: Mapping[str, str], modules: Sequence[str] = MODULES) -> None:
        """Begins to load; `environment` is that of the programs."""
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._give_up_at = time.monotonic() + LOAD_SECONDS
        self._ready = False
        self._process: subprocess.Popen[bytes] | None = None
        try:
            with theirs:
                self._process = spawn(
                    (sys.executable, "-u", "-m", "apex.runtime.fork_server", str(theirs.fileno()), str(os.getpid())),
                    errors=subprocess.DEVNULL,
                    environment=environment,
                    pass_fds=(theirs.fileno(),),
                )
            self._link.send(
                json.dumps(list(modules)).encode()
            )  # Not by its command line, which would look like theirs.
        except OSError as error:
            self._lose(str(error))

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def loading(self) -> bool:
        """Whether it is worth waiting for: neither ready yet nor lost."""
        if self._process is None or self._ready:
            return False
        if select.select([self._link], [], [], 0.0)[0]:
            self._ready = bool(self._receive())
            if not self._ready:
                self._lose("it ended while it loaded")
        elif time.monotonic() > self._give_up_at:
            self._lose(f"it has loaded for {LOAD_SECONDS:.0f} s")
        return self._process is not None and not self._ready

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], niceness: int, output: int
    ) -> ChildProcess | None:
        """Runs `command`, which is PYTHON -u -m MODULE ARGUMENT...; None where that cannot be had here.

        `environment`: all of it; `output`: a file descriptor that it writes to.
        """
        if self._process is None or self.loading:
            return None
        request = {"command": list(command), "environment": dict(environment), "niceness": niceness}
        reader, writer = os.pipe()
        try:
            become_subreaper(True)
            socket.send_fds(self._link, [json.dumps(request).encode()], [output, reader])
            if not select.select([self._link], [], [], FORK_SECONDS)[0]:
                raise TimeoutError(f"no answer within {FORK_SECONDS:.0f} s")
            answer = self._receive()
            if not answer:
                raise ConnectionError("it has ended")
            copy = ForkedProcess(json.loads(answer)["pid"])
            os.write(writer, GO)
            return copy
        except OSError as error:
            self._lose(str(error))
            return None
        finally:
            become_subreaper(False)
            os.close(reader)
            os.close(writer)  # A copy that nobody knows of ends here: the program is started the slow way.

    def close(self) -> None:
        """Ends it; the programs that it has started go on."""
        if self._process is not None:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(KILL_SECONDS)
        self._process = None
        self._link.close()

    def _receive(self) -> bytes:
        try:
            return self._link.recv(MAX_BYTES)
        except OSError:
            return b""

    def _lose(self, why: str) -> None:
        log.warning("programs start the slow way from now on, as the fork server is lost: %s", why)
        self.close()


class _Request(NamedTuple):
    command: list[str]
    environment: dict[str, str]  # all of it
    niceness: int


def main(argv: Sequence[str] | None = None) -> int:
    """Loads, and starts what it is asked for until nobody asks any more; a copy comes back here, as its program."""
    fd, parent = sys.argv[1:] if argv is None else argv
    with socket.socket(fileno=int(fd)) as link:
        for module in json.loads(link.recv(MAX_BYTES)):
            importlib.import_module(module)
        setproctitle.getproctitle()  # It finds a command's words by the environment behind them, while that is there.
        setproctitle.setthreadtitle("apex.runtime.fork_server")
        gc.collect()
        gc.freeze()  # A collector that looks at what is shared would write to it, and so make a copy.
        link.send(b"ready")
        program = _serve(link, int(parent))
    return FINISHED if program is None else program()


def _serve(link: socket.socket, parent: int) -> Callable[[], int] | None:
    """Returns in the fork server with None, in each copy with what that should run."""
    while True:
        message, fds, _, _ = socket.recv_fds(link, MAX_BYTES, 2)
        if not message:
            return None
        request = _Request(**json.loads(message))
        reader, writer = os.pipe()
        if not os.fork():
            _fork_orphan(writer)
            for each in (reader, writer):
                os.close(each)
            _prepare(request, parent, *fds)
            return lambda: _run(request.command)
        os.close(writer)
        os.wait()  # So the program is the supervisor's when that hears of it.
        with os.fdopen(reader, "rb") as pipe:
            link.send(json.dumps({"pid": int(pipe.read())}).encode())
        for each in fds:
            os.close(each)


def _fork_orphan(writer: int) -> None:
    """Returns in a grandchild of the fork server, after its parent has written down its pid and ended."""
    pid = os.fork()
    if pid:
        os.write(writer, str(pid).encode())
        os._exit(FINISHED)


def _prepare(request: _Request, parent: int, output: int, go: int) -> None:
    """What `subprocess.Popen` would do between fork and exec."""
    os.setsid()  # Ctrl-C reaches the supervisor alone, which then stops the roles in order.
    deadline = time.monotonic() + ADOPT_SECONDS
    while os.getppid() != parent and time.monotonic() < deadline:
        time.sleep(0.0005)
    belong_to(parent)
    if os.read(go, 1) != GO:
        os._exit(NEIGHBOUR_GONE)
    os.close(go)
    be_nice(request.niceness)
    for standard in (1, 2):
        os.dup2(output, standard)
    os.close(output)
    os.environ.clear()
    os.environ.update(request.environment)


def _run(command: Sequence[str]) -> int:
    """Runs PYTHON -u -m MODULE ARGUMENT... in this process, which `ps` then shows under that name."""
    module, *arguments = command[3:]
    setproctitle.setproctitle(" ".join(command))
    setproctitle.setthreadtitle(module)  # what `top` shows
    sys.argv = [module, *arguments]
    program: Any = importlib.import_module(module)
    status: int = program.main()
    return status


if __name__ == "__main__":
    sys.exit(main())
