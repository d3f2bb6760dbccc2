"""The compiled part of the replay library; everything else is in pyproject.toml."""

from hashlib import sha256
from pathlib import Path

from setuptools import Extension, setup

# Plain C without Python.h, loaded by native.py. Without a compiler, cramjam decompresses the frames.
NAME, SOURCE = "apexreplay.frames._decompress", "frames/decompress.c"

if __name__ == "__main__":
    macros = [("APEX_SOURCE", f'"{sha256(Path(SOURCE).read_bytes()).hexdigest()}"')]
    setup(ext_modules=[Extension(NAME, [SOURCE], define_macros=macros, extra_compile_args=["-O3"], optional=True)])
