"""The rates of counters that grow in bursts, and the programs of a benchmark."""

import os

import pytest
from support.builders import VECTORS

from apex.config import Config, RunConfig
from apex.runs.folder import RunFolder
from apexreplay.errors import ChildDiedError
from apexreplay.process.lifecycle import Stop
from apexreplay.store.location import store_path
from bench.harness import programs as programs_module
from bench.harness.programs import measure_rates, open_programs


class Bursts:
    """A clock that advances only by sleeping, and a counter that grows by `size` within 5 ms every `period` seconds."""

    def __init__(self, size, period):
        self.size, self.period, self.now = size, period, 100.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds

    def count(self):
        whole, rest = divmod(self.now, self.period)
        return int(self.size * (whole + min(1.0, rest / 0.005)))


@pytest.mark.parametrize("period", [0.006, 0.03, 0.06, 0.4, 1.3])
def test_a_rate_is_measured_over_whole_bursts(monkeypatch, period):
    bursts = Bursts(800, period)
    monkeypatch.setattr(programs_module, "time", bursts)
    rates = measure_rates(bursts.count, 20.0, 5, lambda: None)
    assert rates == pytest.approx([800 / period] * 5, rel=0.03)


@pytest.mark.parametrize(("period", "lasts"), [(0.006, 4.0), (0.4, 4.0), (1.0, 6.0), (1.8, 11.0)])
def test_a_measurement_lasts_until_it_has_enough_bursts(monkeypatch, period, lasts):
    bursts = Bursts(800, period)
    monkeypatch.setattr(programs_module, "time", bursts)
    assert measure_rates(bursts.count, 4.0, 5, lambda: None) == pytest.approx([800 / period] * 5, rel=0.03)
    assert bursts.now - 100.0 == pytest.approx(lasts, abs=period)


@pytest.mark.parametrize("period", [3.0, 1000.0])
def test_too_few_bursts_are_refused(monkeypatch, period):
    bursts = Bursts(800, period)
    monkeypatch.setattr(programs_module, "time", bursts)
    with pytest.raises(ChildDiedError, match=r"[0-4] bursts in 12 s"):
        measure_rates(bursts.count, 4.0, 5, lambda: None)
    assert bursts.now - 100.0 == pytest.approx(12.0, abs=0.01)


def test_programs_run_on_their_cores_and_are_stopped_at_the_end(tmp_path):
    core = max(os.sched_getaffinity(0))
    run = RunFolder.create(Config(run=RunConfig(folder=str(tmp_path), name="one")), VECTORS, argv=[])
    memory = store_path(run.run_id)
    stop = Stop()
    with open_programs(tmp_path, stop) as programs:
        process = programs.start("replay", ["replay", "--learner", "127.0.0.1:1"], {core})
        memory.touch()
        log = tmp_path / "replay.log"
        programs.wait_for(log.exists, "log")
        assert os.sched_getaffinity(process.pid) == {core}
        stop.request()
        with pytest.raises(KeyboardInterrupt):
            programs.check()
    assert process.poll() is not None
    assert not memory.exists()
