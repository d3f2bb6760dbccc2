"""The compiled parts; everything else stands in pyproject.toml."""

from setuptools import Extension, setup

# Plain C without Python.h, loaded by apex/runtime/native.py; apex does without where there is no compiler.
EXTENSIONS = {
    "apex.dqn.kernels._convolution": "apex/dqn/kernels/convolution.c",
    "apex.replay_memory.frames._decompress": "apex/replay_memory/frames/decompress.c",
}

setup(
    ext_modules=[
        Extension(name, [source], extra_compile_args=["-O3"], optional=True) for name, source in EXTENSIONS.items()
    ]
)
