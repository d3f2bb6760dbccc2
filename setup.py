"""The one part that is compiled; everything else stands in pyproject.toml."""

from setuptools import Extension, setup

# Plain C without Python.h, loaded by apex/blocks.py, which does without where there is no compiler.
setup(ext_modules=[Extension("apex._decompress", ["apex/decompress.c"], extra_compile_args=["-O3"], optional=True)])
