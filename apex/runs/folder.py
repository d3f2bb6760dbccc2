"""The folder of one run: what was run, on what, by which code, and everything that comes of it.

runs/pong-20250131-235959/
    manifest.json   who, when, where, which versions, every setting; without it the folder is no run
    config.toml     every setting with its value, to be read by people
    curves/         one .jsonl per role
    logs/           one .log per program
    tensorboard/    event files, in a folder of the run's name: TensorBoard shows that
    checkpoints/    000012345/ by updates, best.safetensors, and replay/
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from apex.config import Config, dump_toml, from_dict, to_dict
from apex.errors import ConfigError
from apex.runtime.atomic_files import replace_file, seal, unseal
from apex.runtime.provenance import describe_checkout, describe_hardware, describe_versions
from apex.types import Schema

FORMAT = 2  # of the manifest

_MANIFEST = "manifest.json"
_ELAPSED = "elapsed.json"
_EPOCH = "epoch.json"
_SAVED = "saved"

log = logging.getLogger("apex")


class RunFolder:
    """An existing run's files; made by `create`, found by `open` and `find_latest`."""

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self.manifest = manifest
        self.run_id = int(manifest["run_id"])  # 1 ... 2^64 - 1, drawn at random: no message of another run is taken
        self.schema = Schema.from_dict(manifest["schema"])
        self.config_file = path / "config.toml"
        self.curves = path / "curves"
        self.logs = path / "logs"
        self.tensorboard = path / "tensorboard"
        self.checkpoints = path / "checkpoints"

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.path.name

    @property
    def config(self) -> Config:
        """The resolved configuration."""
        return from_dict(self.manifest["config"])

    @property
    def elapsed_seconds(self) -> float:
        """The time that the run has taken in all its lives, as last noted; 0 if it never was, or cannot be read."""
        path = self.path / _ELAPSED
        try:
            return float(json.loads(path.read_bytes())["seconds"])
        except (OSError, KeyError, TypeError, ValueError) as error:
            if not isinstance(error, FileNotFoundError) or any(self.checkpoints.glob("*")):
                log.error("%s cannot be read (%s); the clock continues from the newest checkpoint", path, error)
            return 0.0

    @elapsed_seconds.setter
    def elapsed_seconds(self, seconds: float) -> None:
        with suppress(OSError):  # A full disk ends no run; the clock of the next start is then a little behind.
            partial = self.path / f".{_ELAPSED}.partial"
            partial.write_text(json.dumps({"seconds": round(seconds, 1)}))
            os.replace(partial, self.path / _ELAPSED)

    @property
    def has_saved(self) -> bool:
        """Whether a checkpoint was ever finished: then one must be there. It is noted outside their folder."""
        return (self.path / _SAVED).exists()

    def note_saved(self) -> None:
        """Notes that a checkpoint was finished."""
        with suppress(OSError):  # A full disk ends no run; the next checkpoint notes it.
            (self.path / _SAVED).touch()

    def next_epoch(self) -> int:
        """Counts the learner's starts in this run: each start leases higher incarnations than all before it.

        If the count is lost, the seconds since 1970 replace it: no run has been started that often. Raises OSError.
        """
        path = self.path / _EPOCH
        try:
            epoch = int(unseal(path.read_bytes())["epoch"]) + 1 if path.exists() else 1
            if epoch == 1 and any(self.checkpoints.glob("*")):
                raise ValueError("it is missing")
        except (KeyError, TypeError, ValueError) as error:
            epoch = int(time.time())
            log.error("%s cannot be read (%s); the learner's starts are counted from %d on", path, error, epoch)
        replace_file(path, seal({"epoch": epoch}))
        return epoch

    @classmethod
    def create(
        cls,
        config: Config,
        schema: Schema,
        *,
        argv: Sequence[str] = sys.argv,
        started: datetime | None = None,
    ) -> Self:
        """Makes the folder of a new run, called `config.run.name`, or by its game and the time; never an old one."""
        started = (started or datetime.now()).astimezone()
        path = make_folder(config, started)
        manifest = {
            "format": FORMAT,
            "run_id": secrets.randbelow(2**64 - 1) + 1,
            "name": path.name,
            "started": started.isoformat(timespec="seconds"),
            "environment": config.environment.id,
            "seed": config.seed,
            "argv": list(argv),
            "schema": schema.to_dict(),
            "versions": describe_versions(),
            "git": describe_checkout(Path(__file__).parent),
            "hardware": describe_hardware(),
            "config": to_dict(config),
        }
        try:
            for name in ("curves", "logs", "tensorboard", "checkpoints"):
                (path / name).mkdir()
            replace_file(path / "config.toml", dump_toml(config).encode(errors="surrogateescape"))
            replace_file(path / _MANIFEST, seal(manifest))
        except OSError as error:
            raise ConfigError(f"cannot write the run folder {path}: {error.strerror}; set run.folder") from error
        return cls(path, unseal(seal(manifest)))  # As `open` gives it: JSON has no tuples.

    def go_on(self, config: Config, *, argv: Sequence[str] = sys.argv) -> None:
        """Notes that the run is started again, and with what; raises ConfigError if that cannot be written."""
        again = {
            "elapsed_seconds": self.elapsed_seconds,
            "started": datetime.now().astimezone().isoformat(timespec="seconds"),
            "argv": list(argv),
            "versions": describe_versions(),
            "git": describe_checkout(Path(__file__).parent),
        }
        self.manifest["resumed"] = [*self.manifest.get("resumed", []), again]
        self.manifest["config"] = to_dict(config)
        try:
            replace_file(self.path / _MANIFEST, seal(self.manifest))
            replace_file(self.config_file, dump_toml(config).encode(errors="surrogateescape"))
        except OSError as error:
            raise ConfigError(f"cannot write the run folder {self.path}: {error.strerror}") from error

    def restore_config_file(self) -> None:
        """Writes config.toml again, and warns, if it differs from the manifest; raises ConfigError if it cannot."""
        text = dump_toml(self.config).encode(errors="surrogateescape")
        try:
            if self.config_file.exists() and self.config_file.read_bytes() == text:
                return
            replace_file(self.config_file, text)
        except OSError as error:
            raise ConfigError(f"cannot write {self.config_file}: {error.strerror}") from error
        log.warning(
            "%s differed from %s, which counts, and was written again. To change a setting, name it beside --resume",
            self.config_file,
            _MANIFEST,
        )

    @classmethod
    def open(cls, path: str | Path, folder: str | Path = "runs") -> Self:
        """The run at `path`, or else the one of that name below `folder`; raises ConfigError if there is none."""
        named = Path(path)
        here = next((p for p in (named, Path(folder) / named) if (p / _MANIFEST).is_file()), None)
        if here is None:
            why = f"no {_MANIFEST}" if named.is_dir() else "no such folder"
            newest = [path.name for path in _list_runs(Path(folder))[:3]]
            known = f"; the newest in {folder}: {', '.join(newest)}" if newest else ""
            raise ConfigError(f"{path} is not a run folder: {why}{known}")
        try:
            manifest = unseal((here / _MANIFEST).read_bytes())
            if manifest["format"] != FORMAT:
                raise ValueError(f"its format is {manifest['format']}, but this program reads {FORMAT}")
            return cls(here, manifest)
        except (OSError, KeyError, TypeError, ValueError) as error:
            cause = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise ConfigError(
                f"{here / _MANIFEST} cannot be read: {cause}. Put it back from a copy of the run folder"
            ) from error

    @classmethod
    def find_latest(cls, folder: str | Path = "runs") -> Self:
        """The run below `folder` that was started last; raises ConfigError if there is none."""
        for path in _list_runs(Path(folder)):
            return cls.open(path)
        raise ConfigError(f"no run in {folder}: apex train starts one")


