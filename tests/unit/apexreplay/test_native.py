"""A compiled library is used only if it was built from the source beside it."""

import hashlib
import shutil
import subprocess

import pytest

from apexreplay.native import open_native

SOURCE = """#include <stdint.h>
const int64_t apex_interface = 1;
#ifdef APEX_SOURCE
const char apex_source[65] = APEX_SOURCE;
#endif
"""


@pytest.fixture
def folder(tmp_path):
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    (tmp_path / "loop.c").write_text(SOURCE)
    return tmp_path


def build(folder, *, knows_source=True):
    digest = hashlib.sha256((folder / "loop.c").read_bytes()).hexdigest()
    macros = [f'-DAPEX_SOURCE="{digest}"'] if knows_source else []
    command = ["cc", "-shared", "-fPIC", *macros, "-o", folder / "_loop.so", folder / "loop.c"]
    subprocess.run(command, check=True, timeout=60)


def open_loop(folder):
    return open_native(folder, "loop", 1, [".so"])


def test_a_library_of_this_source_is_opened(folder):
    build(folder)
    assert open_loop(folder)


def test_a_library_of_an_older_source_is_refused(folder):
    build(folder)
    (folder / "loop.c").write_text(SOURCE + "/* A bug is fixed. */\n")
    with pytest.raises(OSError, match=r"_loop\.so.*\bloop\.c\b"):
        open_loop(folder)


def test_a_library_without_its_source_is_refused_beside_a_source(folder):
    build(folder, knows_source=False)
    with pytest.raises(OSError, match=r"_loop\.so.*\bloop\.c\b"):
        open_loop(folder)


def test_a_library_without_a_source_file_is_opened(folder):
    build(folder)
    (folder / "loop.c").unlink()
    assert open_loop(folder)
