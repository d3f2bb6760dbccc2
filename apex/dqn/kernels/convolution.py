"""convolution.c: whether it was built, whether it fits this processor, and its functions. Without torch."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from apex.runtime.native import open_native

INTERFACE = 2  # `apex_interface` of convolution.c
KERNEL, STRIDE = 8, 4  # of the first layer, that it knows
LANES = 8  # it computes so many output channels at once

log = logging.getLogger("apex")


class Convolution(NamedTuple):
    """The functions of convolution.c."""

    convolve: Callable[..., Any]
    weight_gradient: Callable[..., Any]
    layer: Callable[..., Any]
    layer_weight_gradient: Callable[..., Any]
    layer_input_gradient: Callable[..., Any]


def describe_convolution() -> str:
    """Whether the native loop is in use, for people."""
    native = find_convolution()
    return "convolution" if isinstance(native, Convolution) else f"none: {native}"


@cache
def load_convolution() -> Convolution | None:
    """None where it was not built, or is another version's, or the processor is not made for it: it is logged once."""
    native = find_convolution()
    if isinstance(native, Convolution):
        return native
    log.warning("pixels are convolved by torch: %s", native)
    return None


def native_convolution() -> Convolution:
    """The native loop, where `load_convolution` has found it."""
    native = load_convolution()
    assert native is not None
    return native


def find_convolution(interface: int = INTERFACE) -> Convolution | str:
    """The native loop, or why there is none and what that costs."""
    costs = "an update of a small network takes up to 2.4 times as long"  # docs/adr/0019
    try:
        library = open_native(Path(__file__).parent, "convolution", interface)
    except OSError as error:
        return f"{error}; {costs}"
    if not library.apex_convolution_works():
        return f"the processor has no AVX2 and FMA; {costs}"
    functions = (
        library.apex_convolve,
        library.apex_convolve_weight_gradient,
        library.apex_layer,
        library.apex_layer_weight_gradient,
        library.apex_layer_input_gradient,
    )
    for function, num_pointers in zip(functions, (6, 5, 5, 4, 5), strict=True):
        function.argtypes = [ctypes.c_void_p] * num_pointers
        function.restype = None
    return Convolution(*functions)
