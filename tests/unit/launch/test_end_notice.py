"""A repeated command of a run that is over ends the actors that wait for it."""

import dataclasses
import threading

import pytest
from support.run_builders import make_config
from support.table_servers import free_port
from support.waiting import DEADLINE

from apex.config import TransportConfig
from apex.launch.end_notice import tell_over
from apex.transport.hello import Route, greet
from apexreplay.process.lifecycle import Stop

pytestmark = pytest.mark.programs


def test_actors_that_join_a_run_that_is_over_end(tmp_path):
    port, stop = free_port(), Stop()
    config = dataclasses.replace(make_config(tmp_path), transport=TransportConfig(control_port=port))
    telling = threading.Thread(target=tell_over, args=(config, 7, stop, DEADLINE))
    telling.start()
    assert greet(Route("127.0.0.1", port), "actor", Stop(), num_streams=16) is None
    stop.request()
    telling.join(DEADLINE)
    assert not telling.is_alive()
