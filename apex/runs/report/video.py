"""A video of one game of a run's best policy, to be embedded in a page.

`apex evaluate` plays and films it in its own process, so that a faulty environment does not stop the report. It writes
MPEG-4 part 2, which browsers do not play, so the frames are encoded again as VP9.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cv2

MAX_HEIGHT = 320  # pixels
MAX_PICTURES = 3_000  # later ones are left out
MAX_BYTES = 12_000_000  # of a video; a page with a greater one would open slowly
PLAY_SECONDS = 900.0  # how long a game may take to play
APEX = (sys.executable, "-m", "apex")


class EmbeddedVideo(NamedTuple):
    """A filmed game."""

    data: bytes  # mp4
    score: float
    length: int  # steps
    updates: int | None  # of the policy
    checkpoint: str
    epsilon: float
    is_whole: bool  # False: only its first MAX_PICTURES pictures

    @property
    def data_url(self) -> str:
        """The video as the source of an element."""
        return f"data:video/mp4;base64,{base64.b64encode(self.data).decode()}"

    @property
    def caption(self) -> str:
        """Who played, and the result."""
        updates = "" if self.updates is None else f" of update {self.updates:,}"
        part = "" if self.is_whole else " Only its beginning is here."
        who = f"Played by {self.checkpoint}{updates}, epsilon {self.epsilon:g}"
        return f"{who}: score {self.score:.4g} in {self.length:,} steps.{part}"


class NoVideoError(Exception):
    """The reason why there is no video, in a sentence."""


def film(run: Path, epsilon: float, *, apex: Sequence[str] = APEX) -> EmbeddedVideo:
    """Films a game of the run's best policy, else of its last checkpoint; raises NoVideoError."""
    with tempfile.TemporaryDirectory(prefix="apex-report-") as name:
        played, recoded = Path(name) / "played.mp4", Path(name) / "recoded.mp4"
        figures = _play([*apex, "evaluate", str(run)], epsilon, played)
        is_whole = recode(played, recoded)
        data = recoded.read_bytes()
    if len(data) > MAX_BYTES:
        raise NoVideoError(f"it would take {len(data) / 1e6:.0f} MB of this page")
    return EmbeddedVideo(
        data=data,
        score=float(figures["mean"]),
        length=int(figures["lengths"][0]),
        updates=figures["updates"],
        checkpoint=Path(str(figures["checkpoint"])).name,
        epsilon=float(figures["epsilon"]),
        is_whole=is_whole,
    )


def recode(source: Path, target: Path) -> bool:
    """Encodes a video as VP9, at most MAX_HEIGHT pixels high; False if it was cut. Raises NoVideoError."""
    reader = cv2.VideoCapture(str(source))
    if not reader.isOpened():
        raise NoVideoError(f"OpenCV cannot read {source.name}")
    width, height = reader.get(cv2.CAP_PROP_FRAME_WIDTH), reader.get(cv2.CAP_PROP_FRAME_HEIGHT)
    scale = min(1.0, MAX_HEIGHT / height)
    size = 2 * round(width * scale / 2), 2 * round(height * scale / 2)  # The codec takes even sizes only.
    writer = cv2.VideoWriter(str(target), cv2.VideoWriter.fourcc(*"vp09"), reader.get(cv2.CAP_PROP_FPS), size)
    try:
        if not writer.isOpened():
            raise NoVideoError("OpenCV cannot write VP9 here, which browsers play")
        for _ in range(MAX_PICTURES):
            found, picture = reader.read()
            if not found:
                return True
            writer.write(cv2.resize(picture, size, interpolation=cv2.INTER_AREA))
        return not reader.read()[0]
    finally:
        writer.release()
        reader.release()


def _play(command: Sequence[str], epsilon: float, video: Path) -> dict[str, Any]:
    """Plays a game and returns the figures of `apex evaluate --json`."""
    words = ["--episodes", "1", "--envs", "1", "--epsilon", str(epsilon), "--video", str(video), "--json"]
    try:
        program = subprocess.run(
            [*command, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PLAY_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise NoVideoError(f"the game was not over after {PLAY_SECONDS:.0f} s") from error
    if program.returncode:
        last = (program.stderr.strip().splitlines() or [f"apex evaluate ended with status {program.returncode}"])[-1]
        raise NoVideoError(last.removeprefix("apex evaluate: "))
    figures: dict[str, Any] = json.loads(program.stdout.splitlines()[-1])
    return figures
