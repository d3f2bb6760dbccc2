"""Writes and reads policy files: a run keeps the policy with the best evaluation score, and the previous best policy.

`checkpoints/best.safetensors` is the best policy. `best-before.safetensors` is the previous best, which is used if the
first file is damaged. The header of each safetensors file contains its manifest, with the SHA-256 of the tensors.
"""

import dataclasses
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from apex.algorithms.interface import Agent, make_algorithm
from apex.algorithms.parameters import load_parameters
from apex.config import Config, EnvironmentConfig, from_saved
from apex.errors import CheckpointError
from apex.runs.checkpoints.checkpoint import load_checkpoint
from apex.runs.checkpoints.paths import BEST
from apex.runs.checkpoints.tensor_file import decode, digest_of, encode
from apex.schema import Schema
from apexreplay.files.atomic_files import replace_file, seal, unseal
from apexreplay.files.sealed_folder import naming

FORMAT = 5  # increased when older versions cannot read new files
WITHOUT_PARTS = 4  # format whose images, of any environment, were gray and four in a stack
WITHOUT_ACTIONS = 3  # also without actions in the schema: all actions are discrete, without masks
WITHOUT_SEAL = 2  # also without actions; its SHA-256 was computed in another way and is not checked
BEFORE = "best-before.safetensors"

