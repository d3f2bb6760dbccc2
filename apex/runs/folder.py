"""The folder of one run: its settings, hardware and code version, and all its output.

runs/pong-20250131-235959/
    end.json        why the run ended; missing while it runs, and if the learner was killed or failed
    manifest.json   run id, start time, hardware, versions, every setting; a folder without this file is not a run
    config.toml     every setting with its value, for people to read
    curves/         one .jsonl file per role
    logs/           one .log file per program, and one .jsonl file with its warnings and errors
    tensorboard/    event files, in a subfolder with the run's name, which TensorBoard shows
    checkpoints/    000012345/ (the number of updates), best.safetensors, and replay/
    keys/           keys of the present start, if no other keys are configured; removed at its end
"""

import logging
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, Self

import msgspec

from apex.config import Config, dump_toml, from_saved, load_toml, to_dict
from apex.config.algorithm_choice import choose_algorithm
from apex.errors import ConfigError
from apex.facts import EndReason
from apex.runs.checkpoints.paths import has_policy
from apex.runs.new_folder import make_folder
from apex.runtime.provenance import describe_checkout, describe_hardware, describe_versions
from apex.schema import Schema
from apex.types import RunTime
from apexreplay.errors import DataError, UsageError
from apexreplay.facts import HexInt
from apexreplay.files.atomic_files import replace_file, seal, unseal

FORMAT = 3  # version of the manifest's format

EPOCH_ZERO = 1_704_067_200  # Unix time of 2024-01-01. Epochs count seconds since then: 31 bits suffice until 2092.

KEYS = "keys"
MANIFEST = "manifest.json"
_ELAPSED = "elapsed.json"
_EPOCH = "epoch.json"
_END = "end.json"
_SAVED = "saved"

log = logging.getLogger("apex")


