"""Heartbeats: they go on while a program works for long, and end the program when it is stuck for good."""

from __future__ import annotations

import signal
import subprocess
import sys

from support.waiting import DEADLINE

PROGRAM = """
import threading
from apex.config import Config, RunConfig, TransportConfig
from apex.runtime.lifecycle import configure_logging, stop_on_signals
from apex.transport.heartbeat import Session
from apex.transport.hello import Route, Welcome
from apex.transport.messages.status import ActorStatus
from apex.types import Schema
configure_logging("actor")
config = Config(transport=TransportConfig(heartbeat_seconds=0.1), run=RunConfig(stuck_seconds=0.4))
schema = Schema(frame_shape=(4,), frame_dtype="float32", stack=1, num_actions=2, n_step=3, codec="raw")
welcome = Welcome(route=Route("127.0.0.1", 9), session=1, run_id=2, config=config, schema=schema, num_parameters=3)
status = ActorStatus(
    waiting=None, num_steps=0, steps_per_second=0, wait_share=0, parameter_bytes_per_second=0
)
with stop_on_signals() as stop:
    session = Session(welcome, "actor", stop, lambda: status)
    for _ in range(100):
        stop.tick()
    threading.Event().wait()  # for nobody
"""


def test_a_program_that_was_started_by_hand_ends_when_its_main_thread_is_stuck_and_says_where():
    ended = subprocess.run([sys.executable, "-c", PROGRAM], stderr=subprocess.PIPE, text=True, timeout=DEADLINE)
    assert ended.returncode == -signal.SIGABRT
    assert "CRITICAL actor: the main thread made no progress for" in ended.stderr
    assert "aborting this process as stuck" in ended.stderr
    assert "in wait" in ended.stderr
