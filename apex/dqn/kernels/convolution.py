"""Loads the native convolution, convolution.c, if it was built and this CPU supports it. Does not import torch."""

import ctypes
import logging
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

from apex.runtime.native import NativeError, open_native

INTERFACE = 3  # must equal `apex_interface` of convolution.c
KERNEL, STRIDE = 8, 4  # of the first layer; convolution.c supports no others
PACKED_CHANNELS = 4  # channels that `interleave` supports
LANES = 8  # output channels that convolution.c computes at once

log = logging.getLogger("apex")


class Convolution(NamedTuple):
    """The functions of convolution.c."""

    convolve: Callable[..., Any]
    convolve_weight_gradient: Callable[..., Any]
    layer: Callable[..., Any]
    layer_weight_gradient: Callable[..., Any]
    layer_input_gradient: Callable[..., Any]
    interleave: Callable[..., Any]


NUM_POINTERS = (6, 5, 5, 4, 5, 3)  # number of arguments of each function, all of which are pointers


@cache
def load_convolution() -> Convolution | None:
    """Returns the native convolution, or None after logging the reason once."""
    try:
        return find_convolution()
    except NativeError as error:
        log.warning("No native convolution (%s): PyTorch's convolution is used", error)
        return None


# The same, without None. Call this only if `load_convolution` has found the native convolution.
native_convolution = cast(Callable[[], Convolution], load_convolution)


def find_convolution(interface: int = INTERFACE) -> Convolution:
    """Returns the native convolution; raises NativeError with the reason, and with how much slower updates are."""
    costs = "an update of a small network takes up to 2.4 times as long"  # docs/adr/0019
    try:
        library = open_native(Path(__file__).parent, "convolution", interface)
    except OSError as error:
        raise NativeError("build", f"{error}, so {costs}") from error
    if not library.apex_convolution_works():
        raise NativeError("cpu", f"the CPU lacks AVX2 or FMA, so {costs}")
    functions = [getattr(library, f"apex_{name}") for name in Convolution._fields]
    for function, num_pointers in zip(functions, NUM_POINTERS, strict=True):
        function.argtypes = [ctypes.c_void_p] * num_pointers
        function.restype = None
    return Convolution(*functions)


def call(function: Callable[..., Any], shape: Sequence[int], *tensors: Any) -> None:
    """Calls a function of `Convolution` with its struct of int64 numbers, and the addresses of contiguous tensors."""
    function((ctypes.c_int64 * len(shape))(*shape), *(tensor.data_ptr() for tensor in tensors))
