"""`apex export`: writes a run's weights to files that torch and safetensors can load without this package.

OUT/
    model.safetensors   float32 tensors, named by layer
    README.md           the model card
    config.json         environment, network and schema; every setting of the run
    model.onnx          with --onnx; checked to have the same outputs as torch
"""

import copy
import importlib
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from apex.algorithms.exported import Exported
from apex.algorithms.impala import Pool
from apex.algorithms.interface import make_algorithm
from apex.config import to_dict
from apex.config.arguments import Parser, non_negative_int
from apex.config.validation import NonNegativeInt, checked
from apex.errors import ExportError
from apex.evaluation.command import evaluate
from apex.evaluation.export.hub import OPTION, open_hub, push
from apex.evaluation.export.model_card import OnnxFacts, write_card
from apex.evaluation.policy import add_policy
from apex.runs.checkpoints.checkpoint import read_manifest
from apex.runs.checkpoints.policy_file import PolicyInfo, encode_policy, read_policy
from apex.runs.find_policy import find_policy
from apex.runs.folder import RunFolder, open_run
from apex.runs.lock import require_no_links
from apex.runs.metrics.writer import iterate_curve
from apex.runtime import trust
from apex.runtime.optional_imports import remedy
from apex.schema import Part, Schema
from apexreplay.errors import FINISHED, UsageError, require
from apexreplay.files.atomic_files import replace_file
from apexreplay.process.lifecycle import reports_errors

MODEL, CARD, CONFIG, ONNX = "model.safetensors", "README.md", "config.json", "model.onnx"
STATE, NEXT_STATE = "state", "next_state"  # input and output of a recurrent network
OPSET = 18  # ONNX opset of 2022, which all current runtimes support
TOLERANCE = 1e-3  # largest allowed difference between ONNX and torch, as a fraction of max(1, largest |output|)
BATCHES = (1, 5, 250)  # sizes of the random batches on which ONNX and torch are compared

log = logging.getLogger("apex")


