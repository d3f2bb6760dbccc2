"""Loads the native convolution, convolution.c, if it was built and this CPU supports it. Does not import torch."""

import ctypes
import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from apexreplay.native import NativeError, open_native

INTERFACE = 3  # must equal `apex_interface` of convolution.c
KERNEL, STRIDE = 8, 4  # of the first layer; convolution.c supports no others
PACKED_CHANNELS = 4  # channels that `interleave` supports
LANES = 8  # output channels that convolution.c computes at once

# Each function of convolution.c and the number of its arguments, all of which are pointers.
NUM_POINTERS = {"convolve": 6, "convolve_weight_gradient": 5, "layer": 5, "layer_weight_gradient": 4}
NUM_POINTERS |= {"layer_input_gradient": 5, "interleave": 3}

log = logging.getLogger("apex")


@cache
def load_convolution() -> ctypes.CDLL | None:
    """Returns the native convolution, or None after logging the reason once."""
    try:
        return find_convolution()
    except NativeError as error:
        log.warning("No native convolution (%s): PyTorch's convolution is used", error)
        return None


def find_convolution(interface: int = INTERFACE) -> ctypes.CDLL:
    """Returns the native convolution; raises NativeError with the reason, and with how much slower updates are."""
    costs = "an update of a small network takes up to 2.4 times as long"  # docs/adr/0019
    try:
        library = open_native(Path(__file__).parent, "convolution", interface)
    except OSError as error:
        raise NativeError("build", f"{error}, so {costs}") from error
    if not library.apex_convolution_works():
        raise NativeError("cpu", f"the CPU lacks AVX2 or FMA, so {costs}")
    for name, num_pointers in NUM_POINTERS.items():
        function = getattr(library, f"apex_{name}")
        function.argtypes = [ctypes.c_void_p] * num_pointers
        function.restype = None
    return library


def call(name: str, shape: Sequence[int], *tensors: Any) -> None:
    """Calls a function of convolution.c with its struct of int64 numbers, and the addresses of contiguous tensors.

    `load_convolution` must have found the library.
    """
    function = getattr(load_convolution(), f"apex_{name}")
    function((ctypes.c_int64 * len(shape))(*shape), *(tensor.data_ptr() for tensor in tensors))
