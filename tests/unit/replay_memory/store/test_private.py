"""Files of the replay memory belong to one user: another user's are neither read nor written."""

import os

import pytest
from support.store_builders import SCHEMA, attach, create

from apex.errors import ForeignFileError
from apex.replay_memory.sampler_counters import SamplerCounters
from apex.replay_memory.store.location import counters_path
from apex.replay_memory.store.reader import StoreReader


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "apex-1-0.replay"
    create(path).close()
    return path


def give_away(path):
    os.chown(path, 65534, 65534)


def open_to_others(path):
    path.chmod(0o640)


def replace_by_a_link(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
CHANGES = [pytest.param(give_away, marks=needs_root), open_to_others, replace_by_a_link]


@pytest.mark.parametrize("change", CHANGES)
def test_memory_file_accessible_to_others_is_refused(path, change):
    change(path)
    with pytest.raises(ForeignFileError, match=r"apex-1-0\.replay"):
        StoreReader(path, SCHEMA)
    with pytest.raises(ForeignFileError):
        attach(path)


@pytest.mark.parametrize("change", CHANGES)
def test_counters_file_accessible_to_others_is_refused(path, change):
    SamplerCounters(1, counters_path(path))
    change(counters_path(path))
    with pytest.raises(ForeignFileError):
        SamplerCounters(1, counters_path(path))
