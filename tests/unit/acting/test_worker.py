"""What a worker process reports."""

from types import SimpleNamespace

import numpy as np

from apex.acting.worker import explore
from apex.runtime.lifecycle import Stop


def test_the_scores_of_the_last_second_are_sent_at_the_end():
    stop, sent = Stop(), []
    actor = SimpleNamespace(begin=list, end=list, num_steps=7, scores=SimpleNamespace(take=lambda: {"score": 3.0}))

    def step() -> bool:
        stop.request()
        return True

    actor.step = step
    explore(stop, actor, SimpleNamespace(send=sent.append), np.zeros(2))
    assert [figures.scalars for figures in sent] == [{"score": 3.0}]
