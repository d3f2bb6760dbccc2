"""What of a run goes to the cluster's bucket, and the curves that come back from there.

s3://BUCKET/CLUSTER/ is a copy of the run folder: `apex evaluate` takes a copy of it. Replay memory and logs stay out.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from apex.runtime.atomic_files import replace_file

SENT = "sent.json"  # beside the run folders: what the bucket has, by size and time of change
BEGUN = "begun.json"  # in the bucket alone: which machine has begun to write there
MANIFEST = "manifest.json"  # every run has it, and no more than one
CURVES = "tensorboard"  # the folder that comes back

_LEFT_OUT = {"logs", "replay"}  # folders

SentFiles = dict[str, list[int]]

log = logging.getLogger("apex")


def begin(s3: Any, bucket: str, cluster: str, host: str) -> bool:
    """Writes below `cluster`, before a run begins, which machine does; False, and nothing, where an earlier run is.

    Raises what keeps this machine from looking or writing there: that must be known before a run, not when it ends.
    """
    try:
        s3.head_object(Bucket=bucket, Key=f"{cluster}/{MANIFEST}")
        return False
    except s3.exceptions.ClientError as error:
        # Of what is not there it says "forbidden" too, as this machine may not list. A busy service says neither.
        if error.response["ResponseMetadata"]["HTTPStatusCode"] not in (403, 404):
            raise
    s3.put_object(Bucket=bucket, Key=f"{cluster}/{BEGUN}", Body=json.dumps({"host": host}).encode())
    return True


def upload(s3: Any, bucket: str, run: Path, sent_file: Path) -> int:
    """Copies what is new or has changed below `run`; returns how many files. Nothing is ever deleted in the bucket."""
    sent = _read_sent(sent_file)
    num_sent = 0
    for name, path, mark in _unsent(run, sent):
        try:
            s3.upload_file(str(path), bucket, f"{run.name}/{name}")
        except FileNotFoundError:  # An older checkpoint, removed meanwhile.
            continue
        sent[name] = mark
        num_sent += 1
        _write_sent(sent_file, sent)
    return num_sent


def only_here(run: Path, sent_file: Path) -> list[str]:
    """The files that the bucket lacks, or has as they were before."""
    return [name for name, _, _ in _unsent(run, _read_sent(sent_file))]


def fetch_curves(s3: Any, bucket: str, run: Path) -> int:
    """Brings the curves up to date; returns how many bytes came.

    Event files only grow, and TensorBoard holds them open: what is new is appended, and nothing is replaced.
    """
    (run / CURVES).mkdir(parents=True, exist_ok=True)
    num_bytes = 0
    pages = s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{run.name}/{CURVES}/")
    for found in (found for page in pages for found in page.get("Contents", [])):
        path = run / found["Key"].removeprefix(f"{run.name}/")
        if not path.resolve().is_relative_to(run.resolve()):
            log.error("the bucket has %s, which lies outside the run: it is passed over", found["Key"])
            continue
        here = path.stat().st_size if path.exists() else 0
        if found["Size"] < here:
            log.error("%s is shorter in the bucket: it is another run's, and is fetched anew", path)
            path.unlink()
            here = 0
        if found["Size"] > here:
            path.parent.mkdir(parents=True, exist_ok=True)
            answer = s3.get_object(Bucket=bucket, Key=found["Key"], Range=f"bytes={here}-{found['Size'] - 1}")
            data = answer["Body"].read()
            with path.open("ab") as file:
                file.write(data)
            num_bytes += len(data)
    return num_bytes


def _unsent(run: Path, sent: SentFiles) -> Iterator[tuple[str, Path, list[int]]]:
    """What is new or has changed: its name, where it is, its mark."""
    for name, path in sorted(_files(run), key=lambda item: _rank(item[0])):
        with suppress(FileNotFoundError):
            found = path.stat()
            mark = [found.st_size, found.st_mtime_ns]
            if sent.get(name) != mark:
                yield name, path, mark


def _files(run: Path) -> Iterator[tuple[str, Path]]:
    for folder, folders, names in os.walk(run):
        here = Path(folder)
        folders[:] = [name for name in folders if name not in _LEFT_OUT and not name.startswith(".")]
        for name in names:
            if not name.startswith("."):  # what is still being written
                yield (here / name).relative_to(run).as_posix(), here / name


def _rank(name: str) -> tuple[bool, bool, str]:
    """Checkpoints before curves, and of each its manifest last: who finds one there finds all that it names."""
    return not name.startswith("checkpoints/"), name.endswith("manifest.json"), name


def _read_sent(path: Path) -> SentFiles:
    with suppress(OSError, ValueError):
        found = json.loads(path.read_text())
        return {str(name): [int(size), int(changed)] for name, (size, changed) in found.items()}
    return {}  # All is sent again.


def _write_sent(path: Path, sent: SentFiles) -> None:
    replace_file(path, json.dumps(sent).encode())
