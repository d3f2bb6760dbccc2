"""`python -m tests.tools.sanitize`: runs the tests of the C loops with address and undefined-behaviour sanitizers.

Builds each loop with them in a copy of the tree, and runs the tests that call the loops there, also those with the fuzz
corpus. The first invalid access, overflow or misaligned pointer ends the tests.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from apexreplay.errors import UsageError
from apexreplay.process.lifecycle import reports_errors
from tests.mutants.__main__ import copy_tree

COMPILERS = ("gcc", "clang")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
FLAGS = ("-shared", "-fPIC", "-g", "-O1", *SANITIZERS)
LIBRARIES = {"gcc": "libasan.so", "clang": "libclang_rt.asan-x86_64.so"}  # must be loaded before Python
EXCEPTIONS = "libstdc++.so.6"  # Loaded later, as by torch, its exceptions would abort the process.
LOOPS = ("apex/algorithms/kernels/convolution.c", "apexreplay/frames/decompress.c")
TESTS = ("unit/algorithms/kernels", "unit/dqn/manual_backward", "unit/apexreplay/frames", "fuzz")
# Python itself leaks, and libraries that the sanitizer was not built into define symbols twice.
OPTIONS = "detect_leaks=0:detect_odr_violation=0:abort_on_error=1:verify_asan_link_order=0"


def find_compiler(names: Sequence[str] = COMPILERS) -> tuple[str, str]:
    """Returns a compiler that has the sanitizers, and the libraries to preload; raises UsageError if there is none."""
    for name in names:
        if shutil.which(name) is not None:
            question = [name, f"-print-file-name={LIBRARIES.get(name, 'libasan.so')}"]
            library = Path(subprocess.run(question, capture_output=True, text=True).stdout.strip())
            if library.is_absolute() and library.exists():
                return name, f"{library.resolve()} {EXCEPTIONS}"
    problem = f"no compiler with sanitizers: none of {', '.join(names)} is installed with libasan"
    raise UsageError(problem, "install gcc and its libasan, or clang and compiler-rt")


def build(compiler: str, source: Path, target: Path) -> None:
    """Builds a library with the sanitizers; raises UsageError if the compiler fails."""
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    command = [compiler, *FLAGS, f'-DAPEX_SOURCE="{digest}"', str(source), "-o", str(target)]
    if subprocess.run(command).returncode:
        raise UsageError(f"{compiler} cannot build {source} with {SANITIZERS[0]}", "see the compiler's message")


def environment(libraries: str) -> dict[str, str]:
    """Returns the environment in which a Python program can load sanitized libraries."""
    return {**os.environ, "LD_PRELOAD": libraries, "ASAN_OPTIONS": OPTIONS, "UBSAN_OPTIONS": "print_stacktrace=1"}


@reports_errors("python -m tests.tools.sanitize")
def main(argv: Sequence[str] | None = None) -> int:
    """Returns pytest's exit status, or 2 if no compiler has the sanitizers."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.sanitize", description=__doc__)
    parser.add_argument("--compiler", choices=COMPILERS, help="default: the first that has the sanitizers")
    parser.add_argument("tests", nargs="*", default=TESTS, help=f"below tests/; default: {' '.join(TESTS)}")
    options = parser.parse_args(argv)
    compiler, libraries = find_compiler([options.compiler] if options.compiler else COMPILERS)
    with tempfile.TemporaryDirectory(prefix="sanitize-") as folder:
        tree = copy_tree(Path(folder) / "tree")
        for name in LOOPS:
            source = tree / name
            build(compiler, source, source.with_name(f"_{source.stem}{EXTENSION_SUFFIXES[0]}"))
        tests = [f"tests/{name}" for name in options.tests]
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout", "1800", *tests]
        settings = {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        print(f"{compiler}, {libraries}: {' '.join(tests)}", flush=True)
        return subprocess.run(command, cwd=tree, env={**environment(libraries), **settings}).returncode


if __name__ == "__main__":
    sys.exit(main())
