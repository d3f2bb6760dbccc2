"""The text of Prometheus that `apexreplay status` prints."""

import re

from apexreplay.cli import prometheus

REPLAY = {
    "size": 3,
    "num_inserted": 123_456_789_012,
    "busy_share": 0.25,
    "inserts_wait": True,
    "waiting": None,
    "store_incarnation": "7",
    "refusals": {"crc": 2},
}


def test_the_text_of_prometheus_has_exact_numbers_of_each_table():
    table = {"capacity": 10, "writers": 1, "samplers": 0}
    status = {"tables": {"a": {**table, "replay": REPLAY}, "b": {**table, "replay": None}}}
    lines = prometheus(status)
    numbers = {}
    for line in lines:
        if line.startswith("# TYPE "):
            current = line.split()[2]
            assert line.endswith(" gauge")
            continue
        name, declared, value = re.fullmatch(r'(\w+)\{table="(\w+)"\} (\S+)', line).groups()
        assert name == current  # All lines of a name follow its type.
        numbers[name.removeprefix("apexreplay_"), declared] = float(value)
    assert len([line for line in lines if line.startswith("#")]) == len({name for name, _ in numbers}) == 7
    assert numbers["num_inserted", "a"] == 123_456_789_012
    assert numbers["busy_share", "a"] == 0.25
    assert numbers["inserts_wait", "a"] == 1
    assert numbers["capacity", "b"] == 10
    assert ("size", "b") not in numbers
