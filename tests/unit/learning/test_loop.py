"""The learner's loop saves, reports and ends on request."""

import math
import multiprocessing
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from support.trainers import Tape, make_batch, make_trainer

from apex.config import CheckpointConfig, Config, LearnerConfig, ReplayConfig, RunConfig
from apex.errors import DivergedError
from apex.facts import INTERRUPTED, EndReason
from apex.learning.batch_ring import LoaderFigures
from apex.learning.coordinator.link import CoordinatorLink, News, TrainerReport, decode_from_trainer, encode
from apex.learning.loop import LearnerLoop, Reporter, describe_training, share_of_limits
from apex.learning.setup import choose_device
from apex.runtime.gpu import read_cuda
from apex.types import Progress
from apexreplay.errors import ChildDiedError, UsageError
from apexreplay.facts import Waiting
from apexreplay.process.lifecycle import Stop

pytestmark = pytest.mark.programs

CONFIG = Config(checkpoint=CheckpointConfig(period=2, period_seconds=400.0), learner=LearnerConfig(batch_size=16))


BATCHES = Waiting("batches")


class Loop:
    """A learner's loop; the test has the coordinator's end of its pipe. An update takes 100 s."""

    def __init__(self, num_batches, num_shards=1, max_skipped_updates=10, checkpoint=CONFIG.checkpoint, **run):
        self.pipe, pipe = multiprocessing.Pipe()
        self.tape = Tape(*(make_batch(number) for number in range(num_batches)))
        self.trainer = make_trainer(self.tape)
        self.saved = []
        self.saved_at = []  # updates
        self.writing = False  # a checkpoint, still
        self.connected = []
        self.loaders = LoaderFigures(np.zeros(2), np.zeros(2), np.zeros(2))
        learner = replace(CONFIG.learner, max_skipped_updates=max_skipped_updates)
        replay = ReplayConfig(num_shards=num_shards)
        self.loop = LearnerLoop(
            self.trainer,
            CoordinatorLink(pipe, replay, lambda *connection: self.connected.append(connection), Progress()),
            Reporter(SimpleNamespace(batch_size=16, loaders=self.loaders)),
            replace(CONFIG, learner=learner, checkpoint=checkpoint, run=RunConfig(**run)),
            save=self.save,
            clock=lambda: 100.0 * self.trainer.num_updates,
        )

    def save(self, progress):
        if self.writing:
            return False
        self.saved.append(progress)
        self.saved_at.append(self.trainer.num_updates)
        return True

    def send_news(self, *replay, end=None, steps=0, waiting=BATCHES):
        endpoints = [{"priorities": endpoint} for endpoint in replay]
        self.pipe.send_bytes(encode(News(endpoints, waiting, end, Progress(steps, 2, 3))))

    def run(self, stop=None, check=lambda: None):
        return self.loop.run(stop or Stop(), check)

    def reports(self):
        found = []
        while self.pipe.poll():
            found.append(decode_from_trainer(self.pipe.recv_bytes()).status)
        return found


def test_a_report_before_the_first_update_has_no_dormant_share():
    trainer = Loop(1).trainer
    assert all(parameter.grad is not None for parameter in trainer.online.parameters())  # memory only, no values
    assert describe_training(trainer).dormant_share is None


def test_a_report_names_the_worst_of_many_layers():
    trainer = Loop(1).trainer
    trainer.figures = {"loss": 1.0, **{f"own_{number}": 0.0 for number in range(99)}}
    shares = {f"layer {number}": number / 100 for number in range(99)}
    trainer.dormant_units = SimpleNamespace(shares=lambda: shares)
    status = describe_training(trainer)
    assert decode_from_trainer(encode(TrainerReport(status))).status == status  # The coordinator accepts it.
    assert (status.dormant_share, status.figures["dormant_share/layer 98"]) == (0.98, 0.98)
    assert "dormant_share/layer 0" not in status.figures


def test_news_is_taken_after_the_end_even_from_a_dead_coordinator():
    loop = Loop(1)
    link = loop.loop._coordinator
    for steps in (500, 700):
        loop.send_news(steps=steps)
    link.drain()
    assert link.progress.num_steps == 700
    loop.pipe.close()
    link.drain()
    with pytest.raises(ChildDiedError):
        link.receive()


