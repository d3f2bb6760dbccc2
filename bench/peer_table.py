"""`python -m bench peers`: rewrites the table of replay buffers in docs/performance.md from the committed record."""

import json
from collections.abc import Sequence
from pathlib import Path

from apex.config.arguments import Parser
from apexreplay.errors import FINISHED
from apexreplay.files.atomic_files import replace_file
from bench.harness.replay_peers import render_table
from bench.harness.results import replace_between

ROOT = Path(__file__).parents[1]
RECORD = "results/cpu-replay-peers.json"  # in docs
BEGIN, END = "<!-- replay peers -->", "<!-- end of replay peers -->"


def main(argv: Sequence[str]) -> int:
    """Rewrites the document; returns the exit status."""
    Parser(prog="python -m bench peers", description="Makes the table of replay buffers.").parse_args(argv)
    document = ROOT / "docs/performance.md"
    replace_file(document, rebuild(document).encode())
    return FINISHED


def rebuild(document: Path) -> str:
    """Returns the new text of the document, which has a place for the table."""
    record = json.loads((document.parent / RECORD).read_text())
    figures, machine = record["figures"], record["hardware"]
    facts = [
        f"{figures['memory_transitions']:,.0f} transitions",
        record["ended"][:10],
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB",
        f"load average before {figures['load_average']:.1f}",
        f"commit {record['commit'][:10]}{', changed' * bool(record['dirty'])}",
    ]
    lines = [*render_table(figures), "", f"{'; '.join(facts)}: [record]({RECORD})."]
    return replace_between(document, BEGIN, END, "\n".join(lines))
