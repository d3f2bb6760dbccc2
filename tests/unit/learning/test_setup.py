"""The settings of torch in a learner's process, and the random generators of its updates."""

import random
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from apex.config import Config, LearnerConfig
from apex.learning.setup import prepare_torch, restore_trainer
from apex.runs.checkpoints.folder import Found
from apex.types import Progress, RunTime


@pytest.fixture
def settings(monkeypatch):
    """Calls of torch's settings, which do nothing."""
    calls = []
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    for module, name in (
        (torch, "set_float32_matmul_precision"),
        (torch, "set_num_threads"),
        (torch.cuda, "Stream"),
        (torch.cuda, "set_stream"),
    ):
        monkeypatch.setattr(module, name, lambda value, name=name: calls.append((name, value)))
    return calls


def test_a_gpu_uses_tf32_and_measured_algorithms(settings):
    prepare_torch(LearnerConfig(), torch.device("cuda"))
    assert ("set_float32_matmul_precision", "high") in settings
    assert torch.backends.cudnn.benchmark
    assert [name for name, _ in settings][-2:] == ["Stream", "set_stream"]


def test_a_processor_keeps_the_settings_of_torch(settings):
    prepare_torch(LearnerConfig(num_threads=2), torch.device("cpu"))
    assert settings == [("set_num_threads", 2)]
    assert not torch.backends.cudnn.benchmark


def test_each_thread_of_torch_flushes_denormal_numbers():
    def share_of_zeros():
        prepare_torch(LearnerConfig(num_threads=2), torch.device("cpu"))
        torch.full((1 << 20,), 1.0).add_(1)  # Threads that did not run yet would inherit the mode that is set below.
        torch.set_flush_denormal(True)
        return float((torch.full((1 << 20,), 1e-30).mul_(1e-9) == 0).float().mean())

    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(1) as new_thread:  # The new thread starts its own threads for torch's operations.
            assert new_thread.submit(share_of_zeros).result() == 1.0
    finally:
        torch.set_num_threads(before)


@pytest.fixture
def generators():
    """Restores the global generators."""
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    yield
    for restore, state in zip((torch.set_rng_state, random.setstate, np.random.set_state), before, strict=True):
        restore(state)


def test_progress_is_the_later_of_checkpoint_and_run_time(tmp_path, generators):
    def progress(saved, taken):
        folder = SimpleNamespace(config=Config(), run_time=RunTime(*taken), checkpoints=tmp_path)
        state = SimpleNamespace(_asdict=dict, progress=Progress(7, 3, *saved), num_updates=1)
        trainer = SimpleNamespace(num_updates=1, restore=lambda saved: None)
        return restore_trainer(folder, trainer, Found(None, state, [], [], []))

    assert progress((60.0, 20.0), (90.0, 30.0)) == Progress(7, 3, 90.0, 30.0)
    assert progress((60.0, 20.0), (0.0, 0.0)) == Progress(7, 3, 60.0, 20.0)  # The file of the run time is lost.


def test_the_noise_of_updates_depends_on_the_seed_and_on_the_update(tmp_path, generators):
    def draws(seed, num_updates):
        folder = SimpleNamespace(config=Config(seed=seed), run_time=RunTime(), checkpoints=tmp_path)
        trainer = SimpleNamespace(num_updates=0)
        trainer.restore = lambda saved: setattr(trainer, "num_updates", num_updates)
        state = SimpleNamespace(_asdict=dict, progress=Progress(), num_updates=num_updates)
        restore_trainer(folder, trainer, Found(None, state if num_updates else None, [], [], []))
        return torch.rand(1).item(), random.random(), np.random.random()

    first, *others = draws(1, 0), draws(2, 0), draws(1, 500), draws(2, 500)
    assert draws(1, 0) == first
    assert len({value for each in (first, *others) for value in each}) == 12