def test_updates_of_earlier_starts_do_not_count_in_the_rate():
    loop = Loop(1)
    loop.trainer.num_updates = 5_000
    reporter = Reporter(SimpleNamespace(batch_size=16, loaders=loop.loaders), 5_000)
    assert reporter.report(loop.trainer, waiting=None).status.updates_per_second == 0


def test_a_dying_layer_is_named_once_after_a_minute(monkeypatch, caplog):
    loop = Loop(1)
    reporter = Reporter(SimpleNamespace(batch_size=16, loaders=loop.loaders))
    now, shares = [0.0], {"body.1": 0.1}
    monkeypatch.setattr("apex.learning.loop.time.monotonic", lambda: now[0])
    monkeypatch.setattr(loop.trainer.dormant_units, "shares", lambda: shares)

    def report(second, share, layer="value.activation"):
        now[0], shares[layer] = second, share
        reporter.report(loop.trainer, waiting=None)
        return [record.getMessage() for record in caplog.records]

    assert report(1_000.0, 0.6) == report(1_050.0, 0.5) == report(1_060.0, 0.6) == report(1_119.0, 0.7) == []
    (message,) = report(1_120.0, 0.7)
    assert "70 %" in message
    assert "'value.activation'" in message
    assert len(report(1_300.0, 0.9)) == 1
    assert len(report(1_301.0, 0.9, "body.1")) == 1
    assert len(report(1_361.0, 0.9, "body.1")) == 2


def test_each_25th_update_is_searched_for_dormant_units():
    loop, added = Loop(51), []
    loop.trainer.dormant_units.add = lambda states: added.append((loop.trainer.num_updates, len(states)))
    for _ in range(51):
        loop.trainer.step(0.0)
    assert added == [(0, 16), (25, 16), (50, 16)]


def test_the_nearest_limit_gives_the_share_of_the_run():
    progress = Progress(num_steps=300, elapsed_seconds=70.0, untrained_seconds=10.0)
    for run, expected in (
        (RunConfig(stop_score=5.0), None),
        (RunConfig(max_updates=1_000), 0.1),
        (RunConfig(max_updates=1_000, max_steps=1_000), 0.3),
        (RunConfig(max_updates=1_000, max_steps=1_000, max_minutes=2.0), 0.5),
        (RunConfig(max_updates=50), 1.0),
    ):
        assert share_of_limits(run, progress, 100) == expected
    serial = RunConfig(max_minutes=1.0, single_process=True)
    assert share_of_limits(serial, progress, 100) is None, "the clock must not change its curve"


def test_the_learning_rate_falls_until_the_limit_of_the_run():
    loop, shares = Loop(9, max_updates=5), []
    step = loop.trainer.step
    loop.trainer.step = lambda timeout, share: shares.append(share) or step(timeout, share)
    loop.run()
    assert shares == [0.0, 0.2, 0.4, 0.6, 0.8]


def test_the_loop_ends_after_its_last_update():
    loop = Loop(9, max_updates=5)
    assert loop.run() == EndReason("updates", 5)
    assert loop.trainer.num_updates == 5
    assert len(loop.tape.updates) == 5
    last = loop.reports()[-1]
    assert last.updates == 5
    assert last.loaders_draw == 0
    assert 0 <= last.load_per_core < 1_000
    assert last.policy_lag == 4 - 2  # Version 4 makes the fifth update; version 2 has chosen its actions.


def test_the_loop_saves_its_progress_each_period():
    loop = Loop(9, max_updates=5)
    loop.send_news("tcp://a", steps=1234)
    loop.run()
    assert loop.saved == [Progress(1234, 2, 3)] * 2
    assert loop.connected == [("tcp://a", 0)]


@pytest.mark.parametrize(("period_seconds", "saved_at"), [(1e-6, [1, 2, 3]), (3600.0, [])])
def test_a_slow_learner_saves_by_the_clock(period_seconds, saved_at):
    """A learner that makes few updates still saves every few minutes."""
    loop = Loop(3, checkpoint=CheckpointConfig(period=1_000, period_seconds=period_seconds), max_updates=3)
    loop.run()
    assert loop.saved_at == saved_at


