"""Records a video of one game of a run's best policy, which is embedded in a page.

`apex evaluate` plays and records the game in its own process, so that a faulty environment does not stop the report.
The recording is MPEG-4 part 2, which browsers do not play, so its frames are encoded again as VP9.
"""

import base64
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cv2

from apex.runtime.trust import allow_options
from apex.sentences import plural

MAX_HEIGHT = 320  # pixels
MAX_PICTURES = 3_000  # maximum frames of a video; later frames are omitted
MAX_BYTES = 12_000_000  # maximum size of a video; a page with a larger video opens slowly
PLAY_SECONDS = 900.0  # time limit for playing the game
APEX = (sys.executable, "-m", "apex")


class EmbeddedVideo(NamedTuple):
    """A video of one game."""

    data: bytes  # mp4
    score: float
    length: int  # steps
    updates: int | None  # updates of the policy; None: unknown
    checkpoint: str
    epsilon: float
    is_whole: bool  # False: the video has only the first MAX_PICTURES frames of the game

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
    with tempfile.TemporaryDirectory(prefix="apex-report-") as name:
        played, recoded = Path(name) / "played.mp4", Path(name) / "recoded.mp4"
        figures = _play([*apex, "evaluate", str(run), *allow_options()], epsilon, played)
        is_whole = recode(played, recoded)
        data = recoded.read_bytes()
    if len(data) > MAX_BYTES:
        raise NoVideoError(f"its size would be {len(data) / 1e6:.0f} MB; the maximum is {MAX_BYTES / 1e6:.0f} MB")
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
    """Encodes a video as VP9, at most MAX_HEIGHT pixels high. Returns False if it keeps only the first MAX_PICTURES.

    Raises NoVideoError if OpenCV cannot read or write the video.
    """
    reader = cv2.VideoCapture(str(source))
    if not reader.isOpened():
        raise NoVideoError(f"OpenCV cannot read {source.name}")
    width, height = reader.get(cv2.CAP_PROP_FRAME_WIDTH), reader.get(cv2.CAP_PROP_FRAME_HEIGHT)
    scale = min(1.0, MAX_HEIGHT / height)
    size = 2 * round(width * scale / 2), 2 * round(height * scale / 2)  # The codec requires even sizes.
    writer = cv2.VideoWriter(str(target), cv2.VideoWriter.fourcc(*"vp09"), reader.get(cv2.CAP_PROP_FPS), size)
    try:
        if not writer.isOpened():
            raise NoVideoError("OpenCV on this host cannot write VP9, the codec that browsers play")
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
    options = ["--episodes", "1", "--envs", "1", "--epsilon", str(epsilon), "--video", str(video), "--json"]
    try:
        program = subprocess.run(
            [*command, *options],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PLAY_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise NoVideoError(f"the game did not end within {PLAY_SECONDS:.0f} s") from error
    if program.returncode:
        lines = program.stderr.strip().splitlines()
        raise NoVideoError(lines[-1] if lines else f"apex evaluate ended with status {program.returncode}")
    figures: dict[str, Any] = json.loads(program.stdout.splitlines()[-1])
    return figures
