"""An actor host sums up its workers' reports."""

import time
from contextlib import closing

import numpy as np
import pytest

from apex.acting.host import ActorHost, WorkerReports
from apex.transport.messages.results import ActorScores, Scores
from apex.types import Parameters
from apexreplay.process.lifecycle import Stop


@pytest.fixture
def reports():
    with closing(WorkerReports(3)) as reports:
        yield reports


def test_the_status_counts_the_steps_of_all_streams(reports):
    host = ActorHost(None, reports, [16, 16, 8])
    status = host.status()
    assert (status.num_steps, bool(status.waiting)) == (0, True)
    reports.figures[:, 0] = 10
    status = host.status()
    assert (status.num_steps, bool(status.waiting)) == (10 * 40, False)
    assert status.steps_per_second > 0


def test_parameters_are_received_once_for_all_workers(reports):
    stop, published = Stop(), []

    class Subscriber:
        left, num_bytes = 3, 0

        def receive(self, timeout):
            self.left -= 1
            self.num_bytes += 4_000
            if self.left == 0:
                stop.request()
            return Parameters(7, np.zeros(1_000, np.float32))

    class Memory:
        def publish(self, parameters):
            published.append(parameters.version)

    host = ActorHost(Memory(), reports, [16] * 3)
    before = time.monotonic()
    host.run(Subscriber(), stop, lambda: None)
    time.sleep(0.05)
    rate = host.status().parameter_bytes_per_second
    assert published == [7] * 3
    assert 12_000 / (time.monotonic() - before + 1.0) < rate <= 12_000 / 0.05


def test_scores_of_all_workers_are_added_up(reports):
    host = ActorHost(None, reports, [16] * 3)
    assert host.take_scores() is None
    for worker, actor_id in enumerate((0, 5, 5)):
        assert reports.send_scores(worker, Scores([ActorScores(actor_id, 1, 2.5, 9)], 1))
    assert host.take_scores() == Scores([ActorScores(0, 1, 2.5, 9), ActorScores(5, 2, 5.0, 18)], 3)
    assert host.take_scores() is None


def test_a_full_socket_refuses_scores_without_blocking(reports):
    scores = Scores([ActorScores(0, 1, 2.5, 9)])
    num_sent = next(count for count in range(100_000) if not reports.send_scores(1, scores))
    assert reports.send_scores(2, scores)
    assert sum(1 for _ in reports.receive_scores()) == num_sent + 1
    assert num_sent >= 100  # more than a minute of reports
    assert reports.send_scores(1, scores)
