"""Large blocks come back to the process that freed them."""

from __future__ import annotations

import subprocess
import sys

from apex.runtime import malloc

FAULTS = """
import resource, sys
from apex.runtime.malloc import keep_freed_memory
import numpy as np
if sys.argv[1] == "keep":
    assert keep_freed_memory()
np.ones(2**26, np.uint8)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    np.ones(2**26, np.uint8)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def count_faults(mode):
    """Page faults of making and freeing 64 MB, 20 times."""
    done = subprocess.run([sys.executable, "-c", FAULTS, mode], capture_output=True, text=True, timeout=60, check=True)
    return int(done.stdout)


def test_a_freed_block_is_not_cleared_by_the_kernel_again():
    assert count_faults("keep") * 10 < count_faults("leave")


def test_another_c_library_is_left_as_it_is(monkeypatch):
    monkeypatch.setattr(malloc.ctypes, "CDLL", lambda _: object())
    assert not malloc.keep_freed_memory()
