"""The end of a learner's run."""

from types import SimpleNamespace

from apex.config import EvaluatorConfig
from apex.facts import EndReason
from apex.learning.coordinator.link import TrainerEnd
from apex.learning.service import _end_run
from apexreplay.process.lifecycle import Stop


def test_the_final_policy_is_sent_before_the_end_of_training():
    """On a GPU, parameters are sent only by the next call after their copy."""
    tape = []
    trainer = SimpleNamespace(
        publish_newest=lambda: tape.append("publish"), flush=lambda: tape.append("flush"), num_updates=7
    )
    link = SimpleNamespace(send=tape.append)
    coordinator = SimpleNamespace(is_alive=lambda: False)
    _end_run(trainer, link, coordinator, EvaluatorConfig(), EndReason("updates", 7.0), Stop())
    assert tape == ["publish", "flush", TrainerEnd(EndReason("updates", 7.0), 7)]
