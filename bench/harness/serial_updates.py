"""Prints the updates per second of a run in one process, as one JSON object: `serial_updates.py UPDATES OPTIONS...`.

`bench compare` executes this file in the checkouts of both sides. It uses only the command line and the curves of
`apex train`, because an older commit may lack this file and has other modules.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# With so many samples per insert, nearly all of the time goes into updates.
SETTINGS = """
seed = 1
[replay]
min_size_to_sample = 1_000
samples_per_insert = 256.0
[evaluator]
enabled = false
[checkpoint]
period = 1_000_000_000
[run]
single_process = true
tensorboard = false
name = "serial"
max_updates = {updates}
folder = {folder}
"""


def main(updates: int, options: Sequence[str]) -> None:
    """Trains for `updates` updates with these options of `apex train`."""
    with tempfile.TemporaryDirectory(prefix="apex-bench-") as folder:
        settings = Path(folder) / "settings.toml"
        settings.write_text(SETTINGS.format(updates=updates, folder=json.dumps(folder)))
        command = [sys.executable, "-m", "apex", "train", "--config", str(settings), *options]
        subprocess.run(command, check=True, stdout=sys.stderr)
        curves = Path(folder) / "serial" / "curves"
        first = next(_rows(curves / "replay.jsonl"))  # The replay memory is large enough, and updates begin.
        *_, last = _rows(curves / "learner.jsonl")
    rate = last["scalars"]["learner/updates"] / (last["time"] - first["time"])
    print(json.dumps({"serial_updates_per_s": float(f"{rate:.6g}")}))


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    return (json.loads(line) for line in path.read_text().splitlines())


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
