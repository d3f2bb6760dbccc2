"""`python -m tests.mutants`: draws errors with a seed, and prints which of them the unit tests do not notice."""

import argparse
import os
import queue
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .mutations import Mutation, find, mutate

ROOT = Path(__file__).parents[2]
COPIED = ("apex", "apexreplay", "tests", "bench", "chaos", "docs", "examples", "pyproject.toml")
MODULES = (  # modules of learning, store and protocol
    "apex/acting/segment_builder", "apexreplay/client/send_window", "apexreplay/client/reliable_sender",
    "apex/acting/actor", "apex/acting/shared_parameters", "apex/algorithms/n_step", "apex/dqn/losses",
    "apex/algorithms/exploration", "apex/dqn/autograd_update", "apex/algorithms/optimizers", "apex/algorithms/losses",
    "apex/algorithms/graph_update", "apex/algorithms/parameters", "apexreplay/frame_blob", "apex/learning/trainer",
    "apex/learning/skipped_batches", "apex/learning/batch_ring", "apex/learning/loader", "apex/learning/batch_source",
    "apexreplay/server/leases", "apex/learning/coordinator/coordinator", "apexreplay/rate_limiter",
    "apexreplay/sampling/batch_drawer", "apexreplay/sampling/sampler_counters", "apexreplay/server/server",
    "apexreplay/server/open_store", "apexreplay/snapshots/writer", "apexreplay/snapshots/restore",
    "apexreplay/snapshots/folder", "apexreplay/frames/stack_decoder", "apexreplay/store/sum_tree",
    "apexreplay/store/writer", "apexreplay/store/reader", "apexreplay/store/deduplication",
    "apexreplay/store/priority_weights", "apexreplay/store/layout", "apexreplay/store/file", "apexreplay/wire/codec",
    "apexreplay/wire/header", "apexreplay/wire/json_codec", "apex/transport/endpoints", "apex/transport/run_codec",
    "apexreplay/transport/endpoints", "apex/transport/heartbeat", "apex/transport/messages/results",
)  # fmt: skip
LONGEST_SECONDS = 900.0  # limit for the tests of one module; an error that makes them hang counts as noticed
MOST_FILES = 12  # test files for one module


def main() -> int:
    """Returns 1 if more errors survive than are allowed."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="default 0")
    parser.add_argument("--count", type=int, default=40, metavar="N", help="number of errors; default 40")
    parser.add_argument("--survivors", type=int, default=2, metavar="N", help="allowed survivors; default 2")
    parser.add_argument("--only", type=int, nargs="+", metavar="I", help="examine only these of the errors, from 1 on")
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="J", help="errors that are examined at the same time; default 1"
    )
    parser.add_argument("--list", action="store_true", help="only print the errors")
    options = parser.parse_args()
    drawn = [*enumerate(draw(options.seed, options.count), 1)]
    drawn = [(number, mutation) for number, mutation in drawn if options.only is None or number in options.only]
    if options.list:
        print("\n".join(f"{number:3d} {mutation.sentence()}" for number, mutation in drawn))
        return 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trees: queue.Queue[Path] = queue.Queue()
        for job in range(options.jobs):
            trees.put(copy_tree(Path(folder) / str(job)))

        def examine(number: int, mutation: Mutation) -> bool:
            tree, began = trees.get(), time.monotonic()
            try:
                noticed = is_noticed(tree, mutation)
            finally:
                trees.put(tree)
            verdict = f"noticed by {noticed}" if noticed else "SURVIVED"
            print(f"{number:3d} {mutation.sentence()}  {verdict} ({time.monotonic() - began:.0f} s)", flush=True)
            return bool(noticed)

        with ThreadPoolExecutor(options.jobs) as pool:
            verdicts = list(pool.map(lambda item: examine(*item), drawn))
    survivors = verdicts.count(False)
    print(f"{len(drawn) - survivors} of {len(drawn)} noticed, seed {options.seed}")
    return int(survivors > options.survivors)


def draw(seed: int, count: int) -> list[Mutation]:
    """Returns errors of all modules; each is equally likely."""
    paths = [f"{module}.py" for module in MODULES]
    possible = [mutation for path in paths for mutation in find(path, (ROOT / path).read_text())]
    return random.Random(seed).sample(possible, count)


def copy_tree(tree: Path) -> Path:
    """Copies the files that tests need, without bytecode: Python could use that of another error of equal size and
    time.
    """
    tree.mkdir()
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tree / name)
    return tree


def files_for(module: str) -> list[str]:
    """Returns the test files of a module: those of its package, its own first, then others that contain its name."""
    path = Path(module)
    name, package = path.stem, Path("tests/unit") / path.parent.relative_to("apex" if path.parts[0] == "apex" else ".")
    dotted = ".".join(path.with_suffix("").parts)
    own = sorted((ROOT / package).glob("test_*.py"), key=lambda file: file.stem != f"test_{name}")
    known = re.compile(re.escape(dotted) + r"\b")
    others = [
        file
        for folder in ("unit", "integration", "fuzz")
        for file in sorted((ROOT / "tests" / folder).rglob("test_*.py"))
        if file not in own and known.search(file.read_text())
    ]
    return [str(file.relative_to(ROOT)) for file in [*own, *others]][:MOST_FILES]


def is_noticed(tree: Path, mutation: Mutation) -> str:
    """Returns the test that fails with the error, or "" if none does. The tree is restored afterwards."""
    file = tree / mutation.module
    sound = file.read_text()
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "1", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    file.write_text(mutate(sound, mutation.index))
    try:
        ended = subprocess.run(
            [*command, *files_for(mutation.module)],
            cwd=tree, env=environment, capture_output=True, text=True, timeout=LONGEST_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "a test without end"
    finally:
        file.write_text(sound)
    if ended.returncode == 0:
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", ended.stdout, re.MULTILINE)
    return failed[1].removeprefix("tests/") if failed else f"pytest's status {ended.returncode}"


if __name__ == "__main__":
    sys.exit(main())
