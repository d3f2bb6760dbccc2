"""The option `--track` of `apex train`."""

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from apex.config.arguments import Parser

if TYPE_CHECKING:
    from apex.launch.trackers.tracker import Tracker

TRACKERS = {"wandb": "WandbTracker", "mlflow": "MlflowTracker"}  # module of this package -> its class


def add_track_option(parser: Parser) -> None:
    """Adds the option."""
    text = "copy curves, film, checkpoint and report page to this tracker (see docs/guide/trackers.md); may be repeated"
    parser.add_argument("--track", action="append", default=[], choices=tuple(TRACKERS), help=text)


def make_trackers(names: Sequence[str]) -> list["Tracker"]:
    """Returns these trackers, each once. Raises UsageError if a package is not installed."""
    modules = {name: importlib.import_module(f"apex.launch.trackers.{name}") for name in names}
    return [getattr(module, TRACKERS[name])() for name, module in modules.items()]
