"""Heartbeats carry scores, continue during long work, and end the program if it is stuck."""

import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import zmq
from support.builders import PIXELS
from support.messages import ACTOR
from support.waiting import DEADLINE, until

from apex.config import Config, TransportConfig
from apex.transport.heartbeat import Session
from apex.transport.hello import Route, Welcome
from apex.transport.messages.control import ActorHeartbeat, Goodbye, StateAnswer, decode_request
from apex.transport.messages.results import ActorScores, Scores
from apexreplay.process.lifecycle import Stop
from apexreplay.wire.json_codec import encode_control

PROGRAM = """
import threading
from apex.config import Config, RunConfig, TransportConfig
from apexreplay.process.lifecycle import stop_on_signals
from apex.runtime.logs import configure_logging
from apex.transport.heartbeat import Session
from apex.transport.hello import Route, Welcome
from support.builders import PIXELS
from support.messages import ACTOR
configure_logging("actor")
config = Config(transport=TransportConfig(heartbeat_seconds=0.1), run=RunConfig(stuck_seconds=0.4))
facts = {"run_id": 2, "schema": PIXELS, "num_parameters": 3, "memory": "", "replay": [], "streams": []}
welcome = Welcome(route=Route("127.0.0.1", 9), session=1, config=config, **facts)
with stop_on_signals() as stop:
    session = Session(welcome, "actor", stop, lambda: ACTOR)
    for _ in range(100):
        stop.tick()
    threading.Event().wait()  # No thread sets it.
"""


class Learner:
    """A learner that answers heartbeats and adds up their scores."""

    def __init__(self, context, port=0):
        self._socket = context.socket(zmq.ROUTER)
        self._socket.bind(f"tcp://127.0.0.1:{port or '*'}")
        self.port = int(self._socket.last_endpoint.rpartition(b":")[2])
        self.requests, self.games, self.pace = [], 0, 1.0

    def serve(self):
        """Answers the next request; returns whether there was one."""
        if not self._socket.poll(100):
            return False
        identity, *frames = self._socket.recv_multipart()
        request = decode_request(frames, 2)
        self.requests.append(request)
        if isinstance(request, ActorHeartbeat):
            self.games += sum(actor.games for actor in request.scores.actors)
            self._socket.send_multipart([identity, *encode_control(StateAnswer(False, pace=self.pace), 2)])
        return True

    def close(self):
        self._socket.close(0)


@contextmanager
def session_with(port, scores):
    """A session with a learner; `scores` are those that wait."""
    transport = TransportConfig(heartbeat_seconds=0.05, lease_seconds=1.0)
    route = Route("127.0.0.1", port)
    facts = {"run_id": 2, "schema": PIXELS, "num_parameters": 3, "memory": "", "replay": [], "streams": []}
    welcome = Welcome(route=route, session=1, config=Config(transport=transport), **facts)
    session = Session(welcome, "actor", Stop(), lambda: ACTOR, take_scores=lambda: scores.pop() if scores else None)
    yield session
    session.close()


def make_scores(count):
    return [Scores([ActorScores(0, 1, 2.0, 3)]) for _ in range(count)]


def test_heartbeats_keep_the_pace_that_the_learner_asks_for():
    with zmq.Context() as context:
        learner = Learner(context)
        learner.pace = 60.0  # one heartbeat in 3 s
        with session_with(learner.port, []):
            until(lambda: not any(learner.serve() for _ in range(5)) and learner.requests, "a pause of half a second")
            began, count = time.monotonic(), len(learner.requests)
            until(lambda: learner.serve() or time.monotonic() > began + 1.0, "a second")
            assert len(learner.requests) == count
            until(learner.serve, "the next heartbeat")
            assert time.monotonic() - began > 1.5
            learner.pace = 1.0
            until(learner.serve, "a heartbeat whose answer asks for more")
            answered = time.monotonic()
            until(learner.serve, "the heartbeat that renews a shorter lease")
            assert time.monotonic() - answered < 1.0
            learner.close()


def test_scores_wait_while_the_learner_does_not_answer():
    scores = []
    with zmq.Context() as context:
        learner = Learner(context)
        with session_with(learner.port, scores) as session:
            until(lambda: learner.serve() and len(learner.requests) > 3, "heartbeats")
            learner.close()
            until(lambda: not session.answers, "silence")  # A heartbeat on its way is lost with the connection.
            scores += make_scores(10)
            time.sleep(1.0)  # time for 20 heartbeats
            assert len(scores) >= 9  # At most one heartbeat with scores has no answer.
            learner = Learner(context, learner.port)
            until(lambda: learner.serve() and learner.games == 10, "scores")
        learner.close()


def test_closing_a_session_sends_the_last_scores_and_goodbye():
    scores = []
    with zmq.Context() as context:
        learner = Learner(context)
        with session_with(learner.port, scores):
            until(lambda: learner.serve() and learner.requests, "heartbeat")
            scores += make_scores(10)
        until(lambda: learner.serve() and isinstance(learner.requests[-1], Goodbye), "goodbye")
        assert learner.games == 10
        learner.close()


def test_a_stuck_program_without_a_supervisor_ends_and_logs_its_stack():
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{PROGRAM}"]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=DEADLINE)
    assert ended.returncode == -signal.SIGABRT
    assert "CRITICAL actor:" in ended.stderr
    assert "in wait" in ended.stderr
