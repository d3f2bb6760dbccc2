"""The publishing thread sends the newest parameters, and its failure ends the role."""

import numpy as np
import pytest
from support.trainers import SCHEMA
from support.waiting import until

from apex.learning.parameter_publisher import PublishingThread
from apex.runtime.ports import is_free
from apex.transport.endpoints import ParameterSubscriber
from apex.transport.run_codec import RunCodec
from apex.types import Parameters
from apexreplay.errors import UsageError
from apexreplay.process.lifecycle import Stop
from apexreplay.transport.sockets import open_context

pytestmark = pytest.mark.programs


def test_the_publishing_thread_publishes_the_newest_and_the_last(transport):
    codec, values = RunCodec(1, SCHEMA), np.ones(4, np.float32)
    publishing = PublishingThread(transport.endpoint("parameters"), codec, Stop())
    with open_context() as context:
        subscriber = ParameterSubscriber(context, transport.endpoint("parameters"), codec, num_parameters=4)
        publishing.publish(Parameters(1, values))
        assert until(lambda: subscriber.receive(0.1), "parameters").version == 1
        publishing.publish(Parameters(2, values))
        assert until(lambda: subscriber.receive(0.1), "parameters").version == 2
        assert subscriber.receive(0.3) is None  # Each version is published once.
        publishing.publish(Parameters(3, values))
        publishing.close()
        assert until(lambda: subscriber.receive(0.1), "parameters").version == 3
    publishing.check()


def test_an_error_of_the_publishing_thread_is_raised(transport):
    stop = Stop()
    first = PublishingThread(transport.endpoint("parameters"), RunCodec(1, SCHEMA), Stop())
    until(lambda: not is_free("127.0.0.1", transport.parameters_port + transport.port_offset), "bind")
    second = PublishingThread(transport.endpoint("parameters"), RunCodec(1, SCHEMA), stop)
    until(lambda: stop.poll(), "failure")
    with pytest.raises(UsageError, match="is in use"):
        second.check()
    first.close()
    second.close()


def test_the_final_parameters_do_not_wait_for_the_budget(transport):
    """One snapshot takes an hour of the budget."""
    codec, values = RunCodec(1, SCHEMA), np.ones(4, np.float32)
    publishing = PublishingThread(transport.endpoint("parameters"), codec, Stop(), budget=0.02)
    with open_context() as context:
        subscriber = ParameterSubscriber(context, transport.endpoint("parameters"), codec, num_parameters=4)
        publishing.publish(Parameters(1, values))
        assert until(lambda: subscriber.receive(0.1), "parameters").version == 1
        publishing.publish(Parameters(2, values))
        assert subscriber.receive(0.3) is None
        publishing.hurry()
        assert until(lambda: subscriber.receive(0.1), "parameters").version == 2
    publishing.close()
