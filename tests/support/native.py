"""Tests of the compiled loops, which not every machine has."""

import pytest

from apex.algorithms.kernels.convolution import load_convolution


def skip_without_convolution():
    """Skips the calling test or module if the native convolution is missing."""
    if load_convolution() is None:
        pytest.skip("installed without a C compiler, or the processor has no AVX2", allow_module_level=True)
