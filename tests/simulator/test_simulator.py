"""The protocol keeps its promises in simulated histories, and the simulator notices rules that are broken.

`python -m tests.simulator --seeds 20000` runs longer.
"""

from collections import Counter
from itertools import chain

import pytest

from tests.simulator.faults import FAULTS, FAULTS_OF_A_RUN, FAULTS_OF_TABLES
from tests.simulator.history import KINDS, describe, simulate
from tests.simulator.plants import PLANTS

# Coverage would double the time; the unit tests measure it. Each test takes seconds of CPU, long on a busy machine.
pytestmark = [pytest.mark.no_cover, pytest.mark.timeout(600)]

PART = 100
PARTS = range(0, 300, PART)
# Seeds in which a fault is noticed, tried before all others, because a search takes up to 34 s of CPU time.
NOTICED = {"fence_is_not_written": [107], "damage_is_not_looked_for": [53], "manifests_precede_their_files": [62]}
HAPPENS = (  # in each part
    "acknowledged", "stored", "evicted", "drawn", "attached", "restored", "created", "snapshots",
    "a server crashed during an insert", "a server lost its memory", "a snapshot process crashed", "a disk was full",
    "tmpfs was full", "a server was refused", "a host was refused",
    "a window met a new store", "batches of samplers", "given by a queue", "a writer has lost its lease", *KINDS,
)  # fmt: skip


@pytest.mark.parametrize("first", PARTS)
def test_promises_are_kept_in_simulated_histories(first):
    counts = Counter()
    for seed in range(first, first + PART):
        result = simulate(seed)
        assert not result.failure, describe(result)
        counts += result.counts
    faults = {kind.__name__ for kind in FAULTS | FAULTS_OF_A_RUN | FAULTS_OF_TABLES}
    assert {*HAPPENS, *faults} - set(counts) == set()


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_noticed(plant, monkeypatch):
    plant(monkeypatch)
    seeds = chain(NOTICED.get(plant.__name__, []), range(300))
    failure = next(filter(None, (simulate(seed).failure for seed in seeds)))
    assert "Traceback" not in failure  # A promise was broken; the plant is no mistake of its own.


def test_a_seed_repeats_its_history():
    assert simulate(7) == simulate(7)
