"""The compiled parts; everything else stands in pyproject.toml."""

from hashlib import sha256
from pathlib import Path

from setuptools import Extension, setup

# Plain C without Python.h, loaded by apex/runtime/native.py; apex does without where there is no compiler.
EXTENSIONS = {
    "apex.dqn.kernels._convolution": "apex/dqn/kernels/convolution.c",
    "apex.replay_memory.frames._decompress": "apex/replay_memory/frames/decompress.c",
}


def extension(name: str, source: str) -> Extension:
    """One library, which knows the source that it was built from."""
    digest = sha256(Path(source).read_bytes()).hexdigest()
    macros = [("APEX_SOURCE", f'"{digest}"')]
    return Extension(name, [source], define_macros=macros, extra_compile_args=["-O3"], optional=True)


setup(ext_modules=[extension(name, source) for name, source in EXTENSIONS.items()])
