"""Servers of tables for the tests of one file."""

import pytest
from support.table_servers import starting_servers


@pytest.fixture
def starting():
    """A function that starts servers for one test."""
    with starting_servers() as start:
        yield start


@pytest.fixture(scope="module")
def starting_for_all():
    """The same for all tests of a file: a server needs a twentieth of a core, also without clients."""
    with starting_servers() as start:
        yield start
