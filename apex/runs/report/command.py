"""`apex report`: writes one self-contained HTML page about a run, for example to send to a colleague."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from apex.config.arguments import Parser, check_out
from apex.errors import FINISHED, UsageError
from apex.runs.folder import open_run
from apex.runs.report.page import build_page
from apex.runs.report.video import EmbeddedVideo, NoVideoError, film
from apex.runtime.atomic_files import replace_file
from apex.runtime.trust import add_allow

NAME = "report.html"  # default file name, in the run's folder


def main(argv: Sequence[str], *, film: Callable[[Path, float], EmbeddedVideo] = film) -> int:
    """Runs the command and returns its exit status; raises UsageError if the arguments are not valid."""
    options = _make_parser().parse_args(argv)
    run = open_run(options.run)
    out = options.out or run.path / NAME
    check_out(out, ".html", ".htm")
    video: EmbeddedVideo | str = ""
    if options.video:
        if sys.stderr.isatty():
            print("recording a video of one game of the best policy; skip it with --no-video", file=sys.stderr)
        try:
            video = film(run.path, run.config.evaluator.epsilon)
        except NoVideoError as error:
            video = str(error)
            print(f"the page has no video: {video}", file=sys.stderr)
    try:
        replace_file(out, build_page(run, video).encode())
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror}") from error
    size = out.stat().st_size
    print(f"page: {out} ({size / 1e6:.1f} MB)")
    if options.json:
        print(json.dumps({"out": str(out), "bytes": size, "video": isinstance(video, EmbeddedVideo)}))
    return FINISHED


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
    add_allow(parser)
    return parser
