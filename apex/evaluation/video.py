"""Shows the pictures of a game in a window, or writes them to a file: VP9 with OpenCV, or a GIF with Pillow."""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from apex.algorithms.interface import Mask
from apex.environments.interface import VectorEnvironment
from apex.evaluation.episodes import ActFunction
from apex.types import Step
from apexreplay.errors import UsageError, require
from apexreplay.item_kinds import Array

MIN_HEIGHT = 400  # minimum height in pixels; smaller pictures are enlarged by a whole factor
GIF_FPS = 25.0  # maximum pictures per second; if a game has more, some are left out, and the speed stays the same
MAX_GIF_PICTURES = 3_000  # maximum pictures in memory, about 200 kB each; the file is written at the end

FORMATS = (".mp4", ".gif")  # suffixes of files

Picture = NDArray[np.uint8]  # [H, W, 3], RGB

log = logging.getLogger("apex")


def begin_video(path: Path, fps: float, option: str) -> Mp4 | Gif:
    """Begins a video of `fps` pictures per second. The suffix of `path` selects the format."""
    return Gif(path, fps, option) if path.suffix.lower() == ".gif" else Mp4(path, fps, option)


def enlarge(picture: Picture) -> Picture:
    """Returns the picture, enlarged by a whole factor to a height of at least MIN_HEIGHT pixels."""
    factor = -(-MIN_HEIGHT // len(picture))
    return picture.repeat(factor, 0).repeat(factor, 1)


class Mp4:
    """An mp4 file with VP9, which browsers play, written during the game. All pictures must have the same size."""

    def __init__(self, path: Path, fps: float, option: str) -> None:
        self._path = path
        self._fps = fps
        self._option = option
        self._writer: cv2.VideoWriter | None = None
        self._size: tuple[int, int] | None = None  # width and height, even
        self._num_pictures = 0

    def add(self, picture: Picture) -> None:
        """Adds the next picture."""
        height, width = (2 * (side // 2) for side in picture.shape[:2])  # The codec needs even sizes.
        size = self._size = self._size or (width, height)
        problem = (
            f"{self._option} {self._path}: a picture has {width} x {height} pixels, the first one {size[0]} x {size[1]}"
        )
        require((width, height) == size, problem, remedy="let render() return pictures of one size")
        if self._writer is None:
            codec = cv2.VideoWriter.fourcc(*"vp09")
            self._writer = cv2.VideoWriter(str(self._path), codec, self._fps, (width, height))
            opened = self._writer.isOpened()
            require(opened, f"{self._option} {self._path}: OpenCV cannot write it", remedy="write a .gif instead")
        self._writer.write(np.ascontiguousarray(picture[:height, :width, ::-1]))  # OpenCV expects BGR.
        self._num_pictures += 1

    @property
    def seconds(self) -> float:
        """The duration of the film."""
        return self._num_pictures / self._fps

    def close(self) -> None:
        """Ends the file and reads it back, because OpenCV does not report a full disk; raises UsageError on failure."""
        if self._writer is None:
            return
        self._writer.release()
        video = cv2.VideoCapture(str(self._path))
        found = int(video.get(cv2.CAP_PROP_FRAME_COUNT)) if video.isOpened() else 0
        readable = found > 0 and video.read()[0]
        video.release()
        problem = f"{self._option} {self._path}: only {found} of {self._num_pictures} pictures can be read"
        require(readable and found == self._num_pictures, problem, remedy="check whether the disk is full")


class Gif:
    """An animated GIF of the first `max_pictures` pictures, written at the end. All pictures must have one size."""

    def __init__(self, path: Path, fps: float, option: str, max_pictures: int = MAX_GIF_PICTURES) -> None:
        self._path = path
        self._option = option
        self._max_pictures = max_pictures
        self._step = max(1, int(np.ceil(fps / GIF_FPS)))
        self._seconds_each = self._step / fps
        self._num_seen = 0
        self._pictures: list[Image.Image] = []

    def add(self, picture: Picture) -> None:
        """Adds the next picture."""
        if self._num_seen % self._step == 0 and len(self._pictures) < self._max_pictures:
            # 256 colours are enough for nearly all games, and need a third of the memory.
            whole = Image.fromarray(picture)
            self._pictures.append(whole.quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE))
        self._num_seen += 1

    @property
    def seconds(self) -> float:
        """The duration of the film."""
        return len(self._pictures) * self._seconds_each

    def close(self) -> None:
        """Writes the file and reads it back; raises UsageError on failure."""
        if not self._pictures:
            return
        if self._num_seen > self._step * self._max_pictures:
            log.warning("%s has only the first %.1f s of play: write a .mp4 for more", self._path, self.seconds)
        # The unit of a GIF is 0.01 s. Rounding the end of each picture, not its duration, keeps the overall speed.
        ends = [round(100 * self._seconds_each * (k + 1)) for k in range(len(self._pictures))]
        durations = [10 * (end - start) for start, end in zip([0, *ends], ends, strict=False)]
        first, *others = self._pictures
        try:
            first.save(self._path, save_all=True, append_images=others, duration=durations, loop=0)
            with Image.open(self._path) as written:
                written.seek(getattr(written, "n_frames", 1) - 1)
                written.load()
        except (OSError, EOFError, UnidentifiedImageError) as error:
            raise UsageError(f"{self._option} {self._path}: cannot write the GIF or read it back: {error}") from error


class Window:
    """A window that shows pictures at the speed of the game. `on_close` is called when the user closes it."""

    def __init__(self, fps: float, on_close: Callable[[], None], title: Callable[[], str]) -> None:
        """Raises UsageError without pygame or a display."""
        try:
            self._pygame: Any = importlib.import_module("pygame")
        except ImportError as error:
            remedy = "pip install pygame-ce, or write a film with --out game.gif"
            raise UsageError(f"no window without pygame: {error}", remedy) from error
        self._fps = fps
        self._on_close = on_close
        self._title = title
        try:
            self._pygame.display.init()
        except self._pygame.error as error:
            raise UsageError(f"no window can be opened: {error}", "write a film with --out game.gif") from error
        self._clock = self._pygame.time.Clock()

    def add(self, picture: Picture) -> None:
        """Shows the next picture, and waits until the time of the one after it."""
        display = self._pygame.display
        surface = self._pygame.surfarray.make_surface(picture.swapaxes(0, 1))
        screen = display.get_surface() or display.set_mode(surface.get_size())
        screen.blit(surface, (0, 0))
        display.set_caption(self._title())
        display.flip()
        self._clock.tick(self._fps)
        if self._pygame.event.get(self._pygame.QUIT):
            self._on_close()

    def close(self) -> None:
        """Closes the window."""
        self._pygame.display.quit()


@dataclass
class Camera:
    """Takes pictures of environment 0: before each action of its first `games_left` games, at most `max_pictures`.

    Closes the screen after these games, so that an error of the film does not wait for the games after them.
    """

    screen: Mp4 | Gif | Window
    environment: VectorEnvironment
    policy: ActFunction
    games_left: int = 1
    max_pictures: float = math.inf
    num_pictures: int = 0
    is_closed: bool = False

    def act(self, observation: Array, mask: Mask) -> Array:
        """Takes a picture and returns the policy's actions."""
        if self.games_left and self.num_pictures < self.max_pictures:
            self.screen.add(enlarge(self.environment.picture()))
            self.num_pictures += 1
        return self.policy(observation, mask)

    def see(self, step: Step) -> None:
        """Counts the games that have ended."""
        if self.games_left and (step.terminated[0] or step.truncated[0]):
            self.games_left -= 1
            if not self.games_left:
                self.close()

    def close(self) -> None:
        """Ends the film; raises UsageError if it cannot be written."""
        if not self.is_closed:
            self.is_closed = True
            self.screen.close()
