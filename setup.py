"""The parts that are compiled; everything else stands in pyproject.toml."""

from setuptools import Extension, setup

# Plain C without Python.h, loaded by apex/native.py; apex does without where there is no compiler.
setup(
    ext_modules=[
        Extension(f"apex._{name}", [f"apex/{name}.c"], extra_compile_args=["-O3"], optional=True)
        for name in ("decompress", "convolution")
    ]
)
