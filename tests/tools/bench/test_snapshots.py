"""`python -m bench snapshots`: latencies of inserts into a server of tables, and the parts of a snapshot."""

import json

import pytest
from support.benches import start

from apexreplay.process.lifecycle import Stop
from bench.harness.command import VerificationError
from bench.insert_latency import measure_inserts


@pytest.mark.programs
def test_a_short_run_has_every_figure_and_leaves_nothing_behind(tmp_path):
    bench = start(tmp_path, "snapshots", "--transitions", "20000", "--seconds", "8", "--json")
    try:
        output, errors = bench.communicate(timeout=180)
    finally:
        bench.kill()
    assert bench.returncode == 0, errors
    figures = json.loads(output.splitlines()[-1])
    for label in ("_without", ""):
        p50, p999, longest = (figures[f"insert_{name}_ms{label}"] for name in ("p50", "p999", "longest"))
        assert 0 < p50 <= p999 <= longest
    assert figures["insert_p999_ms_more"] == figures["insert_p999_ms"] - figures["insert_p999_ms_without"]
    assert figures["restored_transitions"] == 20_000
    assert list(tmp_path.iterdir()) == []


@pytest.mark.programs
def test_a_measurement_without_a_snapshot_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("bench.insert_latency.LATER", 10_000.0)
    with pytest.raises(VerificationError) as caught:
        measure_inserts(tmp_path, Stop(), num_items=500, seconds=0.1)
    assert "--seconds" in str(caught.value)
