"""Programs end with the exit statuses of docs/protocol.md."""

import dataclasses
import signal
import subprocess
import sys

import pytest
import zmq
from support.messages import RUN
from support.programs import children_of
from support.waiting import DEADLINE, until

from apex.config import Config, to_dict
from apex.runtime.ports import choose_ports, is_free
from apex.schema import Schema
from apex.transport.messages.control import Hello, RefusedAnswer, StateAnswer, WelcomeAnswer, decode_request
from apexreplay.types import Stream
from apexreplay.wire.json_codec import encode_control

SCHEMA = Schema(frame_shape=(4,), frame_dtype="float32", stack=1, num_actions=2, n_step=3, codec="raw")
# Replaces the workers by processes that only wait, or fail, and their module, which takes seconds to import torch.
ACTOR = """
import sys, time
from types import SimpleNamespace
names = ("Work", "WorkerTask", "acts_in_bfloat16", "run_worker")
sys.modules["apex.acting.worker"] = SimpleNamespace(**dict.fromkeys(names, lambda *values, **named: False))
from apex.actor import main
def work(stop, task):
    while not stop.poll():
        time.sleep(0.01)
        if {fails}:
            raise RuntimeError("a failing worker")
sys.exit(main(sys.argv[1:], work=work))
"""


class Learner:
    """Answers hellos and heartbeats with the given answers."""

    def __init__(self, hello, beat=None):
        self.answers = {"hello": hello, "beat": beat}
        self.hellos = self.beats = 0
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")

    def serve(self):
        while self._socket.poll(20):
            identity, *frames = self._socket.recv_multipart()
            is_hello = isinstance(decode_request(frames, RUN), Hello)
            self.hellos += is_hello
            self.beats += not is_hello
            answer = self.answers["hello" if is_hello else "beat"]
            if answer is not None:
                self._socket.send_multipart([identity, *encode_control(answer, RUN)])

    def close(self):
        self._context.destroy(0)


def welcome():
    config = dataclasses.replace(Config(), transport=choose_ports(Config(), is_free, print).transport)
    return WelcomeAnswer(
        run_id=RUN, config=to_dict(config), schema=SCHEMA, num_parameters=3, num_actors=2, memory="",
        replay=[{"experience": "tcp://127.0.0.1:9", "receipts": "tcp://127.0.0.1:9"}], absent="",
        streams=[Stream(0, 1)], table={}, parameters=[],
    )  # fmt: skip


@pytest.fixture
def learners():
    learners = []

    def make(*answers):
        learners.append(Learner(*answers))
        return learners[-1]

    yield make
    for learner in learners:
        learner.close()


def start(learner, *options, fails=False):
    command = [sys.executable, "-c", ACTOR.format(fails=fails), "--learner", f"127.0.0.1:{learner.port}", *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(learner, process):
    until(lambda: learner.serve() or process.poll() is not None, "end", seconds=DEADLINE)
    return process.returncode, process.communicate()[0]


def test_the_status_is_0_if_the_run_is_over(learners):
    learner = learners(StateAnswer(stop=True))
    assert finish(learner, start(learner))[0] == 0


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, 75), (signal.SIGHUP, 0), (signal.SIGINT, 130)])
def test_the_status_of_actors_after_a_signal_names_the_signal(learners, signum, status):
    learner = learners(welcome(), StateAnswer(stop=False))
    process = start(learner)
    until(lambda: learner.serve() or learner.beats, "heartbeat")
    process.send_signal(signum)
    assert finish(learner, process)[0] == status


def test_the_status_is_1_if_a_worker_fails(learners):
    learner = learners(welcome(), StateAnswer(stop=False))
    status, log = finish(learner, start(learner, fails=True))
    assert status == 1
    assert "a failing worker" in log


@pytest.mark.parametrize("options", [["--keys", "nowhere"], []])
def test_the_status_is_2_for_unusable_options_and_refused_programs(learners, options):
    learner = learners(RefusedAnswer("another version"))
    assert finish(learner, start(learner, *options))[0] == 2


def test_the_status_is_3_if_training_diverged():
    program = "from apex.errors import DivergedError\nfrom apexreplay.process.lifecycle import reports_errors\n"
    program += "@reports_errors('apex learner')\ndef main(): raise DivergedError('a loss is not finite')\n"
    ended = subprocess.run([sys.executable, "-c", f"{program}\nraise SystemExit(main())"], capture_output=True)
    assert ended.returncode == 3


def test_the_status_is_75_if_the_learner_no_longer_knows_the_program(learners):
    learner = learners(welcome(), RefusedAnswer("refused"))
    assert finish(learner, start(learner))[0] == 75


def test_the_status_is_130_after_a_second_ctrl_c():
    program = "from apexreplay.process.lifecycle import reports_errors\n"
    program += "@reports_errors('apex')\ndef main(): raise KeyboardInterrupt\n"
    ended = subprocess.run([sys.executable, "-c", f"{program}\nraise SystemExit(main())"], capture_output=True)
    assert ended.returncode == 130


def test_the_status_is_75_if_the_learner_was_only_stopped(learners):
    learner = learners(welcome(), StateAnswer(stop=True, interrupted=True))
    assert finish(learner, start(learner))[0] == 75


def test_an_actor_host_waits_at_a_learner_that_stops_before_a_limit(learners):
    learner = learners(StateAnswer(stop=True, interrupted=True))
    process = start(learner)
    until(lambda: learner.serve() or learner.hellos > 1, "second hello")
    assert process.poll() is None
    learner.answers["hello"] = StateAnswer(stop=True)
    assert finish(learner, process)[0] == 0


def test_an_actor_host_joins_again_if_a_replay_server_has_moved(learners):
    learner = learners(welcome(), StateAnswer(stop=False, generation=7))
    process = start(learner)
    until(lambda: learner.serve() or (learner.hellos > 2 and learner.beats > 2), "second hello and heartbeat")
    assert process.poll() is None
    learner.answers["hello"] = StateAnswer(stop=True)
    assert finish(learner, process)[0] == 0


def test_an_actor_host_with_wait_for_runs_joins_run_after_run(learners):
    learner = learners(welcome(), StateAnswer(stop=True))
    process = start(learner, "--wait-for-runs")
    until(lambda: learner.serve() or learner.beats > 2, "heartbeats of several runs")
    learner.answers["beat"] = RefusedAnswer("refused")
    before = learner.beats
    until(lambda: learner.serve() or learner.beats > before + 2, "heartbeats of more runs")
    learner.answers["beat"] = StateAnswer(stop=False)
    until(lambda: learner.serve() or len(children_of(process.pid)) == 1, "worker")
    process.terminate()
    assert finish(learner, process)[0] == 75