class RunFolder:
    """The files of an existing run. `create` makes a new run folder; `open` and `find_latest` open an existing one."""

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self.manifest = manifest
        self.run_id = HexInt(manifest["run_id"])  # random, 1 ... 2^64 - 1; messages with another id are refused
        self.schema = Schema.from_dict(manifest["schema"])
        self.config_file = path / "config.toml"
        self.curves = path / "curves"
        self.logs = path / "logs"
        self.tensorboard = path / "tensorboard"
        self.checkpoints = path / "checkpoints"

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.path.name

    @property
    def config(self) -> Config:
        """The resolved configuration."""
        return from_saved(self.manifest["config"])

    @property
    def asked(self) -> Config:
        """What the first command, or the last one with --continue, asked for."""
        return from_saved(self.manifest["asked"])

    @property
    def keys(self) -> str:
        """Folder of the keys that the programs of this run use now; "": they use none.

        Each start of `apex train` makes new keys in the run folder, unless keys are configured.
        """
        transport, made = self.config.transport, self.path / KEYS
        return transport.keys or (str(made) if made.is_dir() and not transport.insecure_no_auth else "")

    @property
    def config_with_keys(self) -> Config:
        """The resolved configuration, but with the keys of the present start."""
        return replace(self.config, transport=replace(self.config.transport, keys=self.keys))

    @property
    def elapsed_seconds(self) -> float:
        """Seconds that the run has taken over all its starts, as last recorded; 0 if there is no readable record."""
        return self.run_time.seconds

    @property
    def run_time(self) -> RunTime:
        """The time that the run has taken over all its starts, as last recorded; 0 if there is no readable record."""
        path = self.path / _ELAPSED
        try:
            fields = unseal(path.read_bytes())
            return RunTime(float(fields["seconds"]), float(fields.get("untrained", 0.0)))
        except (OSError, KeyError, TypeError, ValueError) as error:
            if not isinstance(error, FileNotFoundError) or any(self.checkpoints.glob("*")):
                log.error("%s cannot be read (%s); the run time continues from the newest checkpoint", path, error)
            return RunTime()

    @run_time.setter
    def run_time(self, taken: RunTime) -> None:
        with suppress(OSError):  # A full disk must not end the run; the recorded time is then too short.
            partial = self.path / f".{_ELAPSED}.partial"
            partial.unlink(missing_ok=True)  # It may be a link to another file.
            partial.write_bytes(seal({name: round(value, 1) for name, value in taken._asdict().items()}))
            os.replace(partial, self.path / _ELAPSED)

    @property
    def has_saved(self) -> bool:
        """Whether the run ever finished a checkpoint, so that at least one must exist."""
        return (self.path / _SAVED).exists()

    def note_saved(self) -> None:
        """Records that a checkpoint was finished."""
        with suppress(OSError):  # A full disk must not end the run; the next checkpoint tries again.
            (self.path / _SAVED).touch()

    @property
    def end(self) -> EndReason | None:
        """See `read_end`."""
        return read_end(self.path)

    @end.setter
    def end(self, end: EndReason | None) -> None:
        with suppress(OSError):  # A full disk must not end the run, which then counts as stopped.
            if end is None:
                (self.path / _END).unlink(missing_ok=True)
            else:
                replace_file(self.path / _END, seal(msgspec.to_builtins(end)))

    def next_epoch(self, clock: Callable[[], float] = time.time) -> int:
        """Returns the number of this start of the learner, so that each start leases higher incarnations than the last.

        The number is the time in seconds, so that a copied or restored folder does not repeat a number. The number
        grows even if the clock was set back. Raises OSError if the number cannot be recorded.
        """
        path, last = self.path / _EPOCH, 0
        try:
            last = int(unseal(path.read_bytes())["epoch"]) if path.exists() else 0
            if not last and any(self.checkpoints.glob("*")):
                raise ValueError("the file is missing")
        except (KeyError, TypeError, ValueError) as error:
            log.error("%s cannot be read (%s); numbering this start of the learner by the clock alone", path, error)
        epoch = max(last + 1, int(clock()) - EPOCH_ZERO)
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
        asked: Config | None = None,
    ) -> Self:
        """Makes the folder of a new run, named `config.run.name`, or by default after the game and the time.

        `asked`: the configuration before sizes were chosen; None: the same. Never uses a folder that exists. Raises
        UsageError if the folder cannot be written, or if the algorithm does not fit the actions.
        """
        choose_algorithm(config, schema)
        started = (started or datetime.now()).astimezone()
        facts = {"hardware": describe_hardware(), **_describe_start(argv, started)}  # This can take seconds.
        manifest = {
            "format": FORMAT,
            "run_id": secrets.randbelow(2**64 - 1) + 1,
            "environment": config.environment.id,
            "seed": config.seed,
            "schema": schema.to_dict(),
            "config": to_dict(config),
            "asked": to_dict(asked or config),
            **facts,
        }

        def fill(path: Path, name: str) -> None:
            manifest["name"] = name
            for part in ("curves", "logs", "tensorboard", "checkpoints"):
                (path / part).mkdir(exist_ok=True)
            replace_file(path / "config.toml", _encode_config(config))
            replace_file(path / MANIFEST, seal(manifest))

        path = make_folder(config, fill, started)
        return cls(path, unseal(seal(manifest)))  # The same as `open` reads: JSON has no tuples.

    def record_resume(self, config: Config, *, argv: Sequence[str] = sys.argv, asked: Config | None = None) -> None:
        """Records that the run is resumed, with its arguments and versions; raises UsageError if writing fails.

        `asked`: what a repeated command asks for; None: `RunFolder.asked` stays.
        """
        again = {"elapsed_seconds": self.elapsed_seconds, **_describe_start(argv, datetime.now().astimezone())}
        self.manifest["resumed"] = [*self.manifest.get("resumed", []), again]
        self.manifest["config"] = to_dict(config)
        if asked is not None:
            self.manifest["asked"] = to_dict(asked)
        with _reports_writing(self.path):
            replace_file(self.path / MANIFEST, seal(self.manifest))
            replace_file(self.config_file, _encode_config(config))

    def restore_config_file(self) -> None:
        """Writes config.toml again and warns if it differs from the manifest; raises UsageError if writing fails."""
        text, saved = _encode_config(self.config), None
        with _reports_writing(self.config_file):
            if self.config_file.exists() and self.config_file.read_bytes() == text:
                return
            with suppress(ConfigError):  # Someone has damaged or removed it.
                saved = load_toml(self.config_file)
            replace_file(self.config_file, text)
        if saved == self.config:
            return  # An earlier version wrote it.
        message = "%s differed from the settings in %s and was overwritten. To change a setting, pass it with --resume"
        log.warning(message, self.config_file, MANIFEST)

    @classmethod
    def open(cls, path: str | Path, folder: str | Path = "runs") -> Self:
        """Opens the run at `path`, or the run with that name below `folder`; raises UsageError if there is none."""
        named = Path(path)
        here = next((p for p in (named, Path(folder) / named) if (p / MANIFEST).is_file()), None)
        if here is None:
            flaw = "it is a file" if named.is_file() else f"no {MANIFEST}" if named.is_dir() else "no such folder"
            problem = f"{path} is not a run folder: {flaw}"
            newest = ", ".join(run.name for run in list_runs(folder)[:3])
            raise DataError(problem, f"choose one of the newest runs in {folder}: {newest}" if newest else "")
        here = here if here.name not in ("", "..") else here.resolve()  # The name is needed, as of copies and films.
        return cls.from_manifest(here, (here / MANIFEST).read_bytes, str(here / MANIFEST))

    @classmethod
    def from_manifest(cls, path: Path, read: Callable[[], bytes], source: str) -> Self:
        """Returns the run at `path`, or to be restored there, from the manifest that `read` returns.

        `source`: what messages name. Raises DataError if the manifest cannot be read.
        """
        try:
            manifest = unseal(read())
            if manifest["format"] == FORMAT:
                return cls(path, manifest)
        except (OSError, KeyError, TypeError, ValueError) as error:
            cause = f"the field {error} is missing" if isinstance(error, KeyError) else str(error)
            remedy = "restore it from a copy of the run folder"
            raise DataError(f"{source} cannot be read: {cause}", remedy) from error
        maker = f"{_maker(manifest)} in format {manifest['format']}"
        remedy = f"use that version, or only evaluate the policy: apex evaluate {path}/checkpoints/best.safetensors"
        raise DataError(f"{path} was made by {maker}, but this version reads only format {FORMAT}", remedy)

    @classmethod
    def find_latest(cls, folder: str | Path = "runs", *, with_policy: bool = False) -> Self:
        """Opens the run below `folder` that was started last; raises UsageError if there is none.

        `with_policy`: skips runs without a checkpoint and without a best policy.
        """
        runs = list_runs(folder)
        for path in runs:
            if not with_policy or has_policy(path / "checkpoints"):
                return cls.open(path)
        raise UsageError(f"no run in {folder}{' has a policy yet' if runs else ''}", "start one with apex train")


