"""`python -m bench compare REV`: shows whether the working tree (A) is slower than a commit (B) on a noisy machine.

Each bench runs on both sides, one directly after the other: A B in the first pair, B A in the second, and so on. Other
work on the machine slows down both sides of a pair, so their ratio A/B varies less than the rates do. The result of a
metric is the median of these ratios. If it is below 0.97, the metric is measured again with more pairs, and only the
second result counts. Each side is a checkout of its own, with its own compiled extensions.
"""

from __future__ import annotations

import importlib.util
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
from apex.config.validation import NonNegativeFloat, NonNegativeInt
from apexreplay.errors import FAILED, FINISHED, ApexError, UsageError, require
from apexreplay.process.lifecycle import stop_on_signals
from bench.harness import serial_updates
from bench.harness.command import make_parser
from bench.harness.commands import Runner


class Bench(NamedTuple):
    """A command that each side runs, and its metrics."""

    command: str  # the arguments of `python -m bench` of that side, or those of serial_updates.py
    metrics: dict[str, str]  # metric -> key in the JSON object that the command prints
    needs: tuple[str, str] = ("", "")  # module and package without which the bench is skipped
    serial_updates: int = 0  # updates for each of --seconds that serial_updates.py makes; 0: runs `python -m bench`


BOX2D = ("Box2D", "gymnasium[box2d]")
BENCHES = {  # Stores, recordings and batches are small, so that a bench is short.
    "replay": Bench(
        "replay --link tcp --transitions 200000 --frames 5000 --leaves 512",
        {metric: metric for metric in ("sample_batches_per_s", "insert_transitions_per_s", "bytes_per_transition")},
    ),
    "actor": Bench("actor", {"actor_steps_per_s": "actor_steps_per_s"}),
    "learner": Bench("learner --batch-size 128", {"learner_updates_per_s": "learner_updates_per_s"}),
    "pong": Bench("learner --preset pong --batch-size 64", {"pong_updates_per_s": "learner_updates_per_s"}),
    "cartpole": Bench(
        "learner --preset cartpole --batch-size 128", {"cartpole_updates_per_s": "learner_updates_per_s"}
    ),
    "lunarlander": Bench(
        "learner --preset lunarlander --batch-size 256", {"lunarlander_updates_per_s": "learner_updates_per_s"}, BOX2D
    ),
    "halfcheetah": Bench(
        "--preset control --env HalfCheetah-v5",
        {"halfcheetah_updates_per_s": "serial_updates_per_s"},
        ("mujoco", "mujoco"),
        serial_updates=60,
    ),
}
LESS_IS_BETTER = {"bytes_per_transition"}  # Their ratio is B/A.
REPEAT_BELOW = 0.97  # a median ratio
LIMIT_SECONDS = 1200.0  # A bench that runs for longer than this plus 20 times --seconds is stopped.
PRINT_IMPORTS = "import apex, importlib.util as u; print(apex.__file__); print(u.find_spec('bench.__main__').origin)"


class Side(NamedTuple):
    """One of the two versions of the code."""

    name: str  # A or B
    version: str
    checkout: Path


