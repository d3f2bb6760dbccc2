"""`python -m bench compare REV`: shows whether the working tree (A) is slower than a commit (B) on a noisy machine.

Each bench runs on both sides, one directly after the other: A B in the first pair, B A in the second, and so on. Other
work on the machine slows down both sides of a pair, so their ratio A/B varies less than the rates do. The result of a
metric is the median of these ratios. Each side is a checkout of its own, with its own compiled extensions.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from apex.config.arguments import positive_int, value_of
from apex.config.validation import NonNegativeFloat
from apex.errors import FAILED, FINISHED, ApexError, UsageError, require
from apex.runtime.lifecycle import stop_on_signals
from bench.harness.command import make_parser
from bench.harness.commands import Runner

BENCHES = {  # Stores, recordings and batches are small, so that a bench is short.
    "replay": "replay --link tcp --transitions 200000 --frames 5000 --leaves 512",
    "actor": "actor",
    "learner": "learner --batch-size 128",
    "pong": "learner --preset pong --batch-size 64",
}
METRICS = {  # metric -> bench, and the key in the JSON object that the bench prints
    "sample_batches_per_s": ("replay", "sample_batches_per_s"),
    "insert_transitions_per_s": ("replay", "insert_transitions_per_s"),
    "actor_steps_per_s": ("actor", "actor_steps_per_s"),
    "learner_updates_per_s": ("learner", "learner_updates_per_s"),
    "pong_updates_per_s": ("pong", "learner_updates_per_s"),
}
LIMIT_SECONDS = 1200.0  # A bench may run for so long, and for 20 times --seconds.
PRINT_IMPORTS = "import apex, importlib.util as u; print(apex.__file__); print(u.find_spec('{}.__main__').origin)"


class Side(NamedTuple):
    """One of the two versions of the code."""

    name: str  # A or B
    version: str
    checkout: Path


class PairedRates(NamedTuple):
    """One metric's rates on both sides, pair by pair."""

    a: list[float]
    b: list[float]

    def summarize(self) -> dict[str, Any]:
        """Median rates, and the median, least and greatest ratio of a pair."""
        ratios = [a / b for a, b in zip(self.a, self.b, strict=True)]
        spread = {"ratio": median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios)}
        return {"a": median(self.a), "b": median(self.b), **spread, "a_rates": self.a, "b_rates": self.b}


def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 1 if a median ratio is below --at-least."""
    parser = make_parser(
        "compare",
        "Runs benches alternately on the working tree (A) and on a commit (B).",
        seconds=10.0,
        of="--seconds of each bench",
    )
    parser.add_argument("rev", metavar="REV", help="the commit to compare with")
    parser.add_argument("--with", dest="other", metavar="OTHER", help="A is this commit instead of the working tree")
    parser.add_argument(
        "--pairs", type=positive_int, default=7, metavar="N", help="runs of each bench on each side; default 7"
    )
    parser.add_argument("--only", default=",".join(BENCHES), metavar="NAME,...", help=f"of {', '.join(BENCHES)}")
    ratio = value_of(NonNegativeFloat)
    parser.add_argument(
        "--at-least", type=ratio, default=0.0, metavar="R", help="status 1 if a median ratio is below R"
    )
    options = parser.parse_args(argv)
    names = list(dict.fromkeys(options.only.split(",")))
    for name in names:
        require(name in BENCHES, f"--only: unknown bench {name!r}; known: {', '.join(BENCHES)}")

    with stop_on_signals() as stop, tempfile.TemporaryDirectory(prefix="apex-compare-") as folder:
        runner = Runner(Path(folder), stop, LIMIT_SECONDS + 20 * options.seconds)
        a = _prepare(Path(folder).resolve() / "A", options.other, runner)
        b = _prepare(Path(folder).resolve() / "B", options.rev, runner)
        rates = _measure(a, b, names, options.pairs, options.seconds, runner)

    figures = {metric: each.summarize() for metric, each in rates.items()}
    print(f"A: {a.version}\nB: {b.version}\n\n{'medians':<26}{'A':>12}{'B':>12}{'A/B':>9}{'min':>9}{'max':>9}")
    for metric, each in figures.items():
        ratios = "".join(f"{each[key]:>9.3f}" for key in ("ratio", "ratio_min", "ratio_max"))
        print(f"{metric:<26}{each['a']:>12,.2f}{each['b']:>12,.2f}{ratios}")
    slow = [f"{metric} ({each['ratio']:.3f})" for metric, each in figures.items() if each["ratio"] < options.at_least]
    if slow:
        _say(f"below {options.at_least:g}: {', '.join(slow)}")
    if options.json:
        print(json.dumps({"a": a.version, "b": b.version, "pairs": options.pairs, "metrics": figures}))
    return FAILED if slow else FINISHED


# --- the two checkouts ------------------------------------------------------------------------------------------------


def _prepare(checkout: Path, rev: str | None, runner: Runner) -> Side:
    """Makes one side's checkout, of a commit or (None) of the working tree, and compiles its extensions."""
    require(shutil.which("git") is not None, "git is not installed")
    top = runner.run(["git", "rev-parse", "--show-toplevel"], Path.cwd())
    require(top.status == 0, f"{Path.cwd()} is not in a git checkout")
    root = Path(top.output.removesuffix("\n"))
    found = runner.run(["git", "rev-parse", "--verify", f"{rev or 'HEAD'}^{{commit}}"], root)
    require(found.status == 0, f"unknown commit {rev!r}")
    commit = found.output.strip()
    side = Side(checkout.name, commit if rev else f"working tree on {commit}", checkout)
    _say(f"{side.name}: preparing {side.version}")
    checkout.mkdir()
    if rev:
        archive = checkout.with_suffix(".tar")
        _succeed("git archive", runner, ["git", "archive", f"--output={archive}", commit], root)
        _succeed("tar", runner, ["tar", "-xf", str(archive)], checkout)
    else:
        _copy_working_tree(root, checkout, runner)
    _compile_extensions(side, runner)
    imported = runner.run([sys.executable, "-c", PRINT_IMPORTS.format(_command(side)[0])], checkout)
    if imported.status:
        raise UsageError(f"{side.name} has no apex or no benches: {imported.describe_failure()}")
    for path in imported.output.splitlines():
        require(Path(path).is_relative_to(checkout), f"{side.name} imports {path}, which is not in its own checkout")
    return side


