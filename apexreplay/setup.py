"""The compiled part of the replay library; everything else is in pyproject.toml."""

from hashlib import sha256
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

# Plain C without Python.h, loaded by native.py. Without a compiler, cramjam decompresses the frames.
NAME, SOURCE = "apexreplay.frames._decompress", "frames/decompress.c"


class Library(build_ext):
    """Names the library without an interpreter, because every Python can load it."""

    def get_ext_filename(self, fullname):
        return f"{fullname.replace('.', '/')}.so"


class Wheel(bdist_wheel):
    """Tags the wheel for every Python 3 on this platform."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


if __name__ == "__main__":
    macros = [("APEX_SOURCE", f'"{sha256(Path(SOURCE).read_bytes()).hexdigest()}"')]
    setup(
        ext_modules=[Extension(NAME, [SOURCE], define_macros=macros, extra_compile_args=["-O3"], optional=True)],
        cmdclass={"build_ext": Library, "bdist_wheel": Wheel},
    )
