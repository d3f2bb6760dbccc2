"""`kill -9` of a server of tables, of its writers and samplers loses nothing and stores nothing twice.

`python -m tests.library_kills` kills 300 times for each kind of table.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from apexreplay.store.location import memory_folder

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["steps", "dictionary", "windows"])
def test_kills_of_a_server_of_tables_and_its_clients_lose_nothing(kind):
    command = [sys.executable, "-m", "tests.library_kills", "--kills", "7", "--kind", kind, "--seed", "4"]
    before = set(memory_folder().iterdir())
    ended = subprocess.run(command, capture_output=True, text=True, timeout=540, cwd=ROOT)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for program in ("server", "writer", "sampler"):
        assert re.search(rf"[1-9] of {program}", ended.stdout)
    assert not set(memory_folder().iterdir()) - before
