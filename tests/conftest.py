"""Which tests may run beside which, in several processes (`pytest -n 2 --dist loadgroup`, as ./test.sh has it).

A file's tests stay together. Files marked `xdist_group("host")` start replay servers or whole runs. They share the
host's ports and its memory files, of which a start removes what dead runs left; so they run in turn, and first.
"""

import pytest


def group_of(item):
    marker = item.get_closest_marker("xdist_group")
    return marker.args[0] if marker else item.path.name


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: group_of(item) != "host")
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(group_of(item)))
