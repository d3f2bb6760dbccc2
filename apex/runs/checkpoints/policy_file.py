"""The policies that a run leaves to be played: one safetensors file each, the best by the evaluator and the one before.

`checkpoints/best.safetensors` is the best so far, `best-before.safetensors` the best until then: whichever is whole.
The header of each file holds its manifest, with the SHA-256 of the tensors.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from apex.config import EnvironmentConfig, NetworkConfig, from_dict
from apex.dqn.networks import load_parameters, make_network
from apex.runs.checkpoints.checkpoint import CheckpointError, load_checkpoint, parse_file, read_file
from apex.runs.checkpoints.tensor_file import decode, digest_of, encode
from apex.runtime.atomic_files import replace_file, seal, sync_folder, unseal
from apex.types import Schema

FORMAT = 3  # grows when an older program could no longer read the files
OLD_FORMAT = 2  # of files whose SHA-256 was computed in another way; it is not checked
BEST = "best.safetensors"
BEFORE = "best-before.safetensors"

log = logging.getLogger("apex")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlayedGames:
    """The games that gave a policy its score. Who plays them again, with the same epsilon, gets the same score."""

    seed: int  # of the environments and of the random actions
    episodes: int
    num_envs: int  # side by side
    epsilon: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PolicyInfo:
    """What one must know of a network to play with it."""

    schema: Schema
    network: NetworkConfig
    environment: EnvironmentConfig
    num_updates: int
    score: float | None  # mean raw score by the evaluator, if it was evaluated
    games: PlayedGames | None = None  # that gave the score; older files lack it


def save_policy(path: Path, values: NDArray[np.float32], info: PolicyInfo) -> None:
    """Writes the network of `values` (every tensor of the state dict, flattened) in one atomic step."""
    network = make_network(info.network, info.schema, seed=0)
    load_parameters(network, values)
    replace_file(path, encode_policy(network, info))


def encode_policy(network: nn.Module, info: PolicyInfo, names: Mapping[str, str] = MappingProxyType({})) -> bytes:
    """A policy file. `names`: what tensors of the state dict are called in it, where that is another name."""
    tensors = {names.get(name, name): tensor.contiguous().clone() for name, tensor in network.state_dict().items()}
    manifest = {
        **dataclasses.asdict(info),
        "names": {new: old for old, new in names.items()},
        "sha256": digest_of(tensors),
    }
    return encode(tensors, {"format": str(FORMAT), "policy": seal(manifest).decode()})


def save_best(folder: Path, values: NDArray[np.float32], info: PolicyInfo) -> None:
    """Makes this the best policy. The one until now stays beside it, in case this file is damaged some day."""
    best, before = folder / BEST, folder / BEFORE
    if best.exists() and _fault(best) is None:  # A damaged one must not push out the one that is whole.
        partial = before.with_name(f".{BEFORE}.partial")
        partial.unlink(missing_ok=True)
        os.link(best, partial)
        os.replace(partial, before)
        sync_folder(folder)
    save_policy(best, values, info)


def find_best(folder: Path) -> Path | None:
    """The best policy that is whole; None if none was ever kept.

    A damaged or missing one is logged, and the one before it taken; raises CheckpointError where none is whole.
    """
    causes = []
    for path in (folder / BEST, folder / BEFORE):
        if not path.exists():
            if path.name == BEST and (folder / BEFORE).exists():
                log.error("%s is missing; the best policy before it is taken", path)
            continue
        cause = _fault(path)
        if cause is None:
            return path
        causes.append(cause)
        log.error("%s; looking for the best policy before it", cause)
    if causes:
        raise CheckpointError(f"no best policy in {folder} is whole: {causes[0]}")
    return None


def read_policy(path: Path) -> tuple[PolicyInfo, nn.Module]:
    """Reads a policy file, or the online network of a checkpoint's folder: what it is, and the network to play with.

    Raises CheckpointError unless it is whole. A network or an environment of the user's own is imported by its name.
    """
    if path.is_dir():
        state = load_checkpoint(path)
        config = state.config
        info = PolicyInfo(
            schema=state.schema,
            network=config.network,
            environment=config.environment,
            num_updates=state.num_updates,
            score=None,
        )
        return info, _make_policy(path, info, state.online)
    info, tensors = _read(path)
    return info, _make_policy(path, info, tensors)


def _fault(path: Path) -> str | None:
    try:
        _read(path)
    except CheckpointError as error:
        return str(error)
    return None


def _read(path: Path) -> tuple[PolicyInfo, dict[str, Tensor]]:
    data = read_file(path)
    return parse_file(path, lambda: _decode_policy(data))


def _decode_policy(data: bytes) -> tuple[PolicyInfo, dict[str, Tensor]]:
    metadata, tensors = decode(data, FORMAT, OLD_FORMAT)
    if metadata["format"] == str(OLD_FORMAT):
        fields = {"names": json.loads(metadata.get("names", "{}"))} | json.loads(metadata["policy"])
    else:
        fields = unseal(metadata["policy"].encode())
        if digest_of(tensors) != fields["sha256"]:
            raise ValueError("the SHA-256 of its tensors is not the one that was written")
    config = from_dict({"network": fields["network"], "environment": fields["environment"]})
    games = fields.get("games")
    info = PolicyInfo(
        schema=Schema.from_dict(fields["schema"]),
        network=config.network,
        environment=config.environment,
        num_updates=int(fields["num_updates"]),
        score=None if fields["score"] is None else float(fields["score"]),
        games=None if games is None else PlayedGames(**games),
    )
    return info, {fields["names"].get(name, name): tensor for name, tensor in tensors.items()}


def _make_policy(path: Path, info: PolicyInfo, tensors: dict[str, Any]) -> nn.Module:
    network = make_network(info.network, info.schema, seed=0)
    try:
        network.load_state_dict(tensors)
    except RuntimeError as error:
        raise CheckpointError(f"{path} does not fit the network that it names: {error}") from error
    return network.eval()
