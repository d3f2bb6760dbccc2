"""Fixtures of the tests of the learner's processes."""

from dataclasses import replace

import pytest

from apex.config import Config, RunConfig, TransportConfig
from apex.runtime.ports import choose_ports, is_free


@pytest.fixture
def transport():
    """A transport whose ports are unused."""
    config = Config(run=RunConfig(tensorboard=False), transport=TransportConfig(port_offset=3_000))
    return replace(choose_ports(config, is_free, lambda sentence: None).transport, lease_seconds=3.0)
