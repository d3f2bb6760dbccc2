"""Loads the native convolution, convolution.c, if it was built and this CPU supports it. Does not import torch."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from apex.runtime.native import NativeError, NativeStatus, open_native

INTERFACE = 3  # must equal `apex_interface` of convolution.c
KERNEL, STRIDE = 8, 4  # of the first layer; convolution.c supports no others
PACKED_CHANNELS = 4  # channels that `interleave` supports
LANES = 8  # output channels that convolution.c computes at once

log = logging.getLogger("apex")


class Convolution(NamedTuple):
    """The functions of convolution.c."""

    convolve: Callable[..., Any]
    weight_gradient: Callable[..., Any]
    layer: Callable[..., Any]
    layer_weight_gradient: Callable[..., Any]
    layer_input_gradient: Callable[..., Any]
    interleave: Callable[..., Any]


def describe_convolution() -> NativeStatus:
    """Returns whether the native convolution can be used, and if not, why."""
    native = find_convolution()
    return (
        NativeStatus(native.problem, str(native))
        if isinstance(native, NativeError)
        else NativeStatus("", "convolution")
    )


@cache
def load_convolution() -> Convolution | None:
    """Returns the native convolution, or None after logging the reason once.

    Reasons are: it was not built, it belongs to another version, or the CPU does not support it.
    """
    native = find_convolution()
    if isinstance(native, Convolution):
        return native
    log.warning("No native convolution (%s): PyTorch's convolution is used", native)
    return None


def native_convolution() -> Convolution:
    """Returns the native convolution. Call this only if `load_convolution` has found it."""
    native = load_convolution()
    assert native is not None
    return native


def find_convolution(interface: int = INTERFACE) -> Convolution | NativeError:
    """Returns the native convolution, or the reason why it is missing and how much slower updates are."""
    costs = "an update of a small network takes up to 2.4 times as long"  # docs/adr/0019
    try:
        library = open_native(Path(__file__).parent, "convolution", interface)
    except OSError as error:
        return NativeError("build", f"{error}, so {costs}")
    if not library.apex_convolution_works():
        return NativeError("cpu", f"the CPU lacks AVX2 or FMA, so {costs}")
    functions = (
        library.apex_convolve,
        library.apex_convolve_weight_gradient,
        library.apex_layer,
        library.apex_layer_weight_gradient,
        library.apex_layer_input_gradient,
        library.apex_interleave,
    )
    for function, num_pointers in zip(functions, (6, 5, 5, 4, 5, 3), strict=True):
        function.argtypes = [ctypes.c_void_p] * num_pointers
        function.restype = None
    return Convolution(*functions)
