"""Counts the messages of `apex/` that tests pin: `.venv/bin/python -m tests.tools.pinned [ROOT] [--list]`.

A message is a string or f-string in `apex/`, other than a docstring, with at least four words in a row between
placeholders. A test pins a message if one of its strings repeats four of these words in a row: then a change of the
wording breaks the test. `tests/golden/` may repeat every message. Docstrings do not count.
"""

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

RUN = 4  # words
BREAK = " | "  # replaces a placeholder or a part of a regular expression that is not literal
NOT_LITERAL = re.compile(r"\\[dDwWsSbB][*+?]?|(?:\.|\[[^\]]*\]|\([^)]*\))[*+?](?!\w)|\{[^{}]*\}|%[-+.\d]*[sdrfgx]")
WORD = re.compile(r"[^\W_](?:[\w.'/-]*\w)?|\|")

Phrase = tuple[str, ...]


class Message(NamedTuple):
    """One string of the product, and the test files that repeat four of its words in a row."""

    path: Path
    line: int
    text: str
    pinned_by: tuple[Path, ...]


def strings_of(source: str) -> Iterator[tuple[int, str]]:
    """Yields line and text of each string and f-string that is not a docstring, with BREAK for each placeholder."""
    tree = ast.parse(source)
    skipped = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # Docstrings are expressions.
    for node in ast.walk(tree):  # An f-string comes before its parts.
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else BREAK for part in node.values]
            skipped.update(id(part) for part in node.values)
            yield node.lineno, "".join(str(part) for part in parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node.lineno, node.value


def phrases_of(text: str) -> set[Phrase]:
    """Returns all runs of four words, without case, punctuation and the escapes of regular expressions."""
    literal = NOT_LITERAL.sub(BREAK, text).replace("\\", "")
    words = WORD.findall(literal.lower())
    runs = (tuple(words[i : i + RUN]) for i in range(len(words) - RUN + 1))
    return {run for run in runs if "|" not in run}


def find_messages(root: Path) -> list[Message]:
    """Returns all messages of `root`/apex, in the order of files and lines."""
    pinned: dict[Phrase, set[Path]] = {}
    for path in sorted([*root.glob("tests/**/*.py"), *root.glob("deploy/tests/**/*.py")]):
        name = path.relative_to(root)
        if not name.is_relative_to("tests/golden"):
            for _, text in strings_of(path.read_text()):
                for phrase in phrases_of(text):
                    pinned.setdefault(phrase, set()).add(name)
    messages = []
    for path in sorted(root.glob("apex/**/*.py")):
        for line, text in sorted(strings_of(path.read_text())):
            if phrases := phrases_of(text):
                by = sorted(set[Path]().union(*(pinned.get(phrase, ()) for phrase in phrases)))
                messages.append(Message(path.relative_to(root), line, text, tuple(by)))
    return messages


def main() -> None:
    """Prints the number and the share of pinned messages."""
    parser = argparse.ArgumentParser(description="Counts the messages of apex/ that tests pin.")
    parser.add_argument("root", nargs="?", type=Path, default=Path(), help="the checkout; default: this folder")
    parser.add_argument("--list", action="store_true", help="print each pinned message and the files that pin it")
    options = parser.parse_args()
    messages = find_messages(options.root)
    pinned = [message for message in messages if message.pinned_by]
    if options.list:
        for path, line, text, pinned_by in pinned:
            print(f"{path}:{line}: {' '.join(text.split())}\n    {', '.join(map(str, pinned_by))}")
    share = len(pinned) / max(len(messages), 1)
    print(f"{len(messages)} messages, {len(pinned)} of them pinned by tests ({share:.1%})")


if __name__ == "__main__":
    main()
