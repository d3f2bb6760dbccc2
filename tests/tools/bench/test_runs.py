"""`python -m bench learner`, `system` and `connections`: figures and refusals."""

import json
import os

import pytest
import torch
from support.benches import start

from apex.learning.setup import choose_device
from apexreplay.errors import FAILED
from apexreplay.process.lifecycle import Stop
from bench import connections, learner, system
from bench.__main__ import main
from bench.connections import Sent
from bench.harness.command import GAME, read_config
from bench.harness.segment_ledger import Balance

TINY = ["--preset", "cartpole", "--device", "cpu", "--json"]


def figures_of(tmp_path, *arguments):
    """Returns the figures in the last line of the output."""
    process = start(tmp_path, *arguments, *TINY)
    try:
        output, errors = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    assert list(tmp_path.glob("apex-*")) == []
    return json.loads(output.splitlines()[-1])


class Cuda:
    """Like CUDA, it cannot be used in a child that was forked after its first use."""

    def __init__(self):
        self.begun_in = 0

    def is_available(self):
        if self.begun_in not in (0, os.getpid()):
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
        self.begun_in = os.getpid()
        return True


def test_the_learner_benchmark_uses_cuda_only_after_its_last_fork(tmp_path, monkeypatch):
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
    assert cuda.begun_in == os.getpid()  # This process measures the last rate.


@pytest.mark.parametrize(
    ("arguments", "game"),
    [
        ([], GAME),
        (["--env", "CartPole-v1"], "CartPole-v1"),
        (["--env=CartPole-v1"], "CartPole-v1"),
        (["--preset", "cartpole"], "CartPole-v1"),
    ],
)
def test_the_default_game_is_replaced_only_if_one_is_named(arguments, game):
    config = read_config([*arguments, "--device", "cpu"], "python -m bench")
    assert config.environment.id == game
    assert game != GAME or (config.network.width, config.learner.batch_size) == (1.0, 512)  # The bars assume these.


def test_a_system_is_compared_with_its_parts_alone(monkeypatch, capsys):
    """The real parts are measured by `bench/gpu.sh --rehearse`, which has a test of its own."""
    measured = []

    def part(figures):
        return lambda config, folder, seconds, stop: measured.append((folder.name, folder.is_dir(), seconds)) or figures

    monkeypatch.setattr(system.actor, "measure", part({"actor_steps_per_s": 500.0}))
    monkeypatch.setattr(system.learner, "measure", part({"learner_resident_updates_per_s": 8.0}))

    def time_run(config, folder, seconds, stop):
        measured.append("system")
        return 900.0, 6.0

    monkeypatch.setattr(system, "_time_run", time_run)
    arguments = ["--seconds", "3", "--actor.num-processes", "2", "--learner.batch-size", "64"]
    assert main(["system", *arguments, *TINY]) == 0
    # The learner is measured last, because it keeps GPU memory.
    assert measured == ["system", ("actor", True, 1.5), ("learner", True, 1.5)]
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["system_actor_share"] == 0.9
    assert figures["system_learner_share"] == 0.75
    assert figures["system_samples_per_s"] == 6 * 64
    assert figures["actor_steps_per_s"] == 500
    assert main(["system", "--no-alone", *TINY]) == 0
    assert "system_actor_share" not in json.loads(capsys.readouterr().out.splitlines()[-1])


def test_four_connections_lose_and_double_nothing(tmp_path):
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
    """A ledger with a given balance."""

    num_transitions = 160

    def __init__(self, *balance):
        self._balance = Balance(*balance)

    def balance(self, sent):
        assert sorted(size for _, size in sent) == [10, 10, 20, 20, 30, 30, 30]
        return self._balance


@pytest.mark.parametrize(
    ("lost", "twice", "pending", "status"), [(0, 0, 0, 0), (7, 0, 0, FAILED), (5, 5, 0, FAILED), (0, 0, 1, FAILED)]
)
def test_lost_doubled_or_pending_segments_are_a_failure(monkeypatch, capsys, lost, twice, pending, status):
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


def test_memory_growth_compares_the_first_and_the_last_minute():
    assert connections.compare_ends([1.0] * 60 + [9.0] * 60 + [2.0] * 60) == (1.0, 2.0)
    assert connections.compare_ends([1.0] * 60 + [2.0] * 60) == (1.0, 2.0)
    assert connections.compare_ends([9.0, 1.0, *[5.0] * 7, 2.0]) == (1.0, 2.0)
    assert connections.compare_ends([3.0]) == (3.0, 3.0)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["repaly"], ["repaly", "replay", "system"]),
        (["actor", "--seconds", "0"], ["--seconds", "0.0"]),
        (["replay", "--transitions", "5"], ["--transitions", "512", "5"]),
        (["replay", "--peer", "nowhere/python"], ["nowhere/python"]),
        (["learner", "--batch-sice", "64"], ["--batch-sice"]),
        (["system", "--preset", "tetris"], ["tetris"]),
        (["connections", "--connections", "4097"], ["--connections", "4096", "4097"]),
    ],
)
def test_a_mistake_is_refused_in_one_line_with_its_name_and_value(arguments, parts, capsys):
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert all(part in output.err for part in parts)
    assert output.err.count("\n") == 1
    assert output.out == ""
