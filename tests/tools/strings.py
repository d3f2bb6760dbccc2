"""Prints every string that a user may read, with its file and line, so that people can review them.

python tests/tools/strings.py                          # messages, help, settings, Terraform and shell
python tests/tools/strings.py --prose                  # docstrings and comments of the product instead
python tests/tools/strings.py --prose tests bench      # docstrings and comments of these folders
python tests/tools/strings.py --sample 60 --seed 7     # a random sample
"""

import argparse
import ast
import io
import random
import re
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
LEAST_WORDS = 3  # Names, formats and keys have fewer.
DESCRIPTION = re.compile(r'(?:description|error_message)\s*=\s*"((?:[^"\\]|\\.)+)"')
C_COMMENT = re.compile(r"//\s*(.+)|^\s*/?\*+\s*(?:(.+?))\s*(?:\*/)?$")
SHELL_COMMENT = re.compile(r"(?:^|\s)#\s+(.+)")
ECHO = re.compile(r"(?:echo|fail|printf '%s\\n') \"([^\"]+)\"")

Found = tuple[Path, int, str]


def messages() -> Iterator[Found]:
    """Yields strings of the product except docstrings, comments of settings, and messages of Terraform and scripts."""
    for path in sorted([*(ROOT / "apex").rglob("*.py"), *(ROOT / "apexreplay").rglob("*.py")]):
        tree = ast.parse(path.read_text())
        docstrings = {id(node.body[0].value) for node in _documented(tree)}
        parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                yield path, node.lineno, ast.unparse(node)[2:-1]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings | parts:
                yield path, node.lineno, node.value
    for module in ("tree", "addresses", "iqn", "r2d2", "dpg", "sac"):
        yield from _comments(ROOT / f"apex/config/{module}.py")
    for path in sorted((ROOT / "deploy").rglob("*.tf")):
        yield from _matches(path, DESCRIPTION)
    for path in sorted(ROOT.glob("*.sh")):
        yield from _matches(path, ECHO)


def prose(folders: Sequence[str]) -> Iterator[Found]:
    """Yields docstrings and comments in Python, C and shell files of these folders."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in _documented(ast.parse(path.read_text())):
                yield path, node.body[0].lineno, node.body[0].value.value
            yield from _comments(path)
        for path in sorted((ROOT / folder).rglob("*.c")):
            yield from _matches(path, C_COMMENT)
        for path in sorted((ROOT / folder).rglob("*.sh")):
            yield from _matches(path, SHELL_COMMENT)


def _documented(tree: ast.AST) -> Iterator[ast.AST]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return (node for node in ast.walk(tree) if isinstance(node, kinds) and ast.get_docstring(node) is not None)


def _comments(path: Path) -> Iterator[Found]:
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith(("# noqa", "# type:", "# ---")):
            yield path, token.start[0], token.string.lstrip("# ")


def _matches(path: Path, pattern: re.Pattern[str]) -> Iterator[Found]:
    for number, line in enumerate(path.read_text().splitlines(), 1):
        yield from ((path, number, found[found.lastindex or 0]) for found in pattern.finditer(line))


def main() -> None:
    """Prints the strings that the options select."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--prose", nargs="*", metavar="FOLDER", help="docstrings and comments in these folders instead; default: apex"
    )
    parser.add_argument("--sample", type=int, metavar="N", help="only N strings")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the sample")
    options = parser.parse_args()
    candidates = messages() if options.prose is None else prose(options.prose or ["apex"])
    found = [each for each in candidates if len(each[2].split()) >= LEAST_WORDS]
    if options.sample is not None:
        found = random.Random(options.seed).sample(found, min(options.sample, len(found)))
    for path, line, text in found:
        print(f"{path.relative_to(ROOT)}:{line}: {' '.join(text.split())}")


if __name__ == "__main__":
    main()
