"""The evaluator takes each policy of the learner once."""

from types import SimpleNamespace

from msgspec.structs import replace
from support.messages import RESULT

from apex.evaluation.service import RemoteLearner
from apex.types import Parameters


def test_a_repeated_policy_is_not_evaluated_again_unless_it_is_the_last_one():
    coming = iter([5, 5, 5, 6, 6, 6])
    subscriber = SimpleNamespace(receive=lambda timeout: Parameters(next(coming), None))
    learner = RemoteLearner(subscriber, SimpleNamespace(encode_evaluation=lambda result, parameters: b""))
    learner.session = SimpleNamespace(final=None, post=lambda frames: None)

    def take():
        newest = learner.newest(0.0)
        return newest and newest.version

    assert (take(), take()) == (5, 5)  # The first evaluation failed.
    learner.keep(replace(RESULT, updates=5), None)
    assert (take(), take()) == (None, 6)
    learner.keep(replace(RESULT, updates=6), None)
    assert take() is None
    learner.session.final = 6
    assert take() == 6
