"""What a run leaves on disk to go on from, and the policies that it leaves to be played: safetensors and JSON only.

A checkpoint is a folder `checkpoints/000012345/` named by its updates. It holds `learner.safetensors`, and
`manifest.json`, which names the size and the SHA-256 of what lies beside it and is written last: a folder without one
is not a checkpoint. A policy is one file; `checkpoints/best.safetensors` is the best by the evaluator.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import safetensors.torch
from numpy.typing import NDArray
from torch import Tensor, nn

from apex.config import Config, ConfigError, EnvironmentConfig, NetworkConfig, from_dict, to_dict
from apex.networks import load_parameters, make_network
from apex.types import Schema

FORMAT = 1  # of both kinds of file; grows when an older program could no longer read them
BEST = "best.safetensors"
_LEARNER = "learner.safetensors"
_MANIFEST = "manifest.json"

log = logging.getLogger("apex")
T = TypeVar("T")


class CheckpointError(ConfigError):
    """A file that is missing, damaged or of another format; the text names it and says why."""


class LearnerState(NamedTuple):
    """All that the learner needs to go on. Tensors may lie on any device; loaded ones lie on the CPU."""

    num_updates: int
    num_steps: int  # transitions that the replay server had stored
    config: Config
    schema: Schema
    online: dict[str, Any]  # state dicts, as torch gives and takes them
    target: dict[str, Any]
    optimizer: dict[str, Any]
    rng: dict[str, Any]  # generators' states by name: tensors, or whatever JSON can say


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PolicyInfo:
    """What one must know of a network to play with it."""

    schema: Schema
    network: NetworkConfig
    environment: EnvironmentConfig
    num_updates: int
    score: float | None  # mean raw score by the evaluator, if it was evaluated


class _Facts(NamedTuple):
    """What the manifest says of a file."""

    num_bytes: int
    sha256: str


# --- the learner's checkpoints --------------------------------------------------------------------------------------


def save(folder: Path, state: LearnerState) -> Path:
    """Writes a checkpoint below `folder`, on disk when this returns; the one of the same update is replaced."""
    path = folder / f"{state.num_updates:09d}"
    tensors: dict[str, Tensor] = {}
    tree = {**state._asdict(), "config": to_dict(state.config), "schema": state.schema.to_dict()}
    metadata = {"format": str(FORMAT), "state": json.dumps(_pack(tree, tensors, ""))}
    data = safetensors.torch.save(tensors, metadata)
    partial = _write_beside(path / _LEARNER, data)
    (path / _MANIFEST).unlink(missing_ok=True)  # An older one of this update is given up only now.
    os.replace(partial, path / _LEARNER)
    facts = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest = {"format": FORMAT, "num_updates": state.num_updates, "files": {_LEARNER: facts}}
    _write(path / _MANIFEST, json.dumps(manifest, indent=2).encode())
    _sync(folder)
    return path


def load(path: Path) -> LearnerState:
    """Reads and verifies the checkpoint in the folder `path`; raises CheckpointError unless it is whole."""
    data = _read_verified(path / _LEARNER, _read_manifest(path)[_LEARNER])
    return _parse(path / _LEARNER, lambda: _decode(data))


def load_latest(folder: Path) -> LearnerState | None:
    """The newest checkpoint below `folder` that is whole; None if none was ever finished.

    A bad one is logged as an error and passed over; raises CheckpointError where all are bad.
    """
    found = _find_latest(folder)
    return None if found is None else found[1]


def latest_good(folder: Path) -> Path | None:
    """Where `load_latest` finds its checkpoint; it logs and raises as that does."""
    found = _find_latest(folder)
    return None if found is None else found[0]


def _find_latest(folder: Path) -> tuple[Path, LearnerState] | None:
    causes = []
    for path in _checkpoints(folder):
        try:
            return path, load(path)
        except CheckpointError as error:
            if (path / _MANIFEST).exists():  # Else it was never finished, or was being removed.
                causes.append(str(error))
            log.error("%s; trying the checkpoint before it", error)
    if causes:
        raise CheckpointError(f"no checkpoint in {folder} is whole; the newest: {causes[0]}")
    return None


def verify(path: Path) -> None:
    """Raises CheckpointError unless every file of the checkpoint is the one that was written."""
    for name, facts in _read_manifest(path).items():
        _read_verified(path / name, facts)


def prune(folder: Path, keep: int) -> None:
    """Removes all but the `keep` newest checkpoints; nothing while the newest is not whole. Policies stay."""
    checkpoints = _checkpoints(folder)
    finished = [path for path in checkpoints if (path / _MANIFEST).exists()]
    if not finished:
        return
    try:
        verify(finished[0])
    except CheckpointError as error:
        log.error("%s; no older checkpoint is removed", error)
        return
    for path in checkpoints[checkpoints.index(finished[0]) :]:
        if path not in finished[:keep]:
            (path / _MANIFEST).unlink(missing_ok=True)  # First: what is half removed is no checkpoint.
            shutil.rmtree(path, ignore_errors=True)


# --- policies -------------------------------------------------------------------------------------------------------


def save_policy(path: Path, values: NDArray[np.float32], info: PolicyInfo) -> None:
    """Writes the network of `values` (every tensor of the state dict, flattened) in one atomic step."""
    network = make_network(info.network, info.schema, seed=0)
    load_parameters(network, values)
    fields = {
        "schema": info.schema.to_dict(),
        "network": dataclasses.asdict(info.network),
        "environment": dataclasses.asdict(info.environment),
        "num_updates": info.num_updates,
        "score": info.score,
    }
    tensors = {name: tensor.contiguous().clone() for name, tensor in network.state_dict().items()}
    metadata = {"format": str(FORMAT), "policy": json.dumps(fields), "sha256": _hash(tensors)}
    _write(path, safetensors.torch.save(tensors, metadata))


def load_policy(path: Path) -> tuple[PolicyInfo, nn.Module]:
    """Reads a policy file, or the online network of a checkpoint's folder: what it is, and the network to play with.

    Raises CheckpointError unless it is whole. A network or an environment of the user's own is imported by its name.
    """
    if path.is_dir():
        state = load(path)
        config = state.config
        info = PolicyInfo(
            schema=state.schema,
            network=config.network,
            environment=config.environment,
            num_updates=state.num_updates,
            score=None,
        )
        return info, _make_policy(path, info, state.online)
    data = _read(path)
    info, tensors = _parse(path, lambda: _decode_policy(data))
    return info, _make_policy(path, info, tensors)


def _decode_policy(data: bytes) -> tuple[PolicyInfo, dict[str, Tensor]]:
    metadata, tensors = _metadata(data), safetensors.torch.load(data)
    if _hash(tensors) != metadata["sha256"]:
        raise ValueError("its SHA-256 is not the one that was written")
    fields = json.loads(metadata["policy"])
    config = from_dict({"network": fields["network"], "environment": fields["environment"]})
    info = PolicyInfo(
        schema=Schema.from_dict(fields["schema"]),
        network=config.network,
        environment=config.environment,
        num_updates=int(fields["num_updates"]),
        score=None if fields["score"] is None else float(fields["score"]),
    )
    return info, tensors


def _make_policy(path: Path, info: PolicyInfo, tensors: dict[str, Any]) -> nn.Module:
    network = make_network(info.network, info.schema, seed=0)
    try:
        network.load_state_dict(tensors)
    except RuntimeError as error:
        raise CheckpointError(f"{path} does not fit the network that it names: {error}") from error
    return network.eval()


def _hash(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].detach().contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()


# --- trees of tensors -----------------------------------------------------------------------------------------------


def _pack(tree: Any, tensors: dict[str, Tensor], name: str) -> Any:
    """`tree` as JSON, its tensors laid into `tensors`. JSON has neither tuples nor keys that are numbers: both are
    spelled out, so that `_unpack` gives the very same tree."""
    if isinstance(tree, Tensor):
        while name in tensors:  # {"a.b": ..., "a": {"b": ...}}
            name += "'"
        tensors[name] = tree.detach().to("cpu", copy=True).contiguous()
        return {"tensor": name}
    if isinstance(tree, dict):
        return {"dict": [[key, _pack(value, tensors, f"{name}.{key}".strip("."))] for key, value in tree.items()]}
    if isinstance(tree, list | tuple):
        kind = "list" if isinstance(tree, list) else "tuple"
        return {kind: [_pack(value, tensors, f"{name}.{i}") for i, value in enumerate(tree)]}
    if isinstance(tree, bool | int | float | str | None):
        return tree
    raise TypeError(f"{name} is {type(tree).__name__}: a checkpoint holds tensors, and what JSON can say")


def _unpack(packed: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(packed, dict):
        return packed
    ((kind, value),) = packed.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "dict":
        return {key: _unpack(entry, tensors) for key, entry in value}
    entries = [_unpack(entry, tensors) for entry in value]
    return entries if kind == "list" else tuple(entries)


def _decode(data: bytes) -> LearnerState:
    tree = _unpack(json.loads(_metadata(data)["state"]), safetensors.torch.load(data))
    tree["config"], tree["schema"] = from_dict(tree["config"]), Schema.from_dict(tree["schema"])
    return LearnerState(**tree)


def _metadata(data: bytes) -> dict[str, str]:
    """The text beside the tensors of a safetensors file: uint64 length, then that many bytes of JSON."""
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    metadata: dict[str, str] = header["__metadata__"]
    if metadata["format"] != str(FORMAT):
        raise ValueError(f"its format is {metadata['format']}, but this program reads {FORMAT}")
    return metadata


# --- files ----------------------------------------------------------------------------------------------------------


def _checkpoints(folder: Path) -> list[Path]:
    """Newest first, by updates; also those that are not whole."""
    paths = folder.iterdir() if folder.is_dir() else ()
    named = [path for path in paths if re.fullmatch(r"\d{9,}", path.name)]
    return sorted(named, key=lambda path: int(path.name), reverse=True)


def _read_manifest(path: Path) -> dict[str, _Facts]:
    file = path / _MANIFEST
    if path.is_dir() and not file.exists():
        raise CheckpointError(f"{path} is not a whole checkpoint: no {_MANIFEST}, which is written last")
    data = _read(file)

    def parse() -> dict[str, _Facts]:
        manifest = json.loads(data)
        if manifest["format"] != FORMAT:
            raise ValueError(f"its format is {manifest['format']}, but this program reads {FORMAT}")
        files = {str(name): manifest["files"][name] for name in {_LEARNER, *manifest["files"]}}
        return {name: _Facts(int(facts["bytes"]), str(facts["sha256"])) for name, facts in files.items()}

    return _parse(file, parse)


def _read_verified(file: Path, facts: _Facts) -> bytes:
    data = _read(file)
    if len(data) != facts.num_bytes:
        raise CheckpointError(f"{file} is damaged: it has {len(data)} bytes, not {facts.num_bytes}")
    if hashlib.sha256(data).hexdigest() != facts.sha256:
        raise CheckpointError(f"{file} is damaged: its SHA-256 is not the one that was written")
    return data


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error


def _parse(path: Path, parse: Callable[[], T]) -> T:
    """Calls `parse`; whatever it cannot make sense of becomes a sentence about `path`."""
    try:
        return parse()
    except (safetensors.SafetensorError, KeyError, TypeError, ValueError) as error:
        cause = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"{path} cannot be read: {cause}") from error


def _write(path: Path, data: bytes) -> None:
    """Replaces `path` on the disk: whatever happens, it is the old file or the new one, never half of it."""
    os.replace(_write_beside(path, data), path)
    _sync(path.parent)


def _write_beside(path: Path, data: bytes) -> Path:
    """Writes a file next to `path` and has its bytes reach the disk; nothing is left of it on a full one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    return partial


def _sync(folder: Path) -> None:
    """Has the names in `folder` reach the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
