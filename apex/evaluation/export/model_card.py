"""Writes the model card of exported weights from `card.md`: training, score, interface, and code to load them."""

import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, NamedTuple

from jinja2 import Environment, StrictUndefined

from apex.algorithms.exported import Exported
from apex.environments.factory import atari_game
from apex.evaluation.command import Evaluation
from apex.evaluation.export.playing import write_setup
from apex.runs.checkpoints.policy_file import PolicyInfo
from apex.runs.folder import RunFolder
from apex.runs.report.facts import find_changes
from apex.runtime.text import duration
from apexreplay.errors import UsageError

NOT_SHOWN = ("run.", "transport.")  # settings that do not affect what was trained
MARKUP = re.compile(r"[\\`*_|~$&<>\[\]]")  # characters that Markdown and HTML read as markup


def escape(value: Any) -> Any:
    """Returns the text of a value that Markdown shows as it is, in one line; a value that is `|safe` is not changed.

    Another user may have written the run folder.
    """
    if hasattr(value, "__html__"):
        return value
    return MARKUP.sub(r"\\\g<0>", re.sub(r"\s", " ", str(value)))


class OnnxFacts(NamedTuple):
    """The result of comparing an ONNX file with torch."""

    opset: int
    difference: float  # largest absolute difference of an output
    num_observations: int
    num_differing: int  # observations with another greedy action, as two Q-values are nearly equal; Q-networks only
    runtime: str  # version of onnxruntime
    state: str  # name of the input for a recurrent state
    outputs: Sequence[str]  # names of the outputs: the algorithm's, and the state after it


def write_card(
    folder: RunFolder,
    info: PolicyInfo,
    exported: Exported,
    *,
    evaluation: Evaluation | None,
    onnx: OnnxFacts | None,
    steps: int | None,
    license: str,
) -> str:
    """Returns the card as Markdown, with the front matter that model hubs read.

    `steps`: environment steps up to these weights; None: unknown.
    """
    templates = Environment(
        autoescape=False,
        finalize=escape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    elapsed = folder.elapsed_seconds
    setup, change, missing = "", "", ""
    try:
        setup, change = write_setup(info)
    except UsageError as error:  # Weights can also be shared from a host that lacks the environment.
        missing = error.problem
    return templates.from_string(files("apex.evaluation.export").joinpath("card.md").read_text("utf-8")).render(
        info=info,
        environment=info.environment,
        is_atari=atari_game(info.environment.id) is not None,
        change=change,
        exported=exported,
        setup=setup,
        missing=missing,
        config=folder.config,
        manifest=folder.manifest,
        git=folder.manifest.get("git"),
        wall_clock=duration(elapsed) if elapsed else "",
        evaluation=evaluation,
        onnx=onnx,
        steps=steps,
        license=license,
        changes=[change for change in find_changes(folder.config) if not change.name.startswith(NOT_SHOWN)],
    )
