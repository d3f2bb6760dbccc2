"""Servers of tables for the tests of one file."""

import pytest
from support.table_servers import starting_servers


@pytest.fixture(scope="module")
def starting():
    """A function that starts servers."""
    with starting_servers() as start:
        yield start
