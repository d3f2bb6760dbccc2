"""Makes and names the folder of a new run."""

import re
import shutil
import tempfile
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from apex.config import Config
from apexreplay.errors import UsageError, require


def make_folder(config: Config, fill: Callable[[Path, str], None], started: datetime | None = None) -> Path:
    """Makes the folder of a new run with the run's name. A default name gets a number if it is taken.

    `fill(folder, name)` writes the files, and may be called again with another name. The folder gets its name only when
    it is complete, so that a start that is killed leaves nothing of this name. An empty folder is replaced, so `fill`
    must write a file.

    Raises UsageError if a configured name is taken, or if the folder cannot be made.
    """
    started, folder = started or datetime.now(), config.run.folder
    problem = f"run.folder is {folder!r}, and only a shell gives ~ its meaning"
    require(not folder.startswith("~"), problem, remedy=f"write the whole path; ./{folder} is a folder of that name")
    first = Path(config.run.folder) / (config.run.name or f"{_game(config.environment.id)}-{started:%Y%m%d-%H%M%S}")
    path, number = first, 1
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Others cannot read it: a user who could read the run id in the manifest could join the run.
        unnamed = Path(tempfile.mkdtemp(prefix=".new-", dir=path.parent))
        try:
            while True:
                fill(unnamed, path.name)
                try:
                    return unnamed.rename(path)
                except OSError as taken:
                    if not path.exists():
                        raise
                    if config.run.name:
                        problem = f"run.name {config.run.name!r}: {path} exists already, and a run is never overwritten"
                        raise UsageError(problem, "choose another name, or omit run.name") from taken
                number += 1
                path = first.with_name(f"{first.name}-{number}")
        finally:
            shutil.rmtree(unnamed, ignore_errors=True)  # It exists only if it did not get its name.
    except OSError as error:
        problem = f"cannot make the run folder {path}: {error.filename}: {error.strerror}"
        raise UsageError(problem, "set run.folder to another folder") from error


def _game(environment_id: str) -> str:
    """Returns the game's name: ALE/MsPacman-v5 -> mspacman; package.module:make_maze -> make-maze."""
    name = re.split(r"[/:]", environment_id)[-1]
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"-v\d+$", "", name).lower()).strip("-") or "run"
