"""`apex report`: writes one self-contained HTML page about a run, for example to send to a colleague."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from apex.config.arguments import Parser, check_out
from apex.runs.folder import RunFolder, open_run
from apex.runs.report.page import build_page
from apex.runs.report.video import EmbeddedVideo, NoVideoError, film
from apex.runtime import trust
from apexreplay.errors import FINISHED, UsageError
from apexreplay.files.atomic_files import replace_file

NAME = "report.html"  # default file name, in the run's folder

Film = Callable[[Path, float], EmbeddedVideo]


def report(
    run: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    video: bool = True,
    allow: str | Iterable[str] = (),
) -> Path:
    """Writes one HTML page about a run, as `apex report` does, and returns its path.

    `run` and `allow` are as in `apex.load_policy`. `out` None: report.html in the run folder. `video`: film one game of
    the best policy; if that is impossible, the page has the reason. Raises UsageError if there is no such run, or if
    the page cannot be written.
    """
    trust.allow(allow)
    return _write(RunFolder.open(os.fspath(run)), None if out is None else Path(out), film if video else None)[0]


def main(argv: Sequence[str], *, film: Film = film) -> int:
    """Runs the command and returns its exit status; raises UsageError if the arguments are not valid."""
    options = _make_parser().parse_args(argv)
    run = open_run(options.run)
    if options.video and sys.stderr.isatty():
        print("recording a video of one game of the best policy; skip it with --no-video", file=sys.stderr)
    out, video = _write(run, options.out, film if options.video else None)
    if options.video and isinstance(video, str):
        print(f"the page has no video: {video}", file=sys.stderr)
    size = out.stat().st_size
    print(f"page: {out} ({size / 1e6:.1f} MB)")
    if options.json:
        print(json.dumps({"out": str(out), "bytes": size, "video": isinstance(video, EmbeddedVideo)}))
    return FINISHED


def _write(run: RunFolder, out: Path | None, film: Film | None) -> tuple[Path, EmbeddedVideo | str]:
    """Writes the page; returns its path, and the video or the reason why there is none."""
    out = out or run.path / NAME
    check_out(out, ".html", ".htm")
    video: EmbeddedVideo | str = ""
    try:
        video = film(run.path, run.config.evaluator.epsilon) if film else ""
    except NoVideoError as error:
        video = str(error)
    try:
        replace_file(out, build_page(run, video).encode())
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror}") from error
    return out, video


def _make_parser() -> Parser:
    parser = Parser(prog="apex report", description="Writes one HTML page about a run.")
    parser.add_argument(
        "run", nargs="?", metavar="RUN", help="a run folder, or its name below runs/ (default: the newest run)"
    )
    parser.add_argument("--out", type=Path, metavar="PAGE.html", help=f"page to write (default: RUN/{NAME})")
    parser.add_argument(
        "--video",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="include a video of the best policy in one game (default)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    trust.add_allow(parser)
    return parser
