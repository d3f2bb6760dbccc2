"""What a learner's process is set up with."""

from __future__ import annotations

import pytest
import torch

from apex.config import LearnerConfig
from apex.learning.setup import prepare_torch


@pytest.fixture
def settings(monkeypatch):
    """What is said to torch; nothing of it outlives the test."""
    said = []
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    for module, name in (
        (torch, "set_float32_matmul_precision"),
        (torch, "set_num_threads"),
        (torch.cuda, "Stream"),
        (torch.cuda, "set_stream"),
    ):
        monkeypatch.setattr(module, name, lambda value, name=name: said.append((name, value)))
    return said


def test_on_a_gpu_products_of_float32_are_tf32_and_cudnn_measures_its_algorithms(settings):
    prepare_torch(LearnerConfig(), torch.device("cuda"))
    assert ("set_float32_matmul_precision", "high") in settings
    assert torch.backends.cudnn.benchmark
    assert [name for name, _ in settings][-2:] == ["Stream", "set_stream"]


def test_on_a_processor_neither_is_touched(settings):
    prepare_torch(LearnerConfig(num_threads=2), torch.device("cpu"))
    assert settings == [("set_num_threads", 2)]
    assert not torch.backends.cudnn.benchmark
