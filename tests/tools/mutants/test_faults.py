"""Each row of docs/faults.md has an error that can be made, and the command says which tests notice theirs."""

import pytest

from tests.mutants.faults import ERRORS, TABLE, FaultError, Row, examine, find_flaws, read_errors, read_rows

SOURCE = "def area(width):\n    if width < 0:\n        raise ValueError\n    return width * width\n"
TESTS = """
import shape_area, pytest
def test_area(): assert shape_area.area(3) == 9
def test_zero(): assert shape_area.area(0) == 0
def test_gone(): pytest.skip("no machine")
"""
ROWS = [Row("Shapes: area", ["test_area.py::test_area", "test_area.py::test_zero"])]
ERROR = FaultError("Shapes: area", "shape_area.py", "width * width", "width + width", "test_area.py::test_area")


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "shape_area.py").write_text(SOURCE)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_area.py").write_text(TESTS)
    return tmp_path


def test_every_row_of_the_fault_table_has_an_error_that_can_be_made():
    assert list(find_flaws(read_rows(TABLE.read_text()), read_errors(ERRORS.read_text()))) == []


@pytest.mark.parametrize(
    ("errors", "shown"),
    [
        ([], "no error"),
        ([ERROR, ERROR], "two errors"),
        ([ERROR, ERROR._replace(fault="Shapes: length")], "no such row"),
        ([ERROR._replace(test="test_area.py::test_volume")], "test_volume"),
        ([ERROR._replace(file="volume.py")], "0 times"),
        ([ERROR._replace(before="width")], "4 times"),
        ([ERROR._replace(before="")], "times"),
        ([ERROR._replace(after="width * width")], "nothing"),
        ([ERROR._replace(after="width *")], "not Python"),
    ],
)
def test_an_error_that_cannot_be_made_is_named_with_its_row(tree, errors, shown):
    (flaw,) = find_flaws(ROWS, errors, tree)
    assert "Shapes: " in flaw
    assert shown in flaw


def test_a_fault_error_is_noticed_survives_or_cannot_be_judged(tree):
    verdicts = {
        name: examine(tree, ERROR._replace(test=f"test_area.py::test_{name}"))
        for name in ("area", "zero", "gone", "nothing")
    }
    assert verdicts == {"area": "noticed", "zero": "SURVIVED", "gone": "skipped", "nothing": "BROKEN"}
    assert (tree / "shape_area.py").read_text() == SOURCE
    assert examine(tree, ERROR, sound=True) == "SURVIVED"


def test_the_table_is_read_with_its_sections():
    table = "## Shapes\n| fault | what happens | test |\n|---|---|---|\n| area | - | `a.py::test_b`, `c.py::test_d` |"
    assert read_rows(table) == [Row("Shapes: area", ["a.py::test_b", "c.py::test_d"])]
