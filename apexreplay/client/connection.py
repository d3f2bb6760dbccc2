"""A client's connection to the control socket of a server: requests, and heartbeats that keep its leases."""

import os
import queue
import random
import threading
import time
from typing import Any

from msgspec.structs import replace

from apexreplay.client.waiting import PAUSE_SECONDS, Waiting
from apexreplay.errors import DataError, UsageError, describe_exception, require
from apexreplay.process.lifecycle import POLL_SECONDS
from apexreplay.tables import Table
from apexreplay.transport.control_socket import ControlSocket
from apexreplay.transport.curve.key_store import Keys
from apexreplay.transport.sockets import open_context
from apexreplay.wire import control

BEAT_SECONDS = 1.0
IDLE_SECONDS = 0.02  # maximum time until a request is sent
REPEAT_SECONDS = 1.0  # time without an answer after which a request is sent again
_NUMBERS = random.SystemRandom()  # also differs between processes that were forked


class Connection:
    """Holds the control socket in a thread. Other threads may call all methods."""

    def __init__(self, host: str, port: int, keys: Keys | None) -> None:
        self.address = f"tcp://{host}:{port}"
        self.keys = keys
        self._requests: queue.Queue[control.Request] = queue.Queue()
        self._answers: dict[int, queue.Queue[control.Answer]] = {}  # by session, while a caller waits
        self._leases: dict[int, Lease] = {}
        self._unknown: set[int] = set()  # leases that a server has not known, and not given since
        self._refused: dict[int, tuple[str, str]] = {}  # reason and subject, for each lease that has ended
        self._failure: Exception | None = None  # what has ended the thread
        self.unanswered = 0  # heartbeats since the last answer
        self._pid = os.getpid()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="apexreplay-control", daemon=True)
        self._thread.start()

    def ask(self, request: control.Hello | control.StatusRequest, timeout: float) -> Waiting[control.Answer]:
        """Returns the answer to a request, which is repeated until it comes.

        Raises UsageError if the server refuses it, and DataError if there is no answer within `timeout` seconds.
        """
        is_time = isinstance(timeout, int | float) and timeout >= 0
        require(is_time, f"a timeout is a number of seconds from 0 on, got {timeout!r}")
        answers = self._answers[request.session] = queue.Queue()
        deadline, answer, was_later = time.monotonic() + timeout, None, False
        try:
            while time.monotonic() < deadline and (answer is None or isinstance(answer, control.Later)):
                usable = os.getpid() == self._pid and not self._stop.is_set()
                require(usable, "a client cannot be used after its end or a fork", remedy="create one in this process")
                self._require_thread()
                self._requests.put(request)
                repeat_at = min(time.monotonic() + REPEAT_SECONDS, deadline)
                while answers.empty() and time.monotonic() < repeat_at:
                    yield PAUSE_SECONDS
                answer = None if answers.empty() else answers.get()
                if isinstance(answer, control.Later):
                    was_later = True
                    yield POLL_SECONDS
        finally:
            del self._answers[request.session]
        if isinstance(answer, control.Refusal):
            raise _refused(answer.reason, answer.subject)
        if was_later and (answer is None or isinstance(answer, control.Later)):
            problem = (
                f"{self.address} still starts after {timeout:g} s: it restores items, or waits for its former clients"
            )
            raise DataError(problem, "try again, or pass a longer timeout")
        if answer is None or isinstance(answer, control.Later):
            remedy = "check that the server runs, its port and firewall, and that both sides have keys or neither has"
            raise DataError(f"no answer from {self.address} within {timeout:g} s", remedy)
        return answer

    def keep(self, lease: "Lease") -> None:
        """Keeps a lease by heartbeats."""
        self._leases[lease.hello.session] = lease

    def check(self, session: int) -> None:
        """Raises UsageError if the lease has ended, or the connection has failed."""
        self._require_thread()
        if session in self._refused:
            raise _refused(*self._refused[session])

    def leave(self, session: int) -> None:
        """Ends a lease."""
        self._leases.pop(session, None)
        self._requests.put(control.Bye(session=session))

    def close(self) -> None:
        """Closes the socket after the queued requests are sent."""
        self._stop.set()
        self._thread.join()

    def _require_thread(self) -> None:
        if self._failure is not None:
            problem = f"the connection to {self.address} has failed: {describe_exception(self._failure)}"
            raise UsageError(problem, "create a new client") from self._failure

    # --- in the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:
            self._failure = error

    def _serve(self) -> None:
        with open_context(self.keys) as context:
            socket: ControlSocket[control.Answer] = ControlSocket(
                context,
                self.address,
                lambda frames: control.decode_message(frames, control.Answer),
                high_water_mark=1_000,
            )
            beat_at = 0.0
            while True:
                stopping = self._stop.is_set()
                while not self._requests.empty():
                    socket.send(self._requests.get())
                if stopping:
                    return
                if time.monotonic() >= beat_at:
                    beat_at = time.monotonic() + BEAT_SECONDS
                    self._beat(socket)
                answer = socket.receive(IDLE_SECONDS)
                if answer is not None:
                    self._take(socket, answer)
                elif self.unanswered:
                    for lease in list(self._leases.values()):
                        lease.note_silence()

    def _beat(self, socket: ControlSocket[control.Answer]) -> None:
        self.unanswered += bool(self._leases)
        for session, lease in list(self._leases.items()):  # A welcome may be lost, too.
            socket.send(lease.hello if session in self._unknown else control.Beat(session=session))

    def _take(self, socket: ControlSocket[control.Answer], answer: control.Answer) -> None:
        self.unanswered = 0
        session = answer.session
        waiting, lease = self._answers.get(session), self._leases.get(session)
        if waiting is not None:
            waiting.put(answer)
        elif isinstance(answer, control.Welcome | control.Refusal) and lease is not None:
            known = lease.hello
            if isinstance(answer, control.Refusal) and answer.reason == "unknown_lease":
                self._unknown.add(session)
                socket.send(known)
            elif isinstance(answer, control.Refusal):
                self._end(session, answer.reason, answer.subject)
            elif (answer.run_id, answer.stream) != (known.run_id, known.stream):
                self._end(session, "new_memory")  # It answers a repeated first request, which a later server has got.
            elif answer.table != lease.declaration:
                self._end(session, "declaration")
            elif answer.experience != lease.port:
                self._end(session, "moved")
            elif known.role == "writer" and answer.segment_length < lease.segment_length:
                # It would refuse longer segments, which the writer sends until they are stored.
                self._end(session, "segment_length", str(answer.segment_length))
            elif known.role == "writer" and answer.inserts_wait and not lease.inserts_wait:
                self._end(session, "inserts_wait")  # It may refuse segments of items that are far apart.
            else:
                self._unknown.discard(session)
                lease.take(answer)

    def _end(self, session: int, reason: str, subject: str = "") -> None:
        lease = self._leases.pop(session, None)
        self._refused[session] = reason, subject
        if lease is not None:
            lease.note_end()


