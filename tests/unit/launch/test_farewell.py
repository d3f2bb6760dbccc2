"""A repeated command of a run that is over ends the actors that wait for it."""

import dataclasses
import threading

import pytest
from support.run_builders import make_config
from support.table_servers import free_port

from apex.config import TransportConfig
from apex.launch.farewell import tell_over
from apex.transport.hello import Route, greet
from apexreplay.process.lifecycle import Stop

pytestmark = pytest.mark.programs


def test_actors_that_join_a_run_that_is_over_end(tmp_path):
    port = free_port()
    config = dataclasses.replace(make_config(tmp_path), transport=TransportConfig(control_port=port))
    telling = threading.Thread(target=tell_over, args=(config, 7, Stop(), 1.0))
    telling.start()
    route = Route("127.0.0.1", port)
    assert greet(route, "actor", Stop(), num_streams=16) is None
    telling.join(30.0)
    assert not telling.is_alive()
