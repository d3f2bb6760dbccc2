"""Records a video of one game of a run's best policy, which is embedded in a page.

`apex evaluate` plays and records the game in its own process, so that a faulty environment does not stop the report.
"""

import base64
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from apex.runtime.trust import allow_options
from apex.sentences import plural

MAX_STEPS = 3_000  # steps of the game that the video shows
MAX_BYTES = 12_000_000  # maximum size of a video; a page with a larger video opens slowly
PLAY_SECONDS = 900.0  # time limit for playing the game
APEX = (sys.executable, "-P", "-m", "apex")  # -P: imports nothing from the current folder


class EmbeddedVideo(NamedTuple):
    """A video of one game."""

    data: bytes  # mp4
    score: float
    length: int  # steps
    updates: int | None  # updates of the policy; None: unknown
    checkpoint: str
    epsilon: float
    is_whole: bool  # False: the video has only the first MAX_STEPS steps of the game

    @property
    def data_url(self) -> str:
        """The video as a data URL, the source of an HTML element."""
        return f"data:video/mp4;base64,{base64.b64encode(self.data).decode()}"

    @property
    def caption(self) -> str:
        """A sentence that names the policy that played, its score and the length of the game."""
        updates = "" if self.updates is None else f" of update {self.updates:,}"
        part = "" if self.is_whole else " The video shows only the beginning of the game."
        player = f"Played by {self.checkpoint}{updates}, epsilon {self.epsilon:g}"
        return f"{player}: score {self.score:.4g} in {plural(self.length, 'step')}.{part}"


class NoVideoError(Exception):
    """There is no video; the message gives the reason in a sentence."""


def film(run: Path, epsilon: float, *, apex: Sequence[str] = APEX) -> EmbeddedVideo:
    """Records a game of the run's best policy, or of its last checkpoint if there is none; raises NoVideoError."""
    try:
        with tempfile.TemporaryDirectory(prefix="apex-report-") as name:
            played = Path(name) / "played.mp4"
            figures = _play([*apex, "evaluate", str(run.absolute()), *allow_options()], epsilon, played)
            data = played.read_bytes()
    except OSError as error:  # no space for it
        raise NoVideoError(f"it cannot be written: {error.strerror}") from error
    if len(data) > MAX_BYTES:
        raise NoVideoError(f"its size would be {len(data) / 1e6:.0f} MB; the maximum is {MAX_BYTES / 1e6:.0f} MB")
    return EmbeddedVideo(
        data=data,
        score=float(figures["mean"]),
        length=figures["lengths"][0],
        updates=figures["updates"],
        checkpoint=Path(str(figures["checkpoint"])).name,
        epsilon=float(figures["epsilon"]),
        is_whole=figures["lengths"][0] <= MAX_STEPS,
    )


def _play(command: Sequence[str], epsilon: float, video: Path) -> dict[str, Any]:
    """Plays a game and returns the figures of `apex evaluate --json`."""
    options = ["--episodes", "1", "--envs", "1", "--epsilon", str(epsilon), "--json"]
    options += ["--video", str(video), "--video-steps", str(MAX_STEPS)]
    try:
        program = subprocess.run(
            [*command, *options],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PLAY_SECONDS,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        )
    except subprocess.TimeoutExpired as error:
        raise NoVideoError(f"the game did not end within {PLAY_SECONDS:.0f} s") from error
    if program.returncode:
        lines = program.stderr.strip().splitlines()
        raise NoVideoError(lines[-1] if lines else f"apex evaluate ended with status {program.returncode}")
    for line in reversed(program.stdout.splitlines()):  # The environment may print at its end.
        with suppress(ValueError):
            if isinstance(figures := json.loads(line), dict):
                return figures
    raise NoVideoError("apex evaluate printed no result")