def test_a_fast_learner_saves_once_per_quarter_of_the_period():
    loop = Loop(9, checkpoint=CheckpointConfig(period=1, period_seconds=1_200.0), max_updates=9)
    loop.run()
    assert loop.saved_at == [1, 4, 7]  # The first save has no minimum pause.


def test_a_due_save_follows_the_one_that_is_being_written():
    loop = Loop(9, max_updates=7)
    receive = loop.tape.receive

    def write_until_the_fourth_update(timeout):
        loop.writing = 2 <= loop.trainer.num_updates < 4
        return receive(timeout)

    loop.tape.receive = write_until_the_fourth_update
    loop.run()
    assert loop.saved_at == [2, 5, 6]


def test_priorities_follow_a_replay_server_that_moved():
    loop = Loop(9, max_updates=3)
    for endpoint in ("tcp://a", "tcp://a", "tcp://b"):
        loop.send_news(endpoint)
    loop.run()
    assert loop.connected == [("tcp://a", 0), ("tcp://b", 0)]


def test_priorities_follow_each_shard_and_a_wait_names_the_absent():
    loop = Loop(0, num_shards=2)
    loop.send_news("tcp://a", "", waiting=Waiting("replay", "replay-1"))
    loop.send_news("tcp://a", "tcp://b", waiting=Waiting("replay", "replay-1"))
    stop = Stop()
    waits = []

    def check():
        waits.extend(report.waiting for report in loop.reports())
        if len(waits) == 1:
            loop.send_news("tcp://a", "tcp://b", waiting=Waiting("inserts", "replay-1"))
        elif waits:
            stop.request()

    loop.run(stop, check)
    assert loop.connected == [("tcp://a", 0), ("tcp://b", 1)]
    assert (waits[0].what, waits[0].subject) == ("replay", "replay-1")
    assert (waits[-1].what, waits[-1].subject) == ("inserts", "replay-1")


def test_the_loop_returns_the_end_of_the_news():
    loop = Loop(1)
    loop.send_news(end=EndReason("score", 18.0))
    assert loop.run() == EndReason("score", 18.0)


def test_a_stop_request_ends_the_loop():
    stop = Stop()
    stop.request()
    assert Loop(1).run(stop) == INTERRUPTED


def spoil(loop, *numbers):
    for number in numbers:
        loop.tape.batches[number].n_step_return[3] = math.nan


def test_an_update_with_a_non_finite_loss_is_skipped():
    loop = Loop(5, max_updates=5)
    spoil(loop, 1, 2)
    assert loop.run() == EndReason("updates", 5)
    last = loop.reports()[-1]
    assert (last.updates, last.skipped_updates) == (5, 2)
    assert math.isfinite(last.loss)
    assert last.dormant_share is None  # Dormant units are known after 1,000 states.


def test_too_many_skipped_updates_end_the_loop_without_a_save():
    loop = Loop(9, max_updates=9, max_skipped_updates=3)
    spoil(loop, 1, 2, 4, 5, 6)  # Two skipped updates in a row are allowed, three are not.
    with pytest.raises(DivergedError, match=r"\b3 .*update 7\b") as error:
        loop.run()
    assert "--resume" in error.value.remedy
    assert loop.saved_at == [4]  # Due at 2, 4 and 6; 2 and 6 were skipped. The caller makes the last save.


def test_no_checkpoint_is_saved_while_updates_are_skipped(caplog):
    loop = Loop(9, max_updates=7)
    spoil(loop, 1, 2, 3, 6)
    loop.run()
    loop.loop.save()
    assert loop.saved_at == [5, 6]
    assert [(record.levelname, record.args) for record in caplog.records] == [("ERROR", (7, 1))]


def test_the_loop_ends_with_its_coordinator():
    loop = Loop(3)
    loop.pipe.close()
    with pytest.raises(ChildDiedError, match="coordinator"):
        loop.run()


def test_cuda_without_a_gpu_is_an_error():
    if read_cuda().usable:  # Asking torch would initialize CUDA in this process, which forks later.
        assert choose_device(LearnerConfig(device="cuda")).type == "cuda"
        return
    with pytest.raises(UsageError, match="--device cuda"):
        choose_device(LearnerConfig(device="cuda"))
    assert choose_device(LearnerConfig()).type == "cpu"