def export(
    run: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    onnx: bool = False,
    episodes: int = 0,
    license: str = "mit",
    allow: str | Iterable[str] = (),
) -> Path:
    """Writes a run's weights and their model card to the folder `out`, by default RUN/export, and returns the folder.

    `checkpoint` and `allow` are as in `apex.load_policy`. `onnx`: also write model.onnx. `episodes`: number of greedy
    full games to play for the score on the card; 0: use the evaluator's score. `license`: the license of the weights,
    for the card. Replaces the files of an earlier export in `out`.

    Raises UsageError if the run, policy or folder cannot be used, and ExportError if the ONNX export fails. Logs a
    warning if the policy has made no update.
    """
    checked("episodes", NonNegativeInt, episodes)
    require(license.strip() != "" and license.isprintable(), f"license must be a name such as mit, got {license!r}")
    trust.allow(allow)
    folder = RunFolder.open(Path(run))
    path = find_policy(folder.path, checkpoint)
    if out is None:
        require_no_links(folder.path)
    target = Path(out) if out is not None else folder.path / "export"
    info, agent = read_policy(path)
    if not info.num_updates:
        log.warning("%s has made no update: its weights are those that training began with", path)
    there = [name for name in (MODEL, CONFIG, CARD, ONNX) if (target / name).exists()]
    problem = f"{target} has {', '.join(there)}, but no {MODEL}, so it is not the folder of an earlier export"
    require(not there or MODEL in there, problem, remedy="choose another folder with --out")
    exported = _find_exported(info, agent.network)
    files = {
        MODEL: encode_policy(exported.module, info, exported.names),
        CONFIG: json.dumps({**info.to_dict(), "config": to_dict(folder.config)}, indent=2).encode() + b"\n",
    }
    compared = None
    if onnx:
        files[ONNX], compared = to_onnx(exported.module, info.schema, exported.output, exported.state_size)
    played = evaluate(folder.path, episodes, checkpoint=path.absolute(), epsilon=0.0) if episodes else None
    replaced = played is not None and played.updates != info.num_updates
    problem = f"{path} was replaced by a better policy meanwhile, so its score is of other weights"
    require(not replaced, problem, remedy="export it again, or with --checkpoint last")
    card = write_card(
        folder,
        info,
        exported,
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
        raise UsageError(f"cannot write to {target}: {error.strerror}", "choose another folder with --out") from error
    return target


def _find_exported(info: PolicyInfo, network: nn.Module) -> Exported:
    """Returns the algorithm's description of the network; raises UsageError if it supports no export."""
    algorithm = make_algorithm(info.config, info.schema)
    make: Callable[[nn.Module], Exported] | None = getattr(algorithm, "make_exported", None)
    if make is None:
        raise UsageError(f"policies of the algorithm {algorithm.name!r} cannot be exported: it has no make_exported")
    return make(network)


def to_onnx(network: nn.Module, schema: Schema, output: str = "q", state_size: int = 0) -> tuple[bytes, OnnxFacts]:
    """Returns the network as ONNX, and its comparison with torch. `state_size`: see `Exported`.

    Raises UsageError if a package is missing, and ExportError if the conversion fails or the outputs differ.
    """
    try:
        importlib.import_module("onnx")  # Needed by torch's exporter.
        runtime: Any = importlib.import_module("onnxruntime")
    except ImportError as error:
        raise UsageError(f"--onnx: {error}", f"install onnx and onnxruntime: {remedy('export')}") from error
    rng = np.random.default_rng(0)
    try:
        names = [_free_name(name, schema) for name in (output, NEXT_STATE)[: 2 if state_size else 1]]
        written = _TakesTensors(_for_onnx(network), schema, state_size)
        data = _write_onnx(written, names, _inputs(schema, state_size, 2, rng))
        network = _TakesTensors(network, schema, state_size)
        session = runtime.InferenceSession(data, providers=["CPUExecutionProvider"])
        batches = [_inputs(schema, state_size, size, rng) for size in BATCHES]
        outputs = [session.run(names, {name: part.numpy() for name, part in batch.items()}) for batch in batches]
    except Exception as error:  # The packages do not document which errors they raise.
        raise ExportError(f"the network cannot be written as ONNX: {type(error).__name__}: {error}") from error
    largest, num_differing = 0.0, 0
    for batch, results in zip(batches, outputs, strict=True):
        with torch.inference_mode():
            wanted = [result.numpy() for result in network(*batch.values())]
        for found, expected in zip(results, wanted, strict=True):
            difference = float(np.abs(found - expected).max()) if found.shape == expected.shape else np.inf
            if not difference <= TOLERANCE * max(1.0, float(np.abs(expected).max())):
                size = len(found)
                problem = f"the outputs of the ONNX network differ from torch by {difference:g} for a batch of {size}"
                raise ExportError(problem, "remove branches that depend on the size or the values of the batch")
            largest = max(largest, difference)
        num_differing += int((results[0].argmax(1) != wanted[0].argmax(1)).sum())
    return data, OnnxFacts(
        OPSET, largest, sum(BATCHES), num_differing, runtime.__version__, _free_name(STATE, schema), names
    )


def _for_onnx(network: nn.Module) -> nn.Module:
    """Returns a copy whose layers ONNX has."""
    network = copy.deepcopy(network)
    for module in list(network.modules()):
        for name, layer in module.named_children():
            if isinstance(layer, nn.AdaptiveMaxPool2d):
                size: Any = layer.output_size  # a number, or two numbers of which None means the input's
                size = (size, size) if isinstance(size, int) else size
                if None not in size:
                    setattr(module, name, Pool(size))
    return network


class _TakesTensors(nn.Module):
    """Calls a network with the parts of an observation, each given as a tensor of its own, or with the only array.

    A recurrent network also takes the state before this observation, and returns the one after it.
    """

    def __init__(self, network: nn.Module, schema: Schema, state_size: int) -> None:
        super().__init__()
        self.network = network
        self._names = [part.name for part in schema.parts]
        self._is_recurrent = state_size > 0

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns the outputs of the network."""
        parts = inputs[:-1] if self._is_recurrent else inputs
        named = dict(zip(self._names, parts, strict=True)) if self._names else parts[0]
        if not self._is_recurrent:
            return (self.network(named),)
        q, state = self.network(named, inputs[-1])
        return q[:, 0], state


def _write_onnx(network: nn.Module, outputs: list[str], example: dict[str, torch.Tensor]) -> bytes:
    axes = {name: {0: "batch"} for name in (*example, *outputs)}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        # torch's newer exporter takes ten times as long and needs another package: ignore the deprecation warning.
        warnings.simplefilter("ignore")
        path = Path(folder) / ONNX
        torch.onnx.export(
            network,
            tuple(example.values()),
            path,
            input_names=list(example),
            output_names=outputs,
            dynamic_axes=axes,
            opset_version=OPSET,
            dynamo=False,
        )
        return path.read_bytes()


def _inputs(schema: Schema, state_size: int, size: int, rng: np.random.Generator) -> dict[str, torch.Tensor]:
    """Returns random inputs of the network by name."""

    def draw(part: Part) -> np.ndarray[Any, Any]:
        shape = (size, schema.stack, *part.shape)
        if part.dtype == "float32":
            return rng.standard_normal(shape, dtype=np.float32)
        return rng.integers(part.most + 1 if part.dtype != "bool" else 2, size=shape, dtype=part.stored_as)

    inputs = {part.name: torch.from_numpy(draw(part)) for part in schema.all_parts}
    if state_size:
        inputs[_free_name(STATE, schema)] = torch.from_numpy(rng.standard_normal((size, state_size), dtype=np.float32))
    return inputs


def _free_name(name: str, schema: Schema) -> str:
    """Returns the name of an input or output that is no part of the observation; a part may have the same name."""
    return name if name not in [part.name for part in schema.all_parts] else f"network_{name}"


def _steps_until(folder: RunFolder, path: Path, num_updates: int) -> int | None:
    """Returns the environment steps of the policy, from its checkpoint or the curves; None if neither records them."""
    if path.is_dir():
        return read_manifest(path).progress.num_steps
    rows = iterate_curve(folder.curves / "learner.jsonl")
    return next((row["steps"] for row in rows if row["scalars"].get("learner/updates", -1) >= num_updates), None)


@reports_errors("apex export")
def main(argv: Sequence[str]) -> int:
    """Runs `apex export`; returns the exit status. A user's mistake is reported in one sentence."""
    options = _make_parser().parse_args(argv)
    name = options.push_to_hub
    require(name is not None or not options.private, f"--private needs {OPTION} USER/NAME", remedy="add it")
    hub = None if name is None else open_hub(name)
    target = export(
        open_run(options.run, with_policy=True).path,
        options.out,
        checkpoint=options.checkpoint,
        onnx=options.onnx,
        episodes=options.episodes,
        license=options.license,
    )
    for file in sorted(os.listdir(target)):
        print(target / file)
    if hub is not None:
        files = (MODEL, CARD, CONFIG, *((ONNX,) if options.onnx else ()))
        print(push(hub, name, target, files, private=options.private))
    return FINISHED


def _make_parser() -> Parser:
    parser = Parser(
        prog="apex export",
        description="Writes a run's weights for use without this package: safetensors, a model card, ONNX.",
    )
    add_policy(parser)
    add = parser.add_argument
    add("--out", type=Path, metavar="DIR", help="folder for the files (default: RUN/export)")
    add("--onnx", action="store_true", help="also write model.onnx, and compare its outputs with torch")
    add(
        "--episodes",
        type=non_negative_int,
        default=0,
        metavar="N",
        help="number of greedy full games to play for the score on the card (default 0: the evaluator's score)",
    )
    add("--license", default="mit", metavar="NAME", help="license of the weights, for the card (default mit)")
    add(OPTION, metavar="USER/NAME", help="upload the files to this model of the Hugging Face Hub, as one commit")
    add("--private", action="store_true", help="nobody else may see a model that the upload creates")
    return parser
