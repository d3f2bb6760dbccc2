"""A sanitized library ends the program at its first invalid access; without a compiler, the command says so."""

import subprocess
import sys

import pytest

from apexreplay.errors import REFUSED, UsageError
from tests.tools import sanitize

SOURCE = """
#include <stdint.h>
#include <stdlib.h>
char *bytes;
void allocate(void) { bytes = calloc(8, 1); }
int32_t read_at(int64_t place) { return bytes[place]; }
int32_t shift(int32_t places) { return 1 << places; }
"""
CALL = (
    "import ctypes, sys; library = ctypes.CDLL(sys.argv[1]); library.allocate(); print(eval('library.' + sys.argv[2]))"
)


@pytest.mark.parametrize(
    ("call", "error"),
    [("read_at(7)", ""), ("read_at(8)", "heap-buffer-overflow"), ("shift(2)", ""), ("shift(40)", "shift exponent")],
)
def test_an_invalid_access_or_operation_ends_the_program(tmp_path, call, error):
    try:
        compiler, libraries = sanitize.find_compiler()
    except UsageError as missing:
        pytest.skip(str(missing))
    (tmp_path / "loop.c").write_text(SOURCE)
    sanitize.build(compiler, tmp_path / "loop.c", tmp_path / "loop.so")
    command = [sys.executable, "-c", CALL, str(tmp_path / "loop.so"), call]
    ended = subprocess.run(command, env=sanitize.environment(libraries), capture_output=True, text=True, timeout=300)
    assert error in ended.stderr
    assert (ended.returncode == 0) == (not error), ended.stderr


def test_a_missing_compiler_is_refused_with_a_remedy(monkeypatch, capsys):
    monkeypatch.setattr(sanitize, "COMPILERS", ("no-such-compiler",))
    with pytest.raises(UsageError, match="no-such-compiler") as error:
        sanitize.find_compiler(sanitize.COMPILERS)
    assert error.value.remedy
    assert sanitize.main([]) == REFUSED
    assert "no-such-compiler" in capsys.readouterr().err