class PairedRates(NamedTuple):
    """One metric's rates on both sides, pair by pair."""

    a: list[float]
    b: list[float]
    less_is_better: bool = False

    @property
    def ratio(self) -> float:
        """The median of the ratios of the pairs. Above 1, A is better."""
        return median(self.ratios)

    @property
    def ratios(self) -> list[float]:
        """The ratio of each pair: A/B, or B/A if less is better."""
        pairs = zip(self.b, self.a, strict=True) if self.less_is_better else zip(self.a, self.b, strict=True)
        return [better / worse for better, worse in pairs]

    def summarize(self) -> dict[str, Any]:
        """Returns median rates, and the median, least and greatest ratio of a pair."""
        spread = {"ratio": self.ratio, "ratio_min": min(self.ratios), "ratio_max": max(self.ratios)}
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
    parser.add_argument(
        "--repeat",
        type=value_of(NonNegativeInt),
        default=15,
        metavar="N",
        help=f"pairs of the second measurement of a metric whose ratio is below {REPEAT_BELOW}; default 15; 0: none",
    )
    parser.add_argument(
        "--only", default=",".join(BENCHES), metavar="NAME,...", help=f"benches to run, of {', '.join(BENCHES)}"
    )
    ratio = value_of(NonNegativeFloat)
    parser.add_argument(
        "--at-least", type=ratio, default=0.0, metavar="R", help="exit with status 1 if a median ratio is below R"
    )
    options = parser.parse_args(argv)
    names = _runnable(options.only.split(","))
    with stop_on_signals() as stop, tempfile.TemporaryDirectory(prefix="apex-compare-") as folder:
        runner = Runner(Path(folder), stop, LIMIT_SECONDS + 20 * options.seconds)
        a = _prepare(Path(folder).resolve() / "A", options.other, runner)
        b = _prepare(Path(folder).resolve() / "B", options.rev, runner)
        comparison = Comparison(a, b, options.seconds, runner)
        rates = comparison.measure(names, options.pairs)
        first = {metric: each.ratio for metric, each in rates.items() if each.ratio < REPEAT_BELOW}
        if first and options.repeat:
            rates |= _repeat(comparison, first, options.repeat)

    figures = {metric: each.summarize() for metric, each in rates.items()}
    for metric in first if options.repeat else ():
        figures[metric]["first_ratio"] = first[metric]
    _print_table(a, b, figures)
    slow = [f"{metric} ({each['ratio']:.3f})" for metric, each in figures.items() if each["ratio"] < options.at_least]
    if slow:
        _log(f"below {options.at_least:g}: {', '.join(slow)}")
    if options.json:
        print(json.dumps({"a": a.version, "b": b.version, "pairs": options.pairs, "metrics": figures}))
    return FAILED if slow else FINISHED


def _runnable(asked: Sequence[str]) -> list[str]:
    """Returns the benches to run, without those that need a package which is not installed."""
    names = []
    for name in dict.fromkeys(asked):
        require(name in BENCHES, f"--only: unknown bench {name!r}; known: {', '.join(BENCHES)}")
        module, package = BENCHES[name].needs
        if module and importlib.util.find_spec(module) is None:
            _log(f"skipped {name}: {package} is not installed")
        else:
            names.append(name)
    return names


def _repeat(comparison: Comparison, ratios: dict[str, float], pairs: int) -> dict[str, PairedRates]:
    """Measures these metrics again, because a low ratio of a few pairs may be noise."""
    _log(f"again, {pairs} pairs each: {', '.join(f'{metric} ({ratio:.3f})' for metric, ratio in ratios.items())}")
    names = [name for name, bench in BENCHES.items() if not ratios.keys().isdisjoint(bench.metrics)]
    return {metric: each for metric, each in comparison.measure(names, pairs).items() if metric in ratios}


def _print_table(a: Side, b: Side, figures: dict[str, dict[str, Any]]) -> None:
    print(f"A: {a.version}\nB: {b.version}\n")
    print(f"{'medians':<26}{'A':>12}{'B':>12}{'A/B':>9}{'min':>9}{'max':>9}{'pairs':>7}")
    for metric, each in figures.items():
        ratios = "".join(f"{each[key]:>9.3f}" for key in ("ratio", "ratio_min", "ratio_max"))
        notes = [f"first {each['first_ratio']:.3f}"] if "first_ratio" in each else []
        notes += ["ratio is B/A"] if metric in LESS_IS_BETTER else []
        row = f"{metric:<26}{each['a']:>12,.2f}{each['b']:>12,.2f}{ratios}{len(each['a_rates']):>7}"
        print(f"{row}  {', '.join(notes)}".rstrip())


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
    _log(f"{side.name}: preparing {side.version}")
    checkout.mkdir()
    if rev:
        archive = checkout.with_suffix(".tar")
        _succeed("git archive", runner, ["git", "archive", f"--output={archive}", commit], root)
        _succeed("tar", runner, ["tar", "-xf", str(archive)], checkout)
    else:
        _copy_working_tree(root, checkout, runner)
    _compile_extensions(side, runner)
    imported = runner.run([sys.executable, "-c", PRINT_IMPORTS], checkout)
    if imported.status:
        raise UsageError(f"{side.name} has no apex or no benches: {imported.describe_failure()}")
    for path in imported.output.splitlines():
        require(Path(path).is_relative_to(checkout), f"{side.name} imports {path}, which is not in its own checkout")
    return side


