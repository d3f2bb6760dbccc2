"""Large blocks stay with the process that freed them."""

import subprocess
import sys

from apex.learning import setup

FAULTS = """
import resource, sys
from apex.learning.setup import keep_freed_memory
import numpy as np
if sys.argv[1] == "keep":
    keep_freed_memory()
np.ones(2**26, np.uint8)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    np.ones(2**26, np.uint8)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def count_faults(mode):
    """Page faults while 64 MB are allocated and freed 20 times."""
    done = subprocess.run([sys.executable, "-c", FAULTS, mode], capture_output=True, text=True, timeout=60, check=True)
    return int(done.stdout)


def test_the_kernel_does_not_clear_a_freed_block_again():
    assert count_faults("keep") * 10 < count_faults("leave")


def test_another_c_library_is_left_unchanged(monkeypatch):
    monkeypatch.setattr(setup.ctypes, "CDLL", lambda _: object())
    setup.keep_freed_memory()
