"""Joining a run: what a program waits for while the learner does not answer."""

from unittest.mock import Mock

import pytest

from apex.transport import hello
from apex.transport.hello import Route, greet
from apexreplay.facts import Waiting
from apexreplay.process.lifecycle import Stop


@pytest.mark.parametrize(("keys", "what"), [("", "welcome_without_keys"), ("keys", "welcome_with_keys")])
def test_a_silent_learner_may_refuse_the_key(monkeypatch, keys, what):
    """A refused key gets no answer, so the wait names the keys."""
    waits, stop, route = [], Stop(), Route("127.0.0.1", 7, keys)

    def wait(self, waiting):
        waits.append(waiting)
        stop.request()

    monkeypatch.setattr(hello, "read_keys", lambda keys, role: None)
    monkeypatch.setattr(hello, "_ask", Mock(return_value=None))
    monkeypatch.setattr("apexreplay.process.lifecycle.Wait.on", wait)
    assert greet(route, "actor", stop) is None
    assert waits == [Waiting(what, route.endpoint)]
