"""What a run leaves on disk to go on from: safetensors and JSON only.

A checkpoint is a folder `checkpoints/000012345/` named by its updates: `learner.safetensors`, and `manifest.json`,
which has the size and the SHA-256 of that file, how far the run was, and which snapshots of the replay memory belong to
it. The manifest is written last: a folder without one is no checkpoint. `checkpoints/newest.json` names the newest of
all, so that one that is gone is missed.
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
from apex.errors import ConfigError
from apex.runs.checkpoints.paths import MANIFEST, NEWEST
from apex.runs.checkpoints.tensor_file import decode, encode, pack, unpack
from apex.runtime.atomic_files import check_digest, digest, go_on, replace_file, seal, sync_folder, unseal, write_beside
from apex.types import Progress, Schema

FORMAT = 2  # of both kinds of file; grows when an older program could no longer read them

T = TypeVar("T")


class CheckpointError(ConfigError):
    """A file that is missing, damaged or of another format; the text names it and says why."""


class LearnerState(NamedTuple):
    """All that the learner needs to go on. Tensors may lie on any device; loaded ones lie on the CPU."""

    num_updates: int
    progress: Progress
    config: Config
    schema: Schema
    online: dict[str, Any]  # state dicts, as torch gives and takes them
    target: dict[str, Any]
    optimizer: dict[str, Any]
    rng: dict[str, Any]  # generators' states by name: tensors, or whatever JSON can say


class ReplayPart(NamedTuple):
    """A snapshot of one shard's memory that belongs to a checkpoint. It lies beside it, or with its replay server."""

    shard: int
    number: int  # of the snapshot
    size: int  # transitions


class Manifest(NamedTuple):
    """What the manifest says."""

    num_updates: int
    progress: Progress
    file: str
    num_bytes: int
    sha256: str
    replay: list[ReplayPart]


def save_checkpoint(
    folder: Path, state: LearnerState, replay: Sequence[ReplayPart] = (), *, pause: Callable[[str], None] = go_on
) -> Path:
    """Writes a checkpoint below `folder`, on disk when this returns; the one of the same update is replaced.

    Raises OSError where the disk refuses: nothing is left of it then, and all older ones stay. `pause` is called with
    the name of each step before it is taken: tests crash in between.
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
        pause("write the learner")
        partial = write_beside(file, data)
        pause("rename the learner")
        os.replace(partial, file)
        pause("write the manifest")
        partial = write_beside(path / MANIFEST, sealed)
        sync_folder(path)
        pause("rename the manifest")
        os.replace(partial, path / MANIFEST)
    except OSError:
        file.unlink(missing_ok=True)
        if path.is_dir() and not os.listdir(path):
            path.rmdir()
        raise
    pause("flush the folder")
    sync_folder(path)
    sync_folder(folder)
    pause("note the newest")
    note_newest(folder, state.num_updates)
    for name in os.listdir(path):  # What the older one of this update was, or a killed save has left.
        if name not in (MANIFEST, file.name):
            (path / name).unlink(missing_ok=True)
    return path


def load_checkpoint(path: Path) -> LearnerState:
    """Reads and verifies the checkpoint in the folder `path`; raises CheckpointError unless it is whole."""
    return load_with_manifest(path)[0]


def load_with_manifest(path: Path) -> tuple[LearnerState, Manifest]:
    """The same, and what the manifest says."""
    manifest, data = verify(path)
    return parse_file(path / manifest.file, lambda: _decode(data)), manifest


def note_newest(folder: Path, num_updates: int) -> None:
    """Writes down which checkpoint is the newest."""
    replace_file(folder / NEWEST, seal({"format": FORMAT, "num_updates": num_updates}))


def verify(path: Path) -> tuple[Manifest, bytes]:
    """Manifest and learner's file of a checkpoint; raises CheckpointError unless both are whole."""
    manifest = read_manifest(path)
    file = path / manifest.file
    return manifest, parse_file(file, lambda: check_digest(read_file(file), manifest.sha256))


def read_manifest(path: Path) -> Manifest:
    """What the manifest of the checkpoint in the folder `path` says; raises CheckpointError unless it is whole."""
    file = path / MANIFEST
    if path.is_dir() and not file.exists():
        raise CheckpointError(f"{path} is not a whole checkpoint: no {MANIFEST}, which is written last")
    data = read_file(file)

    def parse() -> Manifest:
        fields = unseal_format(data)
        progress, replay = Progress(**fields.pop("progress")), [ReplayPart(**part) for part in fields.pop("replay")]
        return Manifest(**fields, progress=progress, replay=replay)

    manifest = parse_file(file, parse)
    if manifest.num_updates != int(path.name):
        raise CheckpointError(f"{path} is damaged: its manifest is that of update {manifest.num_updates}")
    return manifest


def read_file(path: Path) -> bytes:
    """All of a file; raises CheckpointError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error


def parse_file(path: Path, parse: Callable[[], T]) -> T:
    """Returns `parse()`; raises CheckpointError about `path` where its content makes no sense."""
    try:
        return parse()
    except (SafetensorError, AttributeError, KeyError, TypeError, ValueError) as error:
        cause = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"{path} cannot be read: {cause}") from error


def unseal_format(data: bytes) -> dict[str, Any]:
    """Sealed fields of this format, without it; raises ValueError, KeyError or TypeError for anything else."""
    file_format = json.loads(data)["format"]
    if file_format != FORMAT:
        raise ValueError(f"its format is {file_format}, but this program reads {FORMAT}")
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
    """What a learner's file here may be called: one that is named by a manifest is never touched."""
    names = (f"learner{'' if number == 1 else f'-{number}'}.safetensors" for number in range(1, 1_000_000))
    return next(name for name in names if not (path / name).exists())
