"""Writes and reads checkpoints, from which a run is resumed: safetensors and JSON only.

A checkpoint is a folder `checkpoints/000012345/`, named by its number of updates, with two files:
`learner.safetensors`, and `manifest.json`. The manifest has the size and the SHA-256 of the other file, the progress of
the run, and the replay snapshots that belong to the checkpoint. It is written last: a folder without a manifest is not
a checkpoint. `checkpoints/newest.json` names the newest checkpoint, so that its loss is noticed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from safetensors import SafetensorError
from torch import Tensor

from apex.config import Config, from_dict, to_dict
from apex.errors import CheckpointError
from apex.runs.checkpoints.paths import MANIFEST, NEWEST
from apex.runs.checkpoints.tensor_file import decode, encode, pack, unpack
from apex.runtime.atomic_files import (
    UNINTERRUPTED,
    Steps,
    check_digest,
    digest,
    replace_file,
    seal,
    sync_folder,
    unseal,
    write_beside,
)
from apex.types import Progress, Schema

FORMAT = 3  # version of both files' format; increased when older versions cannot read new files

T = TypeVar("T")


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
    file: str
    num_bytes: int
    sha256: str
    replay: list[ReplayPart]


def save_checkpoint(
    folder: Path, state: LearnerState, replay: Sequence[ReplayPart] = (), *, steps: Steps = UNINTERRUPTED
) -> Path:
    """Writes a checkpoint below `folder` and flushes it to disk; replaces a checkpoint of the same update.

    Raises OSError if the disk refuses a write. In that case the new checkpoint is removed, and all older ones stay.
    `steps` is called before each step.
    """
    path = folder / f"{state.num_updates:09d}"
    data = _encode(state)
    file = path / _unused_name(path)
    manifest = {
        "format": FORMAT,
        "num_updates": state.num_updates,
        "progress": state.progress._asdict(),
        "file": file.name,
        "num_bytes": len(data),
        "sha256": digest(data),
        "replay": [part._asdict() for part in replay],
    }
    sealed = seal(manifest)
    try:
        steps.before("write the learner")
        partial = write_beside(file, data)
        steps.before("rename the learner")
        os.replace(partial, file)
        steps.before("write the manifest")
        partial = write_beside(path / MANIFEST, sealed)
        sync_folder(path)
        steps.before("rename the manifest")
        os.replace(partial, path / MANIFEST)
    except OSError:
        file.unlink(missing_ok=True)
        if path.is_dir() and not os.listdir(path):
            path.rmdir()
        raise
    steps.before("flush the folder")
    sync_folder(path)
    sync_folder(folder)
    steps.before("note the newest")
    note_newest(folder, state.num_updates)
    for name in os.listdir(path):  # Files of the replaced checkpoint, or of a killed save.
        if name not in (MANIFEST, file.name):
            (path / name).unlink(missing_ok=True)
    return path


def load_checkpoint(path: Path) -> LearnerState:
    """Reads and verifies the checkpoint in the folder `path`; raises CheckpointError unless it is intact."""
    return load_with_manifest(path)[0]


def load_with_manifest(path: Path) -> tuple[LearnerState, Manifest]:
    """Reads and verifies a checkpoint as `load_checkpoint` does; also returns its manifest."""
    manifest, data = verify(path)
    return parse_file(path / manifest.file, lambda: _decode(data)), manifest


def note_newest(folder: Path, num_updates: int) -> None:
    """Records in newest.json which checkpoint is the newest."""
    replace_file(folder / NEWEST, seal({"format": FORMAT, "num_updates": num_updates}))


def verify(path: Path) -> tuple[Manifest, bytes]:
    """Returns a checkpoint's manifest and its other file's content; raises CheckpointError unless both are intact."""
    manifest = read_manifest(path)
    file = path / manifest.file
    return manifest, parse_file(file, lambda: check_digest(read_file(file), manifest.sha256))


def read_manifest(path: Path) -> Manifest:
    """Reads the manifest of the checkpoint in the folder `path`; raises CheckpointError unless it is intact."""
    file = path / MANIFEST
    if path.is_dir() and not file.exists():
        raise CheckpointError(f"{path} is not a complete checkpoint: it has no {MANIFEST}, which is written last")
    data = read_file(file)

    def parse() -> Manifest:
        fields = unseal_format(data)
        progress, replay = Progress(**fields.pop("progress")), [ReplayPart(**part) for part in fields.pop("replay")]
        return Manifest(**fields, progress=progress, replay=replay)

    manifest = parse_file(file, parse)
    if manifest.num_updates != int(path.name):
        raise CheckpointError(f"{path} is damaged: its manifest belongs to update {manifest.num_updates}")
    return manifest


def read_file(path: Path) -> bytes:
    """Returns the content of a file; raises CheckpointError if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error


def parse_file(path: Path, parse: Callable[[], T]) -> T:
    """Returns `parse()`; raises CheckpointError, which names `path`, if the content of the file is not valid."""
    try:
        return parse()
    except (SafetensorError, AttributeError, KeyError, TypeError, ValueError) as error:
        cause = f"the field {error} is missing" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"{path} cannot be read: {cause}") from error


def unseal_format(data: bytes) -> dict[str, Any]:
    """Returns the sealed fields except the format; raises ValueError, KeyError or TypeError if they are not valid."""
    file_format = json.loads(data)["format"]
    if file_format != FORMAT:
        raise ValueError(f"its format is {file_format}, but this version reads only format {FORMAT}")
    fields = unseal(data)
    del fields["format"]
    return fields


def _encode(state: LearnerState) -> bytes:
    tensors: dict[str, Tensor] = {}
    tree = {
        **state._asdict(),
        "progress": state.progress._asdict(),
        "config": to_dict(state.config),
        "schema": state.schema.to_dict(),
    }
    packed = json.dumps(pack(tree, tensors, ""))  # Fills `tensors`.
    return encode(tensors, {"format": str(FORMAT), "state": packed})


def _decode(data: bytes) -> LearnerState:
    metadata, tensors = decode(data, FORMAT)
    tree = unpack(json.loads(metadata["state"]), tensors)
    tree["config"], tree["schema"] = from_dict(tree["config"]), Schema.from_dict(tree["schema"])
    tree["progress"] = Progress(**tree["progress"])
    return LearnerState(**tree)


def _unused_name(path: Path) -> str:
    """Returns an unused name for a learner's file, so that a file named by a manifest is never overwritten."""
    names = (f"learner{'' if number == 1 else f'-{number}'}.safetensors" for number in range(1, 1_000_000))
    return next(name for name in names if not (path / name).exists())
