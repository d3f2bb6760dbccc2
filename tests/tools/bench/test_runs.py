"""`python -m bench learner`, `system`, `connections`: real programs, every figure by its name, books that balance."""

from __future__ import annotations

import json
import os
import time

import pytest
import torch
from support.benches import start

from apex.errors import FAILED
from apex.learning.setup import choose_device
from apex.runtime.lifecycle import Stop
from bench import connections, learner, system
from bench.__main__ import main
from bench.connections import Sent
from bench.harness.command import GAME, read_config
from bench.harness.segment_ledger import Balance

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


class Cuda:
    """As CUDA is: who has begun with it forks no child that can."""

    def __init__(self):
        self.begun_in = 0

    def is_available(self):
        if self.begun_in not in (0, os.getpid()):
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
        self.begun_in = os.getpid()
        return True


def test_no_process_of_the_learners_benchmark_begins_with_cuda_before_it_forks_another_that_does(tmp_path, monkeypatch):
    cuda = Cuda()
    monkeypatch.setattr(torch.cuda, "is_available", cuda.is_available)

    def time_on_device(config, schema, seconds, stop):
        return 1.0 + (choose_device(config.learner).type == "cuda") + 0 * cuda.is_available()

    def time_fed(config, schema, folder, seconds, stop):
        return time_on_device(config, schema, seconds, stop), 0.0

    monkeypatch.setattr(learner, "time_plain", time_on_device)
    monkeypatch.setattr(learner, "time_resident", time_on_device)
    monkeypatch.setattr(learner, "_time_fed", time_fed)
    config = read_config(["--preset", "cartpole"], "python -m bench learner")
    figures = learner.measure(config, tmp_path, 1.0, Stop())
    assert (figures["learner_updates_per_s"], figures["cuda"]) == (2.0, 1.0)
    assert cuda.begun_in == os.getpid()  # The last rate is this process's own.


def test_one_that_is_asked_to_stop_says_no_figure(tmp_path, monkeypatch):
    stop = Stop()
    monkeypatch.setattr(learner, "time_plain", lambda config, schema, seconds, stop: time.sleep(60))
    config = read_config(["--preset", "cartpole", "--device", "cpu"], "python -m bench learner")
    stop.request()
    with pytest.raises(KeyboardInterrupt):
        learner.measure(config, tmp_path, 1.0, stop)


@pytest.mark.parametrize(
    ("arguments", "game"),
    [
        ([], GAME),
        (["--environment.frame-skip", "2"], GAME),
        (["--env", "CartPole-v1"], "CartPole-v1"),
        (["--env=CartPole-v1"], "CartPole-v1"),
        (["--environment.id", "CartPole-v1"], "CartPole-v1"),
        (["--preset", "cartpole"], "CartPole-v1"),
    ],
)
def test_the_benchmarks_game_is_another_only_where_one_is_named(arguments, game):
    config = read_config([*arguments, "--device", "cpu"], "python -m bench")
    assert config.environment.id == game
    assert game != GAME or (config.network.width, config.learner.batch_size) == (1.0, 512)  # The bars are for these.


