"""Joining a run: what a program waits for while the learner does not answer."""

from unittest.mock import Mock

import pytest

from apex.transport import hello
from apex.transport.hello import Route, greet
from apexreplay.facts import Waiting
from apexreplay.process.lifecycle import Stop


@pytest.mark.parametrize(
    ("host", "keys", "what"),
    [
        ("127.0.0.1", "", "welcome_without_keys"),
        ("127.0.0.1", "keys", "welcome_with_keys"),
        ("no-such-host.invalid", "keys", "host_name"),
        ("x" * 64 + ".invalid", "", "host_name"),
    ],
)
def test_a_silent_learner_may_refuse_the_key_or_have_no_address(monkeypatch, host, keys, what):
    """A refused key gets no answer, so the wait names the keys."""
    waits, stop, route = [], Stop(), Route(host, 7, keys)

    def wait(self, waiting):
        waits.append(waiting)
        stop.request()

    monkeypatch.setattr(hello, "read_keys", lambda keys, role: None)
    monkeypatch.setattr(hello, "_ask", Mock(return_value=None))
    monkeypatch.setattr("apexreplay.process.lifecycle.Wait.on", wait)
    assert greet(route, "actor", stop) is None
    assert waits == [Waiting(what, host if what == "host_name" else route.endpoint)]