def read_end(run: Path) -> EndReason | None:
    """Returns why the last start of the learner ended; None while it trains, and if it was killed or has failed.

    Training ends before the evaluation of the final policy does.
    """
    try:
        return msgspec.convert(unseal((run / _END).read_bytes()), EndReason)
    except (OSError, KeyError, TypeError, ValueError):
        return None


def _describe_start(argv: Sequence[str], started: datetime) -> dict[str, Any]:
    """Returns what the manifest records about each start of the run."""
    return {
        "started": started.isoformat(timespec="seconds"),
        "argv": list(argv),
        "versions": describe_versions(),
        "git": describe_checkout(Path(__file__).parent),
    }


def _encode_config(config: Config) -> bytes:
    return dump_toml(config).encode(errors="surrogateescape")


@contextmanager
def _reports_writing(path: Path) -> Iterator[None]:
    """Turns an OSError into a DataError."""
    try:
        yield
    except OSError as error:
        remedy = "free disk space, or set run.folder to another folder"
        raise DataError(f"cannot write {path}: {error.strerror}", remedy) from error


def open_run(path: str | Path | None, *, with_policy: bool = False) -> RunFolder:
    """Opens the run at `path`. Without a path, opens the newest run and prints its name to standard error.

    `with_policy`: as in `RunFolder.find_latest`. Raises UsageError if there is no such run.
    """
    if path is not None:
        return RunFolder.open(path)
    newest = RunFolder.find_latest(with_policy=with_policy)
    print(f"using the newest run{' with a policy' if with_policy else ''}: {newest.path}", file=sys.stderr)
    return newest


def _maker(manifest: dict[str, Any]) -> str:
    """Returns the version of this package that wrote a manifest, and its commit if known."""
    version, commit = "of an unknown version", ""
    with suppress(KeyError, TypeError):
        version = manifest["versions"]["apex"] or version
    with suppress(KeyError, TypeError):
        commit = f" (commit {manifest['git']['commit'][:12]})"
    return f"apex {version}{commit}"


def list_runs(folder: str | Path) -> list[Path]:
    """Returns the folders of runs, newest start first; omits folders whose manifest has no readable start time.

    Hidden folders are starts that are incomplete or were killed, see `make_folder`.
    """
    runs = []
    for file in Path(folder).glob(f"[!.]*/{MANIFEST}"):
        try:
            started = datetime.fromisoformat(unseal(file.read_bytes())["started"])
            runs.append((started.timestamp(), file.parent.stat().st_mtime_ns, file.parent))
        except (OSError, KeyError, TypeError, ValueError):
            continue
    return [path for *_, path in sorted(runs, reverse=True)]