log = logging.getLogger("apex")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlayedGames:
    """The games that gave a policy its score.

    Playing them again with the same epsilon gives the same score, unless several looks have confirmed it: each look
    begins with new games.
    """

    seed: int  # seed of the environments and the random actions
    episodes: int
    num_envs: int  # environments that play at the same time
    epsilon: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PolicyInfo:
    """All that is needed to play with a network."""

    schema: Schema
    config: Config  # of the run; a policy file contains only the branches that `to_dict` returns
    num_updates: int
    score: float | None  # mean raw score by the evaluator; None: not evaluated
    games: PlayedGames | None = None  # games that gave the score; None in older files

    @property
    def environment(self) -> EnvironmentConfig:
        """The environment that the policy was trained in."""
        return self.config.environment

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields, with branches of the configuration in the place of `config`.

        For the algorithms of Ape-X, these are the ones that define the policy, so that other settings may change
        between versions. A custom algorithm may use any setting, except those of the run and its network connections.
        """
        fields = dataclasses.asdict(self)
        config = fields.pop("config")
        if ":" in config["algorithm"]:
            return fields | {name: branch for name, branch in config.items() if name not in ("run", "transport")}
        return fields | {name: config[name] for name in ("algorithm", "network", "iqn", "dpg", "environment")}


def save_policy(path: Path, values: NDArray[np.float32], info: PolicyInfo) -> None:
    """Writes the network of `values` (every tensor of the state dict, flattened) in one atomic step."""
    network = make_algorithm(info.config, info.schema).make_network()
    load_parameters(network, values)
    replace_file(path, encode_policy(network, info))


def encode_policy(network: nn.Module, info: PolicyInfo, names: Mapping[str, str] = MappingProxyType({})) -> bytes:
    """Returns the bytes of a policy file. `names`: for each renamed tensor of the state dict, its name in the file."""
    tensors = {names.get(name, name): tensor.contiguous().clone() for name, tensor in network.state_dict().items()}
    manifest = {**info.to_dict(), "names": {new: old for old, new in names.items()}, "sha256": digest_of(tensors)}
    return encode(tensors, {"format": str(FORMAT), "policy": seal(manifest).decode()})


def save_best(folder: Path, values: NDArray[np.float32], info: PolicyInfo) -> None:
    """Saves the best policy. The previous best policy stays beside it, in case the new file is damaged later."""
    best, before = folder / BEST, folder / BEFORE
    if best.exists() and _fault(best) is None:  # A damaged file must not replace an intact one.
        replace_file(before, best.read_bytes())  # Not every file system has hard links.
    save_policy(best, values, info)


def find_best(folder: Path) -> Path | None:
    """Returns the path of the best policy that is intact; None if there is no policy file.

    If the best policy is damaged or missing, logs an error and uses the previous best. Raises CheckpointError if no
    file is intact.
    """
    causes = []
    for path in (folder / BEST, folder / BEFORE):
        if not path.exists():
            if path.name == BEST and (folder / BEFORE).exists():
                log.error("%s is missing; using the previous best policy instead", path)
            continue
        cause = _fault(path)
        if cause is None:
            return path
        causes.append(cause)
        log.error("%s; trying the previous best policy instead", cause)
    if causes:
        raise CheckpointError(f"no best policy in {folder} is intact: {causes[0]}")
    return None


def read_policy(path: Path) -> tuple[PolicyInfo, Agent]:
    """Reads a policy file, or the online network of a checkpoint's folder; returns its description and its agent.

    Raises CheckpointError unless the file is intact. Imports networks and environments of the user by their names.
    """
    if path.is_dir():
        state = load_checkpoint(path)
        info = PolicyInfo(schema=state.schema, config=state.config, num_updates=state.num_updates, score=None)
        return info, _make_policy(path, info, state.online)
    info, tensors = _read(path)
    return info, _make_policy(path, info, tensors)


def read_tensors(path: Path) -> tuple[int, dict[str, Tensor]]:
    """Reads a policy file, or the online network of a checkpoint's folder, without building the network.

    Returns its number of updates, and its tensors by name. Raises CheckpointError unless the file is intact.
    """
    if path.is_dir():
        state = load_checkpoint(path)
        return state.num_updates, dict(state.online)
    info, tensors = _read(path)
    return info.num_updates, tensors


def _fault(path: Path) -> str | None:
    try:
        _read(path)
    except CheckpointError as error:
        return str(error)
    return None


def _read(path: Path) -> tuple[PolicyInfo, dict[str, Tensor]]:
    with naming(path, CheckpointError):
        return _decode_policy(path.read_bytes())


def _decode_policy(data: bytes) -> tuple[PolicyInfo, dict[str, Tensor]]:
    metadata, tensors = decode(data, FORMAT, WITHOUT_PARTS, WITHOUT_ACTIONS, WITHOUT_SEAL)
    if metadata["format"] == str(WITHOUT_SEAL):
        fields = {"names": json.loads(metadata.get("names", "{}"))} | json.loads(metadata["policy"])
    else:
        fields = unseal(metadata["policy"].encode())
        if digest_of(tensors) != fields["sha256"]:
            raise ValueError("the SHA-256 of its tensors differs from the recorded one")
    config = from_saved({name: fields[name] for name in Config.field_types() if name in fields})
    schema = fields["schema"]
    if metadata["format"] in (str(WITHOUT_ACTIONS), str(WITHOUT_SEAL)):
        schema = {**schema, "action_size": 0, "masked": False}
    if metadata["format"] != str(FORMAT):
        schema = {**schema, "parts": ()}
        environment = dataclasses.replace(config.environment, frame_stack=schema["stack"], grayscale=True)
        config = dataclasses.replace(config, environment=environment)
    games = fields.get("games")
    info = PolicyInfo(
        schema=Schema.from_dict(schema),
        config=config,
        num_updates=int(fields["num_updates"]),
        score=None if fields["score"] is None else float(fields["score"]),
        games=None if games is None else PlayedGames(**games),
    )
    return info, {fields["names"].get(name, name): tensor for name, tensor in tensors.items()}


def _make_policy(path: Path, info: PolicyInfo, tensors: dict[str, Any]) -> Agent:
    algorithm = make_algorithm(info.config, info.schema)
    network = algorithm.make_network()
    try:
        network.load_state_dict(tensors)
    except RuntimeError as error:
        raise CheckpointError(f"the tensors of {path} do not fit the network that it names: {error}") from error
    return algorithm.make_agent(network)
