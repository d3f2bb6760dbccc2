"""What every test of sockets needs."""

import pytest

from apexreplay.transport.sockets import open_context


@pytest.fixture
def context():
    """Closes every socket that the test has left open."""
    with open_context() as context:
        yield context
