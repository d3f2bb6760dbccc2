"""`apex export`: writes a run's weights to files that need torch and safetensors, but not this package.

OUT/
    model.safetensors   float32 tensors; names that say which layer
    README.md           the model card
    config.json         environment, network and schema; every setting of the run
    model.onnx          with --onnx; its outputs are compared with torch's
"""

from __future__ import annotations

import importlib
import json
import os
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from apex.config import to_dict
from apex.config.arguments import Parser, non_negative_int
from apex.config.validation import NonNegativeInt, checked
from apex.dqn.networks import q_values
from apex.environments.factory import kind
from apex.errors import ApexError, ConfigError, require
from apex.evaluation.command import evaluate
from apex.evaluation.export.model_card import OnnxFacts, write_card
from apex.evaluation.policy import find_policy
from apex.runs.checkpoints.checkpoint import read_manifest
from apex.runs.checkpoints.policy_file import PolicyInfo, encode_policy, read_policy
from apex.runs.folder import RunFolder
from apex.runs.metrics.writer import read_curve
from apex.runtime.atomic_files import replace_file
from apex.runtime.lifecycle import FINISHED, reports_errors
from apex.runtime.optional_imports import remedy
from apex.types import Schema

MODEL, CARD, CONFIG, ONNX = "model.safetensors", "README.md", "config.json", "model.onnx"
OPSET = 18  # of ONNX, of the year 2022: no runtime of today lacks it
TOLERANCE = 1e-3  # that ONNX may differ from torch, as a fraction of the largest |Q|
BATCHES = (1, 5, 250)  # sizes of the random batches on which they are compared


class ExportError(ApexError, RuntimeError):
    """The network cannot be written as ONNX, or what was written computes other values."""


def export(
    run: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    onnx: bool = False,
    episodes: int = 0,
    license: str = "mit",
) -> Path:
    """Writes a run's weights and their model card to the folder `out`, by default RUN/export, and returns it.

    `checkpoint` is that of `apex.load_policy`. `onnx`: model.onnx too. `episodes`: greedy full games to be played for
    the card; with 0 it has the evaluator's score. `license` is what the card says of the weights. Files of an earlier
    export in `out` are replaced.

    Raises ConfigError if the run, policy or folder cannot be used, ExportError if ONNX cannot express the network.
    """
    checked("episodes", NonNegativeInt, episodes)
    require(license.strip() != "" and license.isprintable(), f"license must be a name, as in mit, got {license!r}")
    folder = RunFolder.open(Path(run))
    path = find_policy(folder.path, checkpoint)
    target = Path(out) if out is not None else folder.path / "export"
    info, network = read_policy(path)
    files = {
        MODEL: encode_policy(network, info, plain_names(info, network)),
        CONFIG: json.dumps({**asdict(info), "config": to_dict(folder.config)}, indent=2).encode() + b"\n",
    }
    compared = None
    if onnx:
        files[ONNX], compared = to_onnx(network, info.schema)
    played = evaluate(folder.path, episodes, checkpoint=path.absolute(), epsilon=0.0) if episodes else None
    card = write_card(
        folder,
        info,
        kind(info.environment) if info.schema.frame_dtype == "uint8" else "vector",
        evaluation=played,
        onnx=compared,
        steps=_steps_until(folder, path, info.num_updates),
        license=license,
    )
    files[CARD] = card.encode()
    try:
        if not onnx:
            (target / ONNX).unlink(missing_ok=True)
        for name, data in files.items():
            replace_file(target / name, data)
    except OSError as error:
        raise ConfigError(f"cannot write to {target}: {error.strerror}; choose another folder with --out") from error
    return target


def plain_names(info: PolicyInfo, network: nn.Module) -> dict[str, str]:
    """Names for the tensors of the state dict by layer: conv1 ... or linear1 ..., then the heads.

    A custom network's tensors keep their names.
    """
    if info.network.factory:
        return {}
    layer = "conv" if len(info.schema.frame_shape) == 2 else "linear"
    places = sorted({int(name.split(".")[1]) for name in network.state_dict() if name.startswith("body.")})
    names = {}
    for name in network.state_dict():
        part, place, leaf = name.split(".")
        if part == "body":
            names[name] = f"{layer}{places.index(int(place)) + 1}.{leaf}"
        elif not info.network.dueling:  # Its only head is the advantage's, and gives Q.
            names[name] = f"q.{place}.{leaf}"
    return names


