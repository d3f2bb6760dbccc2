"""The page "A replay server in five minutes" runs as it stands: its files are written, its commands run in one shell.

Only addresses change: the server takes a free port, and the address of another host becomes one of loopback.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

from apexreplay.server.table_settings import read_tables
from apexreplay.serving import serve

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/tutorials/replay-server.md").read_text()
FILE = re.compile(r"^`(\w+\.\w+)`:\n\n```\w+\n(.*?)```", re.DOTALL | re.MULTILINE)
COMMANDS = re.compile(r"(?<!-->\n)^```bash\n(.*?)```", re.DOTALL | re.MULTILINE)
PORT = 21_700  # below the ports that `serve` takes
HERE, THERE = '"10.0.0.5"', f'"127.0.0.2", {PORT}'
SHIM = """#!/bin/sh
case "$1" in serve | status) set -- "$@" --port {port} ;; esac
exec {python} -P -m apexreplay "$@"
"""


def test_the_first_example_has_at_most_ten_lines():
    first = FILE.findall(PAGE)[0]
    assert first[0] == "five_minutes.py"
    assert len([line for line in first[1].splitlines() if line]) <= 10


def test_the_page_of_the_replay_server_runs(tmp_path):
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in FILE.findall(PAGE):
        text = text.replace("Client()", f"Client(port={PORT})").replace(HERE, THERE)
        (tmp_path / name).write_text(text)
    for name, text in (("apexreplay", SHIM), ("python", '#!/bin/sh\nexec {python} "$@"\n')):
        (programs / name).write_text(text.format(port=PORT, python=sys.executable))
        (programs / name).chmod(0o755)
    script = "set -e\ntrap 'kill $! 2>&1 || true' EXIT\n" + "".join(COMMANDS.findall(PAGE)).replace(
        "10.0.0.5", "127.0.0.2"
    )
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    shown = subprocess.run(
        ["bash", "-c", script.replace("&& wait", "&& wait $!")],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert 'apexreplay_capacity{table="steps"} 50000' in shown.stdout
    with serve(read_tables(tmp_path / "steps.toml"), snapshots=tmp_path / "saved") as server, server.client() as client:
        replay = client.status().tables["steps"].replay
        assert replay is not None
        assert replay.size == 2_000  # 1,000 survived `kill -9`; the others came with a key.