def test_a_system_without_its_parts_measures_itself_alone(monkeypatch, capsys):
    monkeypatch.setattr(system, "_time_run", lambda config, folder, seconds, stop: (900.0, 6.0))
    assert main(["system", "--seconds", "3", "--no-alone", *TINY]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["system_steps_per_s"] == 900
    assert "system_actor_share" not in figures


def test_a_system_is_measured_beside_what_its_parts_give_alone(monkeypatch, capsys):
    """What the parts really give, `bench/gpu.sh --rehearse` measures."""
    told = []

    def part(figures):
        return lambda config, folder, seconds, stop: told.append((folder.name, folder.is_dir(), seconds)) or figures

    monkeypatch.setattr(system.actor, "measure", part({"actor_steps_per_s": 500.0}))
    monkeypatch.setattr(system.learner, "measure", part({"learner_resident_updates_per_s": 8.0}))

    def time_run(config, folder, seconds, stop):
        told.append("system")
        return 900.0, 6.0

    monkeypatch.setattr(system, "_time_run", time_run)
    arguments = ["--seconds", "3", "--actor.num-processes", "2", "--learner.batch-size", "64"]
    assert main(["system", *arguments, *TINY]) == 0
    # The learner's comes last: it may begin with CUDA, and keep the GPU's memory.
    assert told == ["system", ("actor", True, 1.5), ("learner", True, 1.5)]
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["system_actor_share"] == 0.9
    assert figures["system_learner_share"] == 0.75
    assert figures["system_samples_per_s"] == 6 * 64
    assert figures["actor_steps_per_s"] == 500


def test_the_books_of_four_connections_balance(tmp_path):
    figures = figures_of(tmp_path, "connections", "--connections", "4", "--minutes", "0.05")
    assert figures["connections"] == 4
    assert figures["connections_transitions_per_s"] > 0
    assert figures["connections_lost"] == figures["connections_twice"] == figures["connections_pending"] == 0
    assert 0 < figures["connections_fairness"] <= 1
    assert figures["connections_memory_bytes"] > 1e6


class Games:
    """A recording of three pieces."""

    pieces = range(3)

    def records_of(self, piece):
        return range([10, 20, 30][piece])


class Books:
    """A ledger that says what it is told to."""

    num_transitions = 160

    def __init__(self, *balance):
        self._balance = Balance(*balance)

    def balance(self, sent):
        assert sorted(size for _, size in sent) == [10, 10, 20, 20, 30, 30, 30]
        return self._balance


@pytest.mark.parametrize(
    ("lost", "twice", "pending", "status"), [(0, 0, 0, 0), (7, 0, 0, FAILED), (5, 5, 0, FAILED), (0, 0, 1, FAILED)]
)
def test_books_that_do_not_balance_are_a_failure(monkeypatch, capsys, lost, twice, pending, status):
    answers = [Sent([2, 1], [2, 2], pending, 2), Sent([0], [3], 0, 1)]  # 30 + 10, 20 + 30 and 10 + 20 + 30

    def measure(*arguments):
        return connections._account(answers, Games(), Books(lost, twice), [2e6] * 9 + [3e6], 10.0)

    monkeypatch.setattr(connections, "measure", measure)
    assert main(["connections", *TINY]) == status
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (figures["connections_lost"], figures["connections_twice"]) == (lost, twice)
    assert figures["connections_pending"] == pending
    assert figures["connections_resent"] == 3
    assert figures["connections_fairness"] == pytest.approx(40 / 60)
    assert figures["connections_transitions_per_s"] == 16
    assert figures["connections_memory_growth"] == 0.5


def test_memory_is_that_of_the_first_and_last_minute_and_in_a_short_run_of_tenths():
    assert connections.compare_ends([1.0] * 60 + [9.0] * 60 + [2.0] * 60) == (1.0, 2.0)
    assert connections.compare_ends([1.0] * 60 + [2.0] * 60) == (1.0, 2.0)
    assert connections.compare_ends([9.0, 1.0, *[5.0] * 7, 2.0]) == (1.0, 2.0)
    assert connections.compare_ends([3.0]) == (3.0, 3.0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["actor", "--seconds", "0"], "--seconds: must be a number above 0, got 0.0"),
        (["learner", "--seconds", "-1"], "--seconds: must be a number above 0, got -1.0"),
        (
            ["repaly"],
            "known: actor, compare, connections, curve, device, engines, learner, learning, leases, replay, system",
        ),
        (["replay", "--transitions", "5"], "--transitions: must be an integer of at least 512"),
        (["replay", "--samplers", "0"], "--samplers: must be an integer from 1 to 64"),
        (["replay", "--seconds", "0"], "--seconds: must be a number above 0"),
        (["replay", "--leaves", "1"], "--leaves: must be an integer of at least 512"),
        (["replay", "--frames", "0"], "--frames: must be an integer of at least 1"),
        (["replay", "--peer", "nowhere/python"], "nowhere/python"),
        (["learner", "--batch-sice", "64"], "--batch-sice"),
        (["system", "--seconds", "nan"], "--seconds: must be a number above 0, got nan"),
        (["system", "--preset", "tetris"], "tetris"),
        (["connections", "--connections", "1"], "--connections: must be an integer from 2 to 4096, got 1"),
        (["connections", "--connections", "4097"], "--connections: must be an integer from 2 to 4096, got 4097"),
        (["connections", "--minutes", "0"], "--minutes: must be a number above 0, got 0.0"),
    ],
)
def test_a_mistake_is_a_sentence_and_status_2(arguments, words, capsys):
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert words in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""
