"""Worker processes report scores and choose their number format."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from apex.acting import worker
from apex.acting.worker import acts_in_bfloat16, explore
from apex.config import ActorConfig, Config, NetworkConfig
from apex.schema import Schema
from apex.transport.messages.results import ActorScores, Scores, ScoreSums
from apexreplay.process.lifecycle import Stop
from apexreplay.types import Stream


def run_worker_once(scores, send):
    """Runs a worker for a single step, in which games with `scores` end; returns the scores that it could not send."""
    stop, sums = Stop(), ScoreSums()
    actor = SimpleNamespace(begin=list, end=list, num_steps=7, scores=sums)

    def step():
        stop.request()
        sums.add(scores)
        return True

    actor.step = step
    explore(stop, actor, SimpleNamespace(figures=np.zeros((2, 2)), send_scores=send), 1)
    return sums.take(None)


def test_scores_of_the_last_second_are_sent_at_the_end():
    scores, sent = Scores([ActorScores(actor_id, 1, 3.0, 9) for actor_id in range(1_500)], 2), []
    assert run_worker_once(scores, lambda worker, part: sent.append((worker, part)) or True) is None
    assert [worker for worker, _ in sent] == [1, 1]
    assert [actor for _, part in sent for actor in part.actors] == scores.actors
    assert sum(part.faults for _, part in sent) == 2


def test_scores_are_kept_while_the_socket_is_full():
    scores = Scores([ActorScores(0, 1, 3.0, 9)], 2)
    assert run_worker_once(scores, lambda worker, part: False) == scores


@pytest.mark.parametrize(("niceness", "expected"), [(0, []), (7, [(7, 3)])])
def test_an_actor_leaves_cpu_time_once_it_has_waited_for_receipts(monkeypatch, niceness, expected):
    stop, lowered, steps = Stop(), [], []
    actor = SimpleNamespace(begin=list, end=list, num_steps=0, scores=ScoreSums())

    def step():
        acted = (False, True, True, False, False)[len(steps)]
        steps.append(acted)
        actor.num_steps += acted
        if len(steps) == 5:
            stop.request()
        return acted

    actor.step = step
    monkeypatch.setattr("apex.acting.worker.lower_priority", lambda value: lowered.append((value, len(steps) - 1)))
    explore(stop, actor, SimpleNamespace(figures=np.zeros((1, 2))), 0, niceness=niceness)
    assert lowered == expected


@pytest.mark.parametrize(
    ("setting", "width", "has_bfloat16", "expected"),
    [
        ("auto", 1.0, True, True),
        ("auto", 0.25, True, False),  # For a narrow network bfloat16 is slower.
        ("auto", 1.0, False, False),
        ("on", 0.25, False, True),
        ("off", 1.0, True, False),
    ],
)
def test_each_host_chooses_its_number_format(setting, width, has_bfloat16, expected):
    config = Config(actor=ActorConfig(bfloat16=setting), network=NetworkConfig(width=width))
    pixels = Schema(frame_shape=(84, 84), frame_dtype="uint8", stack=4, num_actions=6, n_step=3, codec="lz4")
    assert acts_in_bfloat16(config, pixels, has_bfloat16=has_bfloat16) == expected
    continuous = Schema(
        frame_shape=(84, 84), frame_dtype="uint8", stack=4, num_actions=0, action_size=2, n_step=3, codec="lz4"
    )
    assert not acts_in_bfloat16(config, continuous, has_bfloat16=has_bfloat16)  # Its policies compute in float32.


def test_workers_have_global_generators_of_their_own(monkeypatch):
    """They are forked with equal ones, which environments of users may draw from."""
    drawn, threads = [], torch.get_num_threads()

    def note(config, streams):
        drawn.append((random.random(), np.random.random(), torch.rand(1).item()))
        raise EOFError

    monkeypatch.setattr(worker, "make_environments", note)
    schema = Schema(frame_shape=(4,), frame_dtype="float32", stack=1, num_actions=2, n_step=3, codec="raw")
    welcome = SimpleNamespace(config=Config(), schema=schema, run_id=1)
    for stream in (Stream(0, 1), Stream(1, 1), Stream(0, 2), Stream(0, 1)):
        with pytest.raises(EOFError):
            worker.run_worker(Stop(), worker.WorkerTask(welcome, [stream], None, None, 0))
    torch.set_num_threads(threads)
    assert len({values for each in drawn for values in each}) == 9
    assert drawn[0] == drawn[3]
