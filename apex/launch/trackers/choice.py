"""The option `--track` of `apex train`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from apex.config.arguments import Parser

if TYPE_CHECKING:
    from apex.launch.trackers.tracker import Tracker

TRACKERS = ("wandb", "mlflow")


def add_track_option(parser: Parser) -> None:
    """Adds the option."""
    text = "copy curves, film, checkpoint and report page to this tracker (see docs/guide/trackers.md); may be repeated"
    parser.add_argument("--track", action="append", default=[], choices=TRACKERS, help=text)


def make_trackers(names: Sequence[str]) -> list["Tracker"]:
    """Returns these trackers, each once. Raises UsageError if a package is not installed."""
    if not names:
        return []
    from apex.launch.trackers.mlflow import MlflowTracker  # Imported here because other runs do not need them.
    from apex.launch.trackers.wandb import WandbTracker

    kinds: dict[str, type[Tracker]] = {"wandb": WandbTracker, "mlflow": MlflowTracker}
    return [kinds[name]() for name in dict.fromkeys(names)]
