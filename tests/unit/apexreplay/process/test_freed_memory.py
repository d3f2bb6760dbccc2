"""Large blocks stay with the process that freed them, also in samplers and loaders."""

import subprocess
import sys

import pytest

from apex.learning import loader
from apexreplay.process import freed_memory
from apexreplay.server import sampler

FAULTS = """
import resource, sys
from apexreplay.process.freed_memory import keep_freed_memory
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
    monkeypatch.setattr(freed_memory.ctypes, "CDLL", lambda _: object())
    freed_memory.keep_freed_memory()


class KeptError(Exception):
    """Ends a program when it keeps freed memory."""


@pytest.mark.parametrize(
    ("module", "run"),
    [
        (sampler, lambda: sampler.run_sampler(None, 0, None, None, None)),
        (loader, lambda: loader.run_loader(None, 0, None)),
    ],
)
def test_samplers_and_loaders_keep_freed_memory_before_all_else(module, run, monkeypatch):
    def keep():
        raise KeptError

    monkeypatch.setattr(module, "keep_freed_memory", keep)
    with pytest.raises(KeptError):
        run()
