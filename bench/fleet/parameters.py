"""Bytes and age of the parameters that many actor hosts get.

Up to REAL_HOSTS hosts have real sockets, with keys, in one process. Above, the publisher is real, but its socket only
counts: each message takes the time that a link of LINK bytes/s needs for all hosts, on a clock of its own.
"""

import json
import math
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

from apex.config import Config
from apex.runtime.ports import choose_ports, is_free
from apex.transport import endpoints
from apex.transport.curve.key_store import read_keys
from apex.transport.endpoints import ParameterPublisher, ParameterSubscriber
from apex.transport.run_codec import PARAMETER_TOPICS
from apex.types import Parameters, Role
from apexreplay.errors import require
from apexreplay.process.children import start_child, stop_children
from apexreplay.process.lifecycle import POLL_SECONDS, Stop
from apexreplay.transport.sockets import open_context
from bench.fleet.receipts import CODEC
from bench.harness.command import Figures

REAL_HOSTS = 64
NUM_PARAMETERS = 250_000  # 1 MB
PAPER_PARAMETERS = 3_300_019  # of the simulated hosts: the network of the paper for Atari
PUBLISH_SECONDS = 0.25  # as `learner.publish_seconds`
BUDGET = 20e6  # bytes per second for real hosts, which share this machine
LINK = 1.25e9  # bytes per second of 10 GbE
WAIT_SECONDS = 60.0


def measure_parameters(keys: str, num_hosts: int, seconds: float, stop: Stop) -> Figures:
    """Returns the bytes per second, the budget, the period and the largest age of a host's parameters."""
    return _measure_real(keys, num_hosts, seconds, stop) if num_hosts <= REAL_HOSTS else _simulate(num_hosts)


def _measure_real(keys: str, num_hosts: int, seconds: float, stop: Stop) -> Figures:
    endpoint = choose_ports(Config(), is_free, lambda sentence: None).transport.endpoint("parameters")
    ours, theirs = Pipe()
    child = start_child("hosts", _receive, keys, endpoint, num_hosts, theirs)
    try:
        with open_context(read_keys(keys, Role.LEARNER)) as context:
            publisher = ParameterPublisher(context, endpoint, CODEC, bytes_per_second=BUDGET)
            values, until = np.zeros(NUM_PARAMETERS, np.float32), time.monotonic() + WAIT_SECONDS
            publisher.publish(Parameters(_now_ms(), values))
            expected = num_hosts * 4 * NUM_PARAMETERS / BUDGET
            while publisher.period < expected:
                require(time.monotonic() < until and not stop.poll(), f"{num_hosts} hosts did not subscribe")
                publisher.serve(0.02)
            ours.send_bytes(b"begin")
            period = max(PUBLISH_SECONDS, publisher.period)
            began, used, sent, publish_at = time.monotonic(), time.process_time(), publisher.num_bytes, 0.0
            seconds = period * math.ceil(max(seconds, 4 * period) / period)  # whole periods
            while time.monotonic() < began + seconds and not stop.poll():
                if time.monotonic() >= publish_at:
                    publish_at = time.monotonic() + period
                    publisher.publish(Parameters(_now_ms(), values))
                publisher.serve(0.02)
            wall = time.monotonic() - began
            figures = {
                "parameter_bytes_per_s": (publisher.num_bytes - sent) / wall,
                "parameter_budget_bytes_per_s": BUDGET,
                "parameter_publisher_cores": (time.process_time() - used) / wall,
                "parameter_period_s": period,
            }
            ours.send_bytes(b"end")
            require(ours.poll(WAIT_SECONDS), "no ages from the hosts")
            return figures | {"parameter_age_s": float(json.loads(ours.recv_bytes()))}
    finally:
        stop_children([child])


