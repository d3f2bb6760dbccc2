"""`apex bench learner`, `system`, `connections`: real programs, every figure by its name, books that balance."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from test_bench import start

from apex import bench_connections
from apex.bench import main
from apex.bench_connections import Sent
from apex.lifecycle import FAILED

TINY = ["--preset", "cartpole", "--device", "cpu", "--json"]


def figures_of(tmp_path, *arguments):
    """What the last line says."""
    process = start(tmp_path, *arguments, *TINY)
    try:
        said, complained = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 0, complained
    assert list(tmp_path.glob("apex-*")) == []
    return json.loads(said.splitlines()[-1])


def test_a_system_is_measured_beside_what_its_parts_give_alone(tmp_path):
    figures = figures_of(tmp_path, "system", "--seconds", "3", "--alone")
    for name in ("actor_steps_per_s", "learner_updates_per_s", "learner_plain_updates_per_s", "part_environment_us"):
        assert figures[name] > 0
    samples = figures["system_updates_per_s"] * figures["batch_size"]
    assert figures["system_samples_per_s"] == pytest.approx(samples, rel=1e-3)
    alone = figures["actor_steps_per_s"]  # of one process; how many the run had is the machine's choice
    processes = figures["system_steps_per_s"] / alone / figures["system_actor_share"]
    assert processes == pytest.approx(round(processes), rel=1e-3)
    fed = figures["learner_updates_per_s"]
    assert figures["learner_gain"] == pytest.approx(fed / figures["learner_plain_updates_per_s"], rel=1e-3)
    assert figures["learner_fed_share"] == pytest.approx(fed / figures["learner_resident_updates_per_s"], rel=1e-3)
    assert 0 <= figures["learner_wait_share"] <= 1
    assert figures["system_learner_share"] == pytest.approx(
        figures["system_updates_per_s"] / figures["learner_resident_updates_per_s"], rel=1e-3
    )


def test_the_books_of_four_connections_balance(tmp_path):
    figures = figures_of(tmp_path, "connections", "--connections", "4", "--minutes", "0.05")
    assert figures["connections"] == 4
    assert figures["connections_transitions_per_s"] > 0
    assert figures["connections_lost"] == figures["connections_twice"] == figures["connections_pending"] == 0
    assert 0 < figures["connections_fairness"] <= 1
    assert figures["connections_memory_bytes"] > 1e6


@pytest.mark.parametrize(
    ("stored", "pending", "lost", "twice", "status"),
    [(100, 0, 0, 0, 0), (93, 0, 7, 0, FAILED), (105, 0, 0, 5, FAILED), (100, 1, 0, 0, FAILED)],
)
def test_books_that_do_not_balance_are_a_failure(monkeypatch, capsys, stored, pending, lost, twice, status):
    answers = [Sent([40, 30], pending, 2), Sent([30], 0, 1)]

    def measure(*arguments):
        return bench_connections._account(answers, SimpleNamespace(num_inserted=stored), [2e6] * 9 + [3e6], 10.0)

    monkeypatch.setattr(bench_connections, "measure", measure)
    assert main(["connections", *TINY]) == status
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (figures["connections_lost"], figures["connections_twice"]) == (lost, twice)
    assert figures["connections_pending"] == pending
    assert figures["connections_resent"] == 3
    assert figures["connections_fairness"] == 0.75
    assert figures["connections_memory_growth"] == 0.5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["actor", "--seconds", "0"], "--seconds must be > 0, got 0.0"),
        (["learner", "--seconds", "-1"], "--seconds must be > 0, got -1.0"),
        (["learner", "--batch-sice", "64"], "--batch-sice"),
        (["system", "--seconds", "nan"], "--seconds must be > 0, got nan"),
        (["system", "--preset", "tetris"], "tetris"),
        (["connections", "--connections", "1"], "--connections must be 2 ... 4096, got 1"),
        (["connections", "--connections", "4097"], "--connections must be 2 ... 4096, got 4097"),
        (["connections", "--minutes", "0"], "--minutes must be > 0, got 0.0"),
    ],
)
def test_a_mistake_is_a_sentence_and_status_2(arguments, words, capsys):
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert words in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""