def to_onnx(network: nn.Module, schema: Schema) -> tuple[bytes, OnnxFacts]:
    """The network as ONNX, and the comparison; raises ConfigError without the packages, ExportError if it differs."""
    try:
        importlib.import_module("onnx")  # torch's exporter wants it.
        runtime: Any = importlib.import_module("onnxruntime")
    except ImportError as error:
        raise ConfigError(
            f"--onnx needs onnx and onnxruntime, which are not here ({error}): {remedy('export')}"
        ) from error
    rng = np.random.default_rng(0)
    try:
        data = _write_onnx(network, torch.from_numpy(_observations(schema, 2, rng)))
        session = runtime.InferenceSession(data, providers=["CPUExecutionProvider"])
        observations = [_observations(schema, size, rng) for size in BATCHES]
        answers = [session.run(["q"], {"observation": batch})[0] for batch in observations]
    except Exception as error:  # Neither package documents what it raises.
        raise ExportError(f"the network cannot be written as ONNX: {type(error).__name__}: {error}") from error
    largest, num_differing = 0.0, 0
    for batch, answer in zip(observations, answers, strict=True):
        q = q_values(network, batch)
        difference = float(np.abs(answer - q).max()) if answer.shape == q.shape else np.inf
        if not difference <= TOLERANCE * max(1.0, float(np.abs(q).max())):
            raise ExportError(
                f"the network as ONNX gives other values than torch for a batch of {len(batch)}: they differ by "
                f"{difference:g}. Does its code look at the size of the batch, or at what is in it?"
            )
        largest = max(largest, difference)
        num_differing += int((answer.argmax(1) != q.argmax(1)).sum())
    return data, OnnxFacts(OPSET, largest, sum(BATCHES), num_differing, runtime.__version__)


def _write_onnx(network: nn.Module, example: torch.Tensor) -> bytes:
    axes = {"observation": {0: "batch"}, "q": {0: "batch"}}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        # torch's newer exporter takes ten times as long and needs another package; ignore the warning about this one.
        warnings.simplefilter("ignore")
        path = Path(folder) / ONNX
        torch.onnx.export(
            network,
            (example,),
            path,
            input_names=["observation"],
            output_names=["q"],
            dynamic_axes=axes,
            opset_version=OPSET,
            dynamo=False,
        )
        return path.read_bytes()


def _observations(schema: Schema, size: int, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    shape = (size, *schema.observation_shape)
    if schema.frame_dtype == "uint8":
        return rng.integers(256, size=shape, dtype=np.uint8)
    return rng.standard_normal(shape, dtype=np.float32)


def _steps_until(folder: RunFolder, path: Path, num_updates: int) -> int | None:
    """Environment steps when the policy was made, from its checkpoint or the curves; None if neither has them."""
    if path.is_dir():
        return read_manifest(path).progress.num_steps
    curve = folder.curves / "learner.jsonl"
    rows = read_curve(curve) if curve.exists() else []
    return next((row["steps"] for row in rows if row["scalars"].get("learner/updates", -1) >= num_updates), None)


@reports_errors("apex export")
def main(argv: Sequence[str]) -> int:
    """Returns the exit status; a user's mistake is a sentence on standard error."""
    options = _make_parser().parse_args(argv)
    target = export(
        options.run,
        options.out,
        checkpoint=options.checkpoint,
        onnx=options.onnx,
        episodes=options.episodes,
        license=options.license,
    )
    for name in sorted(os.listdir(target)):
        print(target / name)
    return FINISHED


def _make_parser() -> Parser:
    words = "Writes a run's weights for others: safetensors, a model card, ONNX."
    parser = Parser(prog="apex export", description=words)
    add = parser.add_argument
    add("run", metavar="RUN", help="a run folder, or its name below runs/")
    add("--out", type=Path, metavar="DIR", help="where to (default: RUN/export)")
    words = "which policy of the run (default: the best by its evaluator, else the last checkpoint)"
    add("--checkpoint", metavar="best|last|PATH", help=words)
    add("--onnx", action="store_true", help="model.onnx too, compared with torch by onnxruntime")
    words = "greedy full games for the card (default: none)"
    add("--episodes", type=non_negative_int, default=0, metavar="N", help=words)
    add("--license", default="mit", metavar="NAME", help="of the weights, for the card (default mit)")
    return parser
