"""`python -m tests.mutants.faults`: makes errors for each row of docs/faults.md, and runs a test of that row.

`faults.toml` has the errors, at least one for each row: a text that occurs once in a file of the product, and what
replaces it. Each error is made in a copy of the tree. A test that passes nevertheless does not show what its row says.
"""

import argparse
import ast
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from .__main__ import ROOT, copy_tree

TABLE = ROOT / "docs" / "faults.md"
ERRORS = Path(__file__).with_suffix(".toml")
TEST = re.compile(r"`([\w/]+\.py::\w+)`")
FAILED = re.compile(r"^(FAILED|ERROR) \S+::", re.MULTILINE)  # pytest's summary: a test failed, not its import
LONGEST_SECONDS = 420.0  # limit for one test; an error that makes it hang counts as noticed


class Row(NamedTuple):
    """A row of the table."""

    fault: str  # "SECTION: FAULT"
    tests: list[str]


class FaultError(NamedTuple):
    """An error in the product that a test of the row must notice."""

    fault: str
    file: str
    before: str
    after: str
    test: str  # a test of the row, possibly with one of its parameters: file.py::name[id]


def read_rows(table: str) -> list[Row]:
    """Returns the rows of all tables of the document."""
    rows, section = [], ""
    for line in table.splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        elif line.startswith("| ") and not line.startswith("| fault |"):
            rows.append(Row(f"{section}: {line.split('|')[1].strip()}", TEST.findall(line)))
    return rows


def read_errors(text: str) -> list[FaultError]:
    """Returns the errors, in the order of the file."""
    return [FaultError(**fields) for fields in tomllib.loads(text)["error"]]


def find_flaws(rows: Sequence[Row], errors: Sequence[FaultError], root: Path = ROOT) -> Iterator[str]:
    """Yields a sentence for each row without an error, and for each error that cannot be made."""
    tests = {row.fault: row.tests for row in rows}
    faults = [error.fault for error in errors]
    yield from (f"{fault}: the row has no error" for fault in tests if fault not in faults)
    places = Counter((error.fault, error.file, error.before) for error in errors)
    yield from (f"{fault}: the row has two errors at one place" for (fault, *_), count in places.items() if count > 1)
    for error in errors:
        if error.fault not in tests:
            yield f"{error.fault}: there is no such row"
        elif error.test.partition("[")[0] not in tests[error.fault]:
            yield f"{error.fault}: the row does not name {error.test}"
        source = (root / error.file).read_text() if (root / error.file).is_file() else ""
        if (count := source.count(error.before)) != 1 or not error.before:
            yield f"{error.fault}: {error.file} contains the text {count} times"
        elif error.after == error.before:
            yield f"{error.fault}: the error changes nothing"
        else:
            with suppress(SyntaxError):
                ast.parse(source.replace(error.before, error.after))
                continue
            yield f"{error.fault}: {error.file} with the error is not Python"


def examine(tree: Path, error: FaultError, *, sound: bool = False) -> str:
    """Returns the verdict of the row's test with the error: noticed, SURVIVED, skipped, or BROKEN if no test ran.

    `sound`: without the error, for comparison. The tree is restored, and all processes of the test are killed.
    """
    file = tree / error.file
    text = file.read_text()
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "1", "-p", "no:cacheprovider", f"tests/{error.test}"]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    if not sound:
        file.write_text(text.replace(error.before, error.after))
    try:
        ended = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=LONGEST_SECONDS
        )
    except subprocess.TimeoutExpired:
        return "noticed"
    finally:
        file.write_text(text)
        _kill_processes_of(tree)
    if FAILED.search(ended.stdout):
        return "noticed"
    return "BROKEN" if ended.returncode else "SURVIVED" if " passed" in ended.stdout else "skipped"


def _kill_processes_of(tree: Path) -> None:
    """Kills the processes whose environment names the tree: a test of broken programs may leave some."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if bytes(tree) in (folder / "environ").read_bytes():
                os.kill(int(folder.name), signal.SIGKILL)


def main() -> int:
    """Returns 1 if a row's test does not notice the row's error."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.faults", description=__doc__)
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="only rows with one of these texts")
    parser.add_argument("--jobs", type=int, default=2, metavar="J", help="tests that run at the same time; default 2")
    parser.add_argument("--file", nargs="+", default=[""], metavar="TEXT", help="only errors in files with these texts")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="run each test N times; default 1")
    parser.add_argument("--sound", action="store_true", help="run the tests without the errors; all must pass")
    parser.add_argument("--list", action="store_true", help="only print rows, files and tests")
    options = parser.parse_args()
    rows, errors = read_rows(TABLE.read_text()), read_errors(ERRORS.read_text())
    if flaws := list(find_flaws(rows, errors)):
        print("\n".join(flaws), file=sys.stderr)
        return 2
    errors = [error for error in errors if any(text in error.fault for text in options.only)]
    errors = [error for error in errors if any(text in error.file for text in options.file)]
    if options.list:
        print("\n".join(f"{error.fault}  {error.file}  {error.test}" for error in errors))
        return 0
    expected = "SURVIVED" if options.sound else "noticed"
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        trees: queue.Queue[Path] = queue.Queue()
        for job in range(options.jobs):
            trees.put(copy_tree(Path(folder) / str(job)))

        def run(error: FaultError) -> str:
            tree, began = trees.get(), time.monotonic()
            try:
                verdict = examine(tree, error, sound=options.sound)
            finally:
                trees.put(tree)
            shown = {"SURVIVED": "passed", "noticed": "FAILED"}.get(verdict, verdict) if options.sound else verdict
            print(
                f"{shown:<8} {time.monotonic() - began:5.0f} s  {error.fault}  {error.file}  {error.test}", flush=True
            )
            return verdict

        with ThreadPoolExecutor(options.jobs) as pool:
            verdicts = list(pool.map(run, errors * options.repeat))
    good, skipped = verdicts.count(expected), verdicts.count("skipped")  # Ray, for example, is an optional package.
    print(f"{good} of {len(verdicts)} tests: {'passed' if options.sound else 'noticed'}; {skipped} skipped here")
    return int(good + skipped < len(verdicts))


if __name__ == "__main__":
    sys.exit(main())