def _receive(stop: Stop, keys: str, endpoint: str, num_hosts: int, pipe: Connection) -> None:
    """Receives as each host; sends the largest age of parameters between the two messages of the pipe."""
    with open_context(read_keys(keys, Role.ACTOR)) as context:
        hosts = [ParameterSubscriber(context, endpoint, CODEC, num_parameters=NUM_PARAMETERS) for _ in range(num_hosts)]
        newest = [0] * num_hosts
        while not stop.poll() and not (pipe.poll() and all(newest)):
            newest = [
                news.version if (news := host.receive(0.0)) else old for host, old in zip(hosts, newest, strict=True)
            ]
        pipe.recv_bytes()
        oldest = 0.0
        while not stop.poll() and not pipe.poll():
            time.sleep(0.01)
            newest = [
                news.version if (news := host.receive(0.0)) else old for host, old in zip(hosts, newest, strict=True)
            ]
            oldest = max(oldest, *((_now_ms() - version) / 1e3 for version in newest))
        pipe.send_bytes(json.dumps(oldest).encode())
        while not stop.poll():
            time.sleep(POLL_SECONDS)


def _now_ms() -> int:
    """Returns the milliseconds of the monotonic clock, which all processes share, below 2^32."""
    return int(1e3 * time.monotonic()) % 2**32


class LinkSocket:
    """Takes the place of the publisher's socket: notes when the link has passed each message on to the last host."""

    def __init__(self, num_hosts: int, clock: SimpleNamespace) -> None:
        self.subscriptions = [b"\x01" + PARAMETER_TOPICS[True]] * num_hosts
        self.arrivals: list[tuple[float, float]] = []  # time of sending and of arrival at the last host
        self._num_hosts, self._clock = num_hosts, clock

    def send_multipart(self, message: list[bytes], **options: Any) -> None:
        free_at = max([self._clock.now, *(arrival for _, arrival in self.arrivals[-1:])])
        self.arrivals.append((self._clock.now, free_at + self._num_hosts * len(message[0]) / LINK))


def _simulate(num_hosts: int) -> Figures:
    """The hosts act in bfloat16 and share a link of 10 GbE, a quarter of which is the budget."""
    clock = SimpleNamespace(now=1e6)
    link = LinkSocket(num_hosts, clock)
    values = np.zeros(PAPER_PARAMETERS, np.float32)
    context = SimpleNamespace(socket=lambda kind: link)
    receive = lambda socket, timeout: [link.subscriptions.pop()] if link.subscriptions else None  # noqa: E731
    fakes: dict[str, Any] = {
        "prepare": lambda *a, **o: None,
        "bind": lambda *a: None,
        "receive": receive,
        "time": SimpleNamespace(monotonic=lambda: clock.now),
    }
    link.setsockopt = lambda *a: None  # type: ignore[attr-defined]
    with patch.multiple(endpoints, **fakes):
        publisher = ParameterPublisher(context, "", CODEC, bytes_per_second=LINK / 4)  # type: ignore[arg-type]
        began, publish_at = clock.now, 0.0
        while link.subscriptions or clock.now < began + 10 * max(PUBLISH_SECONDS, publisher.period):
            if clock.now >= publish_at:
                publish_at = clock.now + max(PUBLISH_SECONDS, publisher.period)
                publisher.publish(Parameters(0, values))
            publisher.serve(0.02)
            clock.now += 0.02
        period = max(PUBLISH_SECONDS, publisher.period)
    ages = [after - sent for (sent, _), (_, after) in zip(link.arrivals[1:], link.arrivals[2:], strict=False)]
    (first, _), *_, (last, _) = link.arrivals[1:]
    in_between = len(link.arrivals[1:]) - 1
    return {
        "parameter_bytes_per_s": in_between * num_hosts * (2 * PAPER_PARAMETERS + 52) / (last - first),
        "parameter_budget_bytes_per_s": LINK / 4,
        "parameter_publisher_cores": 0.0,
        "parameter_period_s": period,
        "parameter_age_s": max(ages),
    }
