"""Small errors in a module: finds them, and returns the module's text with one of them."""

import ast
import copy
from collections.abc import Iterator
from typing import NamedTuple

COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.Pow: ast.Mult,
}  # fmt: skip
REMOVABLE = (ast.Expr, ast.AugAssign, ast.Raise, ast.Delete, ast.Continue, ast.Break)
TYPES_ONLY = ("TypeVar", "NewType")  # calls that no test can notice


class Mutation(NamedTuple):
    """One error; `index` is its number in the module, in the order of `find`."""

    module: str
    line: int
    kind: str
    before: str
    after: str
    index: int

    def sentence(self) -> str:
        """Returns the error as a sentence."""
        return f"{self.module}:{self.line} {self.kind}: {self.before}  ->  {self.after}"


def find(module: str, source: str) -> list[Mutation]:
    """Returns every possible error of the module."""
    tree = ast.parse(source)
    return [
        Mutation(module, node.lineno, kind, _text(node), _text(changed), index)
        for index, (node, kind, changed) in enumerate(_changes(tree))
    ]


def mutate(source: str, index: int) -> str:
    """Returns the module's text with the error, without comments."""
    tree = ast.parse(source)
    node, _, changed = list(_changes(tree))[index]
    return ast.unparse(ast.fix_missing_locations(_Replace(node, changed).visit(tree)))


def _changes(tree: ast.Module) -> Iterator[tuple[ast.AST, str, ast.AST]]:
    hidden = set(_hidden(tree))
    for node in ast.walk(tree):
        if node not in hidden:
            yield from ((node, kind, changed) for kind, changed in _mutants(node))


def _hidden(tree: ast.Module) -> Iterator[ast.AST]:
    """Yields nodes that tests need not check: annotations, log lines, error messages, and the text of an object."""
    for node in ast.walk(tree):
        annotation = getattr(node, "annotation", None) or getattr(node, "returns", None)
        if annotation is not None:
            yield from ast.walk(annotation)
        logged = (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _text(node.value).startswith("log.")
        )
        typed = isinstance(node, ast.Assign) and _text(node.value).startswith(TYPES_ONLY)
        shown = isinstance(node, ast.FunctionDef) and node.name == "__repr__"
        if logged or typed or shown or isinstance(node, ast.JoinedStr):
            yield from ast.walk(node)


def _mutants(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yields the node with one error, for each possible error."""
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in COMPARISONS:
            yield "comparison", _with(node, ops=[COMPARISONS[type(operator)]()])
        case ast.BinOp(op=operator) | ast.AugAssign(op=operator) if type(operator) in OPERATORS:
            yield "operator", _with(node, op=OPERATORS[type(operator)]())
        case ast.BoolOp(op=operator):
            yield "and or or", _with(node, op=ast.Or() if isinstance(operator, ast.And) else ast.And())
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield "condition", _with(node, test=ast.UnaryOp(ast.Not(), test))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "condition", operand
        case ast.Constant(value=bool(value)):
            yield "constant", ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield "constant", ast.Constant(value + 1)
    if isinstance(node, REMOVABLE) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
        yield "statement removed", ast.Pass()


def _with(node: ast.AST, **fields: object) -> ast.AST:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _text(node: ast.AST) -> str:
    return ast.unparse(ast.fix_missing_locations(copy.deepcopy(node))).partition("\n")[0][:100]


class _Replace(ast.NodeTransformer):
    def __init__(self, node: ast.AST, changed: ast.AST) -> None:
        self._node, self._changed = node, changed

    def visit(self, node: ast.AST) -> ast.AST:
        if node is self._node:
            return ast.copy_location(self._changed, node)
        return self.generic_visit(node)