class Lease:
    """A lease of a table that a connection keeps: the part that writers and samplers share.

    Use it from one thread, in the process that created it.
    """

    def __init__(self, connection: Connection, hello: control.Hello, welcome: control.Welcome) -> None:
        """`hello`: the request for the lease; `welcome`: its answer."""
        self.hello = hello
        self._connection = connection
        self._pid = os.getpid()
        self._closed = False
        self.take(welcome)
        self.table = Table.from_dict(welcome.table)

    def take(self, welcome: control.Welcome) -> None:
        """Takes the server's answer; in the connection's thread after the server has started again.

        `hello` then asks for the same lease, should the server not know it any more.
        """
        known = {name: getattr(welcome, name) for name in ("run_id", "stream", "incarnation", "row")}
        self._welcome, self.hello = welcome, replace(self.hello, **known)

    def note_silence(self) -> None:
        """Called every IDLE_SECONDS while the server does not answer, in the connection's thread."""

    def note_end(self) -> None:
        """Called when the server has ended the lease, in the connection's thread."""

    @property
    def declaration(self) -> dict[str, Any]:
        """The table's declaration, as the server sends it."""
        return self._welcome.table

    @property
    def port(self) -> int:
        """The first port of the table, which its place among the server's tables decides."""
        return self._welcome.experience

    @property
    def segment_length(self) -> int:
        """Maximum items of a segment."""
        return self._welcome.segment_length

    @property
    def inserts_wait(self) -> bool:
        """Whether inserts wait for draws."""
        return self._welcome.inserts_wait

    def _endpoint(self, port: int) -> str:
        """Returns the address of another socket of the server."""
        return f"{self._connection.address.rpartition(':')[0]}:{port}"

    def _check(self) -> None:
        """Raises UsageError if this cannot be used any more."""
        role = self.hello.role
        if os.getpid() != self._pid:
            raise UsageError(f"a {role} cannot be used after a fork", "create it in the child process")
        if self._closed:
            raise UsageError(f"the {role} is closed", "open a new one")
        self._connection.check(self.hello.session)


def _refused(reason: str, subject: str) -> UsageError:
    """Returns the error for the end of a lease."""
    sentences = {
        "no_table": ("the server has no such table", f"its tables are {subject}"),
        "no_stream": (f"all {subject} streams of the table are in use", "raise num_streams of the table"),
        "stream_taken": ("another writer has got the stream, because this one was silent", "open a new writer"),
        "no_row": (f"{subject} samplers read the memory already", "close some of them, or pass shared_memory=False"),
        "role": (f"a key of the {subject} does not allow this", "use the keys of another role"),
        "new_memory": ("the server has started again without its memory", "start it with --snapshots DIR"),
        "declaration": ("the server has started again with another declaration of the table", "open a new one"),
        "moved": ("the server has started again with the table at other ports", "open a new writer or sampler"),
        "segment_length": (f"the server has started again with a lower segment_length, {subject}", "open a new writer"),
        "inserts_wait": ("the server has started again, and inserts wait for draws now", "open a new writer"),
        "unknown_lease": ("the server does not know this client", ""),
    }
    return UsageError(*sentences[reason])


def new_session() -> int:
    """Returns a random number for `Hello.session`."""
    return _NUMBERS.getrandbits(52)
