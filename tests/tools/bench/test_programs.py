"""Rates come right out of bursts; programs run where they should, say why they ended, and leave nothing."""

from __future__ import annotations

import os
import signal

import pytest
from support.builders import VECTORS

from apex.config import Config, RunConfig
from apex.errors import ChildDiedError
from apex.replay_memory.store.location import store_path
from apex.runs.folder import RunFolder
from apex.runtime.lifecycle import Stop
from bench.harness import programs as programs_module
from bench.harness.programs import measure_rates, open_programs


class Bursts:
    """A clock that only moves by sleeping, and a counter that grows by `size` every `period` seconds, over 5 ms."""

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
def test_a_rate_is_that_of_whole_bursts(monkeypatch, period):
    bursts = Bursts(800, period)
    monkeypatch.setattr(programs_module, "time", bursts)
    rates = measure_rates(bursts.count, 20.0, 5, lambda: None)
    assert rates == pytest.approx([800 / period] * 5, rel=0.03)


@pytest.mark.parametrize(("period", "lasts"), [(0.006, 4.0), (0.4, 4.0), (1.0, 6.0), (1.8, 11.0)])
def test_a_measurement_lasts_as_long_as_asked_for_or_until_it_has_enough_bursts(monkeypatch, period, lasts):
    bursts = Bursts(800, period)
    monkeypatch.setattr(programs_module, "time", bursts)
    assert measure_rates(bursts.count, 4.0, 5, lambda: None) == pytest.approx([800 / period] * 5, rel=0.03)
    assert bursts.now - 100.0 == pytest.approx(lasts, abs=period)


@pytest.mark.parametrize("period", [3.0, 100.0, 1000.0])
def test_too_few_bursts_are_no_figure(monkeypatch, period):
    bursts = Bursts(800, period)
    monkeypatch.setattr(programs_module, "time", bursts)
    with pytest.raises(ChildDiedError, match=r"only [0-4] bursts in 12 s, .*take more seconds"):
        measure_rates(bursts.count, 4.0, 5, lambda: None)
    assert bursts.now - 100.0 == pytest.approx(12.0, abs=0.01)


def test_who_has_ended_is_named_with_its_last_line(tmp_path):
    with open_programs(tmp_path, Stop()) as programs:
        programs.start("actor", ["actor", "--learner", "nowhere:0:0"])
        with pytest.raises(ChildDiedError, match=r"the actor ended with status 2 and said: .*--learner"):
            programs.wait_for(lambda: False, "miracle")


def test_programs_keep_to_their_cores_and_are_gone_at_the_end(tmp_path):
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


def test_what_does_not_end_is_killed(tmp_path, monkeypatch):
    deaf = tmp_path / "deaf"
    deaf.write_text("#!/bin/sh\ntrap '' TERM\necho here\nwhile :; do sleep 0.05; done\n")
    deaf.chmod(0o700)
    monkeypatch.setattr(programs_module, "END_SECONDS", 0.1)
    monkeypatch.setattr(programs_module.sys, "executable", str(deaf))
    with open_programs(tmp_path, Stop()) as programs:
        process = programs.start("deaf", [])
        programs.wait_for(lambda: "here" in (tmp_path / "deaf.log").read_text(), "word")
        programs.end(process)
    assert process.returncode == -signal.SIGKILL
