"""Writes the pictures of a game to a file: mp4 with OpenCV, or an animated GIF with Pillow."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from apex.config.arguments import check_out
from apex.environments.interface import VectorEnvironment
from apex.errors import require
from apex.evaluation.episodes import ActFunction
from apex.types import Array, Step

MIN_HEIGHT = 400  # pixels of a picture; smaller ones are enlarged by a whole number
GIF_FPS = 25.0  # at most; pictures of faster games are left out, so that the speed stays
MAX_GIF_PICTURES = 3_000  # kept in memory until the end, about 200 kB each

Picture = NDArray[np.uint8]  # [H, W, 3], RGB


def check_video_path(path: Path, option: str) -> None:
    """Raises ConfigError if no video can be written to `path`; `option` names it in the message."""
    check_out(path, ".mp4", ".gif", option=option)


def begin_video(path: Path, fps: float, option: str) -> Mp4 | Gif:
    """Begins a video of `fps` pictures per second, in the format that `path` ends in."""
    return Gif(path, fps, option) if path.suffix.lower() == ".gif" else Mp4(path, fps, option)


def enlarge(picture: Picture) -> Picture:
    """The picture enlarged by a whole number to at least MIN_HEIGHT pixels."""
    factor = -(-MIN_HEIGHT // len(picture))
    return picture.repeat(factor, 0).repeat(factor, 1)


class Mp4:
    """An mp4 file, written while the game goes on. All pictures have one size."""

    def __init__(self, path: Path, fps: float, option: str) -> None:
        self._path = path
        self._fps = fps
        self._option = option
        self._writer: cv2.VideoWriter | None = None
        self._num_pictures = 0

    def add(self, picture: Picture) -> None:
        """Adds the next picture."""
        height, width = (2 * (side // 2) for side in picture.shape[:2])  # The codec takes even sizes only.
        if self._writer is None:
            codec = cv2.VideoWriter.fourcc(*"mp4v")
            self._writer = cv2.VideoWriter(str(self._path), codec, self._fps, (width, height))
            require(self._writer.isOpened(), f"{self._option} {self._path}: OpenCV cannot write mp4v here")
        self._writer.write(np.ascontiguousarray(picture[:height, :width, ::-1]))  # It takes BGR.
        self._num_pictures += 1

    def close(self) -> None:
        """Ends the file and reads it back, as OpenCV reports no full disk; raises ConfigError if that fails."""
        if self._writer is None:
            return
        self._writer.release()
        video = cv2.VideoCapture(str(self._path))
        found = int(video.get(cv2.CAP_PROP_FRAME_COUNT)) if video.isOpened() else 0
        readable = found > 0 and video.read()[0]
        video.release()
        require(
            readable and found == self._num_pictures,
            f"{self._option} {self._path}: {found} of {self._num_pictures} pictures can be read; is the disk full?",
        )


class Gif:
    """An animated GIF, written at the end; ignores pictures after MAX_GIF_PICTURES. All pictures have one size."""

    def __init__(self, path: Path, fps: float, option: str) -> None:
        self._path = path
        self._option = option
        self._step = max(1, int(np.ceil(fps / GIF_FPS)))
        self._seconds_each = self._step / fps
        self._num_seen = 0
        self._pictures: list[Image.Image] = []

    def add(self, picture: Picture) -> None:
        """Adds the next picture."""
        if self._num_seen % self._step == 0 and len(self._pictures) < MAX_GIF_PICTURES:
            # 256 colours are enough for nearly all games, and take a third of the memory.
            whole = Image.fromarray(picture)
            self._pictures.append(whole.quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE))
        self._num_seen += 1

    def close(self) -> None:
        """Writes the file and reads it back; raises ConfigError if that fails."""
        if not self._pictures:
            return
        # A GIF counts hundredths of a second. Rounding each picture's end, not its duration, keeps the overall speed.
        ends = [round(100 * self._seconds_each * (k + 1)) for k in range(len(self._pictures))]
        durations = [10 * (end - start) for start, end in zip([0, *ends], ends, strict=False)]
        first, *others = self._pictures
        try:
            first.save(self._path, save_all=True, append_images=others, duration=durations, loop=0)
            with Image.open(self._path) as written:
                written.seek(getattr(written, "n_frames", 1) - 1)
                written.load()
        except (OSError, EOFError, UnidentifiedImageError) as error:
            require(False, f"{self._option} {self._path}: the GIF cannot be written, or not be read back: {error}")


class Camera:
    """Films environment 0's first game: one picture before each action."""

    def __init__(self, video: Mp4 | Gif, environment: VectorEnvironment, policy: ActFunction) -> None:
        self._video = video
        self._environment = environment
        self._policy = policy
        self._over = False

    def act(self, observation: Array) -> NDArray[np.int64]:
        """Takes a picture and returns the policy's actions."""
        if not self._over:
            self._video.add(enlarge(self._environment.picture()))
        return self._policy(observation)

    def see(self, step: Step) -> None:
        """Ends the film with the game."""
        self._over = self._over or bool(step.terminated[0] or step.truncated[0])
