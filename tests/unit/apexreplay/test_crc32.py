"""The checksum is the CRC-32 of zlib, with the fast library and without it."""

import runpy
import sys
import zlib

import numpy as np
import pytest

from apexreplay import crc32


@pytest.fixture(params=["zlib_ng.zlib_ng", "zlib"])
def function(request, monkeypatch):
    """The function of the module when it is imported with the fast library, or without it."""
    if request.param == "zlib":
        monkeypatch.setitem(sys.modules, "zlib_ng.zlib_ng", None)
    else:
        pytest.importorskip("zlib_ng")
    found = runpy.run_path(crc32.__file__)["crc32"]
    assert found.__module__ == request.param
    return found


def test_values_are_those_of_zlib_for_any_bytes_and_start_value(function):
    rng = np.random.default_rng(0)
    memory = rng.bytes(300_000)
    lengths = [*range(70), 4_095, 4_096, 65_537, *rng.integers(0, 200_000, 300).tolist()]
    assert function(b"") == zlib.crc32(b"")
    for length in lengths:
        first, start = int(rng.integers(0, 100_000)), int(rng.integers(0, 2**32))
        part = memory[first : first + length]
        for data in (part, bytearray(part), memoryview(memory)[first : first + length], np.frombuffer(part, np.uint8)):
            assert function(data) == zlib.crc32(part)
            assert function(data, start) == zlib.crc32(part, start)
            assert function(data[length // 2 :], function(data[: length // 2], start)) == zlib.crc32(part, start)
