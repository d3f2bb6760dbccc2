"""`apex status` without an answer says what to check."""

from apex.launch import status
from apexreplay.errors import NEIGHBOUR_GONE


def test_a_host_name_that_cannot_be_resolved_is_named(capsys):
    assert status.main(["--learner", "nohost.invalid:22003", "--timeout", "0.1"]) == NEIGHBOUR_GONE
    assert "'nohost.invalid' cannot be resolved" in capsys.readouterr().err


def test_a_silent_address_is_named(capsys):
    assert status.main(["--learner", "127.0.0.1:1", "--timeout", "0.1"]) == NEIGHBOUR_GONE
    assert "tcp://127.0.0.1:1 within 0.1 s; check the address" in capsys.readouterr().err
