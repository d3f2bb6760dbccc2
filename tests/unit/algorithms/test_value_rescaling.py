"""Claims about `apex.algorithms.value_rescaling`: h by its definition, its inverse, and its precision."""

import numpy as np
import pytest
import torch

from apex.algorithms.value_rescaling import EPSILON, rescale, restore

VALUES = [0.0, 1e-6, 1e-3, 0.5, 1.0, 37.0, 1e4, 1e6]


def naive(x):
    return np.sign(x) * (np.sqrt(abs(x) + 1) - 1) + EPSILON * x


def test_h_by_hand():
    assert rescale(np.array([3.0, -8.0, 0.0])) == pytest.approx([1 + 0.003, -2 - 0.008, 0.0])


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("value", VALUES)
def test_h_and_its_inverse_in_float32(value, sign):
    x = torch.tensor([sign * value], dtype=torch.float32)
    assert rescale(x).dtype is torch.float32
    assert rescale(x).item() == pytest.approx(float(naive(np.float64(sign * value))), rel=1e-5)
    assert restore(rescale(x)).item() == pytest.approx(sign * value, rel=1e-5)


def test_arrays_and_tensors_agree():
    x = np.linspace(-50, 50, 11)
    assert np.allclose(rescale(x), rescale(torch.from_numpy(x)).numpy(), rtol=1e-12)
    assert np.allclose(restore(x), restore(torch.from_numpy(x)).numpy(), rtol=1e-12)
    assert np.allclose(restore(rescale(x)), x, rtol=1e-12)