def _copy_working_tree(root: Path, checkout: Path, runner: Runner) -> None:
    """Copies tracked and untracked files in their present state, except those that git ignores."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in _succeed("git ls-files", runner, command, root).split("\0"):
        source, copy = root / name, checkout / name
        if source.is_file() or source.is_symlink():  # Other paths are deleted files.
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy, follow_symlinks=False)


def _compile_extensions(side: Side, runner: Runner) -> None:
    """Compiles every NAME.c of both packages into _NAME.*.so beside the source; raises UsageError if one is missing."""
    for folder, package in ((side.checkout, "apex"), (side.checkout / "apexreplay", ".")):
        sources = sorted(folder.glob(f"{package}/**/*.c"))
        if not sources:  # Before the replay library, all C code was in apex/.
            continue
        # -I: a module of the folder, such as types.py, must not stand before that of Python.
        built = runner.run([sys.executable, "-I", "setup.py", "build_ext", "--inplace"], folder)
        missing = [
            str(path.relative_to(side.checkout)) for path in sources if not [*path.parent.glob(f"_{path.stem}.*")]
        ]
        if built.status or missing:
            raise UsageError(f"{side.name}: cannot compile {', '.join(missing)}: {built.describe_failure()}")


def _succeed(what: str, runner: Runner, command: Sequence[str], cwd: Path) -> str:
    """Returns the output of a command; raises ApexError if it fails."""
    ran = runner.run(command, cwd)
    if ran.status:
        raise ApexError(f"{what} failed: {ran.describe_failure()}")
    return ran.output


# --- the measurements -------------------------------------------------------------------------------------------------


class Comparison:
    """Runs benches on both sides."""

    def __init__(self, a: Side, b: Side, seconds: float, runner: Runner) -> None:
        self._sides = a, b
        self._seconds = seconds
        self._runner = runner

    def measure(self, names: Sequence[str], pairs: int) -> dict[str, PairedRates]:
        """Runs every bench `pairs` times on both sides, and reports which compiled extensions were loaded."""
        metrics = {metric: name for name in names for metric in BENCHES[name].metrics}
        rates = {metric: PairedRates([], [], metric in LESS_IS_BETTER) for metric in metrics}
        loaded = {(side.name, name): set[str]() for side in self._sides for name in names}
        for pair in range(pairs):
            for name in names:
                for side in self._sides if pair % 2 == 0 else reversed(self._sides):
                    _log(f"pair {pair + 1} of {pairs}: {name} on {side.name}")
                    figures, libraries = self._run_bench(side, name)
                    loaded[side.name, name] |= {library.partition(".")[0] for library in libraries}
                    for metric, value in figures.items():
                        getattr(rates[metric], side.name.lower()).append(value)
                for metric in BENCHES[name].metrics:
                    each = rates[metric]
                    _log(f"  {metric}: A {each.a[-1]:.5g}, B {each.b[-1]:.5g}; median ratio so far {each.ratio:.3f}")
        for name in names:
            on_a, on_b = (", ".join(sorted(loaded[side.name, name])) or "none" for side in self._sides)
            warning = "" if on_a == on_b else "warning: the ratio compares compiled code with slower code: "
            _log(f"{warning}compiled extensions that {name} loaded: A: {on_a}; B: {on_b}")
        return rates

    def _run_bench(self, side: Side, name: str) -> tuple[dict[str, float], frozenset[str]]:
        """Returns the bench's metrics, and the compiled extensions that it has loaded."""
        bench = BENCHES[name]
        if bench.serial_updates:
            updates = max(1, round(bench.serial_updates * self._seconds))
            command = ["-P", serial_updates.__file__, str(updates), *bench.command.split()]
        else:
            command = ["-m", "bench", *bench.command.split(), "--seconds", f"{self._seconds:g}", "--json"]
        ran = self._runner.run([sys.executable, *command], side.checkout)
        try:
            figures = json.loads(ran.output.splitlines()[-1]) if ran.status == 0 else {}
            values = {metric: float(figures[key]) for metric, key in bench.metrics.items()}
            if min(values.values()) > 0:
                return values, ran.libraries
        except (ValueError, LookupError, TypeError):  # The last line is no JSON object, or has no such figure.
            pass
        raise ApexError(f"{name} on {side.name} ({side.version}) measured nothing: {ran.describe_failure()}")


def _log(sentence: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {sentence}", file=sys.stderr, flush=True)
