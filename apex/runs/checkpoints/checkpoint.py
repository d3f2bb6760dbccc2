"""Writes and reads checkpoints, from which a run is resumed: safetensors and JSON only.

A checkpoint is a `SealedFolder`, `checkpoints/000012345/`, named by its number of updates, with two files:
`learner.safetensors`, and `manifest.json`. The manifest has the size and the SHA-256 of the other file, the progress of
the run, and the replay snapshots that belong to the checkpoint. A folder without a manifest is not a checkpoint.
`checkpoints/newest.json` names the newest checkpoint, so that its loss is noticed.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from apex.config import Config, from_saved, to_dict
from apex.errors import CheckpointError
from apex.runs.checkpoints.paths import MANIFEST, NEWEST
from apex.runs.checkpoints.tensor_file import decode, encode, pack, unpack
from apex.schema import Schema
from apex.types import Progress
from apexreplay.files.atomic_files import Steps, uninterrupted
from apexreplay.files.sealed_folder import SealedFile, SealedFolder, naming

FORMAT = 3  # version of both files' format; increased when older versions cannot read new files


class LearnerState(NamedTuple):
    """All that the learner needs to continue. Tensors may be on any device; loaded tensors are on the CPU."""

    num_updates: int
    progress: Progress
    config: Config
    schema: Schema
    online: dict[str, Any]  # `online`, `target` and `optimizer` are state dicts of torch
    target: dict[str, Any]
    optimizer: dict[str, Any]
    rng: dict[str, Any]  # states of the random number generators by name: tensors or JSON values


class ReplayPart(NamedTuple):
    """A snapshot of one shard that belongs to a checkpoint, stored beside the checkpoint or on the shard's host."""

    shard: int
    number: int  # number of the snapshot
    size: int  # transitions


class Manifest(NamedTuple):
    """The content of a checkpoint's manifest."""

    num_updates: int
    progress: Progress
    file: SealedFile
    replay: list[ReplayPart]


def sealed_folder(path: Path, steps: Steps = uninterrupted) -> SealedFolder:
    """Returns the folder of a checkpoint, or the folder of all checkpoints, as a `SealedFolder`."""
    names = r"learner(-\d+)?\.safetensors|manifest\.json|newest\.json"
    return SealedFolder(path, FORMAT, CheckpointError, names=names, steps=steps)


def save_checkpoint(
    folder: Path, state: LearnerState, replay: Sequence[ReplayPart] = (), *, steps: Steps = uninterrupted
) -> Path:
    """Writes a checkpoint below `folder` and flushes it to disk; replaces a checkpoint of the same update.

    Raises OSError if the disk refuses a write. In that case the new checkpoint is removed, and all older ones stay.
    `steps` is called before each step.
    """
    path = folder / f"{state.num_updates:09d}"
    sealed, data = sealed_folder(path, steps), _encode(state)
    try:
        file = sealed.write(_unused_name(path), data)
        listed = {"file": file.name, "num_bytes": file.num_bytes, "sha256": file.sha256}
        progress, parts = state.progress._asdict(), [part._asdict() for part in replay]
        sealed.seal(MANIFEST, {"num_updates": state.num_updates, "progress": progress, **listed, "replay": parts})
    except OSError:
        _keep_listed(sealed)
        raise
    note_newest(folder, state.num_updates, steps)
    _keep_listed(sealed)  # Removes the files of the replaced checkpoint, or of a killed save.
    return path


def load_checkpoint(path: Path) -> LearnerState:
    """Reads and verifies the checkpoint in the folder `path`; raises CheckpointError unless it is intact."""
    return load_with_manifest(path)[0]


def load_with_manifest(path: Path) -> tuple[LearnerState, Manifest]:
    """Reads and verifies a checkpoint as `load_checkpoint` does; also returns its manifest."""
    manifest, data = verify(path)
    with naming(path / manifest.file.name, CheckpointError):
        return _decode(data), manifest


def note_newest(folder: Path, num_updates: int, steps: Steps = uninterrupted) -> None:
    """Records in newest.json which checkpoint is the newest."""
    sealed_folder(folder, steps).seal(NEWEST, {"num_updates": num_updates})


def verify(path: Path) -> tuple[Manifest, bytes]:
    """Returns a checkpoint's manifest and its other file's content; raises CheckpointError unless both are intact."""
    manifest = read_manifest(path)
    return manifest, sealed_folder(path).read(manifest.file)


def read_manifest(path: Path) -> Manifest:
    """Reads the manifest of the checkpoint in the folder `path`; raises CheckpointError unless it is intact."""
    if path.is_dir() and not (path / MANIFEST).exists():
        raise CheckpointError(f"{path} is not a complete checkpoint: it has no {MANIFEST}, which is written last")
    fields = sealed_folder(path).manifest(MANIFEST)
    with naming(path / MANIFEST, CheckpointError):
        fields["progress"] = Progress(**fields["progress"])
        fields["replay"] = [ReplayPart(**part) for part in fields["replay"]]
        fields["file"] = SealedFile(fields["file"], fields.pop("num_bytes"), fields.pop("sha256"))
        manifest = Manifest(**fields)
    if path.name.isdecimal() and manifest.num_updates != int(path.name):  # A user may have renamed the folder.
        raise CheckpointError(f"{path} is damaged: its manifest belongs to update {manifest.num_updates}")
    return manifest


def _keep_listed(sealed: SealedFolder) -> None:
    """Removes the files of a checkpoint's folder that its manifest does not list; none if the manifest is damaged."""
    if not (sealed.path / MANIFEST).exists():
        sealed.keep(())
    with suppress(CheckpointError):
        sealed.keep({MANIFEST, read_manifest(sealed.path).file.name})


def _encode(state: LearnerState) -> bytes:
    tensors: dict[str, Tensor] = {}
    progress, config, schema = state.progress._asdict(), to_dict(state.config), state.schema.to_dict()
    tree = {**state._asdict(), "progress": progress, "config": config, "schema": schema}
    packed = json.dumps(pack(tree, tensors, ""))  # Fills `tensors`.
    return encode(tensors, {"format": str(FORMAT), "state": packed})


def _decode(data: bytes) -> LearnerState:
    metadata, tensors = decode(data, FORMAT)
    tree = unpack(json.loads(metadata["state"]), tensors)
    tree["config"], tree["schema"] = from_saved(tree["config"]), Schema.from_dict(tree["schema"])
    tree["progress"] = Progress(**tree["progress"])
    return LearnerState(**tree)


def _unused_name(path: Path) -> str:
    """Returns an unused name for a learner's file, so that a file named by a manifest is never overwritten."""
    name, number = "learner.safetensors", 1
    while (path / name).exists():
        number += 1
        name = f"learner-{number}.safetensors"
    return name
