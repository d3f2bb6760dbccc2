"""`python -m tests.mutants` makes one error at a time, and describes it."""

import ast

from tests.mutants.__main__ import ROOT, draw, files_for
from tests.mutants.mutations import find, mutate

SOURCE = '''
"""A module."""
import logging
log = logging.getLogger("apex")

def area(width: int = 3, *, checks: bool = True) -> float:
    """Of a square, at 1."""
    if checks and width <= 0:
        log.warning("width %d", 5)
        raise ValueError(f"width {width + 1}")
    return width * 2
'''


def test_each_mutation_makes_exactly_the_named_error():
    mutations = find("area.py", SOURCE)
    texts = [mutate(SOURCE, mutation.index) for mutation in mutations]
    assert len({*texts, ast.unparse(ast.parse(SOURCE))}) == len(mutations) + 1
    for mutation, text in zip(mutations, texts, strict=True):
        if mutation.kind != "statement removed":
            assert mutation.after.removesuffix(":") in text, mutation.sentence()


def test_mutations_are_found_in_code_but_not_in_types_logs_or_messages():
    changes = {(mutation.before, mutation.after) for mutation in find("area.py", SOURCE)}
    assert changes == {
        ("3", "4"),
        ("True", "False"),
        ("if checks and width <= 0:", "if not (checks and width <= 0):"),
        ("checks and width <= 0", "checks or width <= 0"),
        ("width <= 0", "width < 0"),
        ("0", "1"),
        ("raise ValueError(f'width {width + 1}')", "pass"),
        ("width * 2", "width + 2"),
        ("2", "3"),
    }


def test_a_seed_draws_the_same_errors_and_each_module_has_tests():
    assert draw(3, 20) == draw(3, 20) != draw(4, 20)
    for mutation in draw(3, 20):
        files = files_for(mutation.module)
        assert files
        assert all((ROOT / file).exists() for file in files)
