"""A client's connection to the control socket of a server: requests, and heartbeats that keep its leases."""

import os
import queue
import random
import threading
import time
from typing import Protocol

from apexreplay.errors import DataError, UsageError, require
from apexreplay.process.lifecycle import POLL_SECONDS
from apexreplay.transport.control_socket import ControlSocket
from apexreplay.transport.curve.key_store import Keys
from apexreplay.transport.sockets import open_context
from apexreplay.wire.control import (
    Answer,
    Beat,
    Bye,
    Hello,
    Later,
    Refusal,
    Request,
    StatusRequest,
    Welcome,
)

BEAT_SECONDS = 1.0
IDLE_SECONDS = 0.02  # maximum time until a request is sent
REPEAT_SECONDS = 1.0  # time without an answer after which a request is sent again
_NUMBERS = random.SystemRandom()  # also differs between processes that were forked


class Holder(Protocol):
    """The owner of a lease. The methods are called in the connection's thread."""

    def hello(self) -> Hello:
        """Returns the request for the lease, after the server has started again and does not know it."""

    def welcome(self, welcome: Welcome) -> None:
        """Takes the answer to `hello`."""


class Connection:
    """Holds the control socket in a thread. Other threads may call all methods."""

    def __init__(self, host: str, port: int, keys: Keys | None) -> None:
        self.address = f"tcp://{host}:{port}"
        self._keys = keys
        self._requests: queue.Queue[Request] = queue.Queue()
        self._answers: dict[int, queue.Queue[Answer]] = {}  # by session, while a caller waits
        self._leases: dict[int, Holder] = {}
        self._refused: dict[int, Refusal] = {}  # leases that the server has given to another client
        self.unanswered = 0  # heartbeats since the last answer
        self._pid = os.getpid()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="apexreplay-control", daemon=True)
        self._thread.start()

    def ask(self, request: Hello | StatusRequest, timeout: float) -> Answer:
        """Returns the answer to a request, which is repeated until it comes.

        Raises UsageError if the server refuses it, and DataError if there is no answer within `timeout` seconds.
        """
        usable = os.getpid() == self._pid and not self._stop.is_set()
        require(usable, "a client cannot be used after its end or a fork", remedy="create one in this process")
        answers = self._answers[request.session] = queue.Queue()
        deadline, answer = time.monotonic() + timeout, None
        try:
            while time.monotonic() < deadline and (answer is None or isinstance(answer, Later)):
                self._requests.put(request)
                try:
                    answer = answers.get(timeout=max(0.0, min(REPEAT_SECONDS, deadline - time.monotonic())))
                except queue.Empty:
                    continue
                if isinstance(answer, Later):
                    time.sleep(POLL_SECONDS)
        finally:
            del self._answers[request.session]
        if isinstance(answer, Refusal):
            raise refused(answer)
        if answer is None or isinstance(answer, Later):
            remedy = "check that the server runs, its port and firewall, and that both sides have keys or neither has"
            raise DataError(f"no answer from {self.address} within {timeout:g} s", remedy)
        return answer

    def keep(self, session: int, holder: Holder) -> None:
        """Keeps a lease by heartbeats."""
        self._leases[session] = holder

    def refusal(self, session: int) -> Refusal | None:
        """Returns why the lease has ended; None while there is it."""
        return self._refused.get(session)

    def leave(self, session: int) -> None:
        """Ends a lease."""
        self._leases.pop(session, None)
        self._requests.put(Bye(session=session))

    def close(self) -> None:
        """Closes the socket after the queued requests are sent."""
        self._stop.set()
        self._thread.join()

    # --- in the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with open_context(self._keys) as context:
            socket, beat_at = ControlSocket(context, self.address), 0.0
            while True:
                stopping = self._stop.is_set()
                while not self._requests.empty():
                    socket.send(self._requests.get())
                if stopping:
                    return
                if time.monotonic() >= beat_at:
                    beat_at = time.monotonic() + BEAT_SECONDS
                    self.unanswered += bool(self._leases)
                    for session in list(self._leases):
                        socket.send(Beat(session=session))
                answer = socket.receive(IDLE_SECONDS)
                if answer is not None:
                    self._take(socket, answer)

    def _take(self, socket: ControlSocket, answer: Answer) -> None:
        self.unanswered = 0
        waiting, holder = self._answers.get(answer.session), self._leases.get(answer.session)
        if waiting is not None:
            waiting.put(answer)
        elif isinstance(answer, Welcome) and holder is not None:
            holder.welcome(answer)
        elif isinstance(answer, Refusal) and holder is not None:
            if answer.reason == "unknown_lease":
                socket.send(holder.hello())
            else:
                self._leases.pop(answer.session, None)
                self._refused[answer.session] = answer


def refused(refusal: Refusal) -> UsageError:
    """Returns the error for a refusal."""
    subject = refusal.subject
    sentences = {
        "no_table": ("the server has no such table", f"its tables are {subject}"),
        "no_stream": (f"all {subject} streams of the table are in use", "raise num_streams of the table"),
        "stream_taken": ("another writer has got the stream, because this one was silent", "open a new writer"),
        "no_row": (f"{subject} samplers read the memory already", "close some of them"),
        "role": (f"a key of the {subject} does not allow this", "use the keys of another role"),
        "new_memory": ("the server has started again without its memory", "start it with --snapshots DIR"),
        "unknown_lease": ("the server does not know this client", ""),
    }
    return UsageError(*sentences[refusal.reason])


def new_session() -> int:
    """Returns a random number for `Hello.session`."""
    return _NUMBERS.getrandbits(52)