def make_folder(config: Config, started: datetime | None = None) -> Path:
    """A new, empty folder with a run's name. Names that were given are taken or refused; others get a number."""
    folder, started = Path(config.run.folder), started or datetime.now()
    name = config.run.name or f"{_game(config.environment.id)}-{started:%Y%m%d-%H%M%S}"
    number = 1
    while True:
        path = folder / (name if number == 1 else f"{name}-{number}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=0o700)  # Its manifest names the run, which is what a stranger would need to join it.
            return path
        except FileExistsError as error:
            if not path.parent.is_dir():
                raise ConfigError(f"cannot make the run folder {path}: Not a directory; set run.folder") from error
            if config.run.name:
                raise ConfigError(
                    f"run.name {name!r}: {path} is there already, and a run is never overwritten; "
                    "choose another name, or leave it out"
                ) from error
            number += 1
        except OSError as error:
            raise ConfigError(f"cannot make the run folder {path}: {error.strerror}; set run.folder") from error


def _game(environment_id: str) -> str:
    """ALE/MsPacman-v5 -> mspacman; package.module:make_maze -> make-maze."""
    name = re.split(r"[/:]", environment_id)[-1]
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"-v\d+$", "", name).lower()).strip("-") or "run"


def _list_runs(folder: Path) -> list[Path]:
    """Newest first, by when they were started. What has no readable start is none."""
    runs = []
    for file in folder.glob(f"*/{_MANIFEST}"):
        try:
            started = datetime.fromisoformat(unseal(file.read_bytes())["started"])
            runs.append((started.timestamp(), file.parent.stat().st_mtime_ns, file.parent))
        except (OSError, KeyError, TypeError, ValueError):
            continue
    return [path for *_, path in sorted(runs, reverse=True)]
