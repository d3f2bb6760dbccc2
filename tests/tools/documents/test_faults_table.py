"""Every test that docs/faults.md names exists."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[2]
TABLE = TESTS.parent / "docs" / "faults.md"
NAME = re.compile(r"`([\w/]+\.py)::(\w+)`")


def named():
    return NAME.findall(TABLE.read_text(encoding="utf-8"))


def names_in(path):
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, kinds)}


def test_every_test_of_the_table_exists():
    files = {file for file, _ in named()}
    there = {file: names_in(TESTS / file) if (TESTS / file).exists() else set() for file in files}
    assert [f"{file}::{name}" for file, name in named() if name not in there[file]] == []


def test_every_row_of_the_table_names_a_test():
    rows = [line for line in TABLE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    bare = [row for row in rows if not NAME.search(row) and row != "| fault | what happens | test |"]
    assert len(rows) > 50
    assert bare == []
