"""Sockets that are not read survive the death of their peers, with and without keys."""

import json

import pytest

from chaos import deaths


@pytest.mark.programs
def test_every_socket_survives_the_death_of_peers_while_it_is_not_read(capsys):
    assert deaths.main(["--deaths", "30", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == {
        "deaths_of_each": 30,
        "exit_status": {name + keys: 0 for name in deaths.KINDS for keys in ("", "_with_keys")},
    }