def _command(side: Side) -> list[str]:
    """The module that runs the benches, and the words before a bench's name: at 7e4a7bf they belonged to apex."""
    return ["bench"] if (side.checkout / "bench" / "__main__.py").exists() else ["apex", "bench"]


def _copy_working_tree(root: Path, checkout: Path, runner: Runner) -> None:
    """Copies tracked and untracked files as they are now, without those that git ignores."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in _succeed("git ls-files", runner, command, root).split("\0"):
        source, copy = root / name, checkout / name
        if source.is_file() or source.is_symlink():  # Others were deleted.
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy, follow_symlinks=False)


def _compile_extensions(side: Side, runner: Runner) -> None:
    """Compiles every apex/**/NAME.c into _NAME.*.so beside the source; raises UsageError if one is missing."""
    sources = sorted(side.checkout.glob("apex/**/*.c"))
    if not sources:
        return
    built = runner.run([sys.executable, "setup.py", "build_ext", "--inplace"], side.checkout)
    missing = [str(path.relative_to(side.checkout)) for path in sources if not [*path.parent.glob(f"_{path.stem}.*")]]
    if built.status or missing:
        raise UsageError(f"{side.name}: cannot compile {', '.join(missing)}: {built.describe_failure()}")


def _succeed(what: str, runner: Runner, command: Sequence[str], cwd: Path) -> str:
    """The output of a command that must not fail."""
    ran = runner.run(command, cwd)
    if ran.status:
        raise ApexError(f"{what} failed: {ran.describe_failure()}")
    return ran.output


# --- the measurements -------------------------------------------------------------------------------------------------


def _measure(
    a: Side, b: Side, names: Sequence[str], pairs: int, seconds: float, runner: Runner
) -> dict[str, PairedRates]:
    """Runs every bench `pairs` times on both sides, and reports which compiled extensions were loaded."""
    rates = {metric: PairedRates([], []) for metric, (bench, _) in METRICS.items() if bench in names}
    loaded = {(side.name, name): set[str]() for side in (a, b) for name in names}
    for pair in range(pairs):
        for name in names:
            for side in (a, b) if pair % 2 == 0 else (b, a):
                _say(f"pair {pair + 1} of {pairs}: {name} on {side.name}")
                figures, libraries = _run_bench(side, name, seconds, runner)
                loaded[side.name, name] |= {library.partition(".")[0] for library in libraries}
                for metric, value in figures.items():
                    getattr(rates[metric], side.name.lower()).append(value)
            for metric in (metric for metric in rates if METRICS[metric][0] == name):
                each = rates[metric].summarize()
                last = f"A {each['a_rates'][-1]:.5g}, B {each['b_rates'][-1]:.5g}"
                _say(f"  {metric}: {last}; median ratio so far {each['ratio']:.3f}")
    for name in names:
        on_a, on_b = (", ".join(sorted(loaded[side.name, name])) or "none" for side in (a, b))
        warning = "" if on_a == on_b else "warning: the ratio compares compiled code with slower code: "
        _say(f"{warning}compiled extensions that {name} loaded: A: {on_a}; B: {on_b}")
    return rates


def _run_bench(side: Side, name: str, seconds: float, runner: Runner) -> tuple[dict[str, float], frozenset[str]]:
    """The bench's metrics, and the compiled extensions that it has loaded."""
    options = [*BENCHES[name].split(), "--seconds", f"{seconds:g}", "--json"]
    ran = runner.run([sys.executable, "-m", *_command(side), *options], side.checkout)
    try:
        figures = json.loads(ran.output.splitlines()[-1]) if ran.status == 0 else {}
        values = {metric: float(figures[key]) for metric, (bench, key) in METRICS.items() if bench == name}
        if min(values.values()) > 0:
            return values, ran.libraries
    except (ValueError, LookupError, TypeError):  # No line, no JSON object, no such figure.
        pass
    raise ApexError(f"{name} on {side.name} ({side.version}) measured nothing: {ran.describe_failure()}")


def _say(sentence: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {sentence}", file=sys.stderr, flush=True)
