"""The compiled part of the trainer; everything else is in pyproject.toml."""

from hashlib import sha256
from pathlib import Path

from setuptools import Extension, setup

# Plain C without Python.h, loaded by apexreplay/native.py. Without a compiler, torch computes the convolutions.
NAME, SOURCE = "apex.algorithms.kernels._convolution", "apex/algorithms/kernels/convolution.c"

macros = [("APEX_SOURCE", f'"{sha256(Path(SOURCE).read_bytes()).hexdigest()}"')]
setup(ext_modules=[Extension(NAME, [SOURCE], define_macros=macros, extra_compile_args=["-O3"], optional=True)])
