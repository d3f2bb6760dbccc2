"""A window that shows pictures at a game's speed: SDL by pygame, which Gymnasium's own pictures are drawn with too."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from apex.errors import ConfigError


def has_display(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a window can be opened, as far as the environment's variables tell."""
    return any(environment.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"))


class Window:
    """Shows one picture after the other, each at its time."""

    def __init__(
        self,
        title: str,
        fps: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Raises ConfigError without pygame; the window opens with the first picture."""
        self._pygame = _import_pygame()
        self._title = title
        self._seconds_each = 1.0 / fps
        self._clock = clock
        self._sleep = sleep
        self._due_at = clock()

    def show(self, picture: NDArray[np.uint8]) -> bool:
        """Shows uint8[H, W, 3] when its time has come; False once the window was closed, or Q or Escape pressed.

        Who is late skips nothing, and catches up with a tenth of a second at most. Raises ConfigError where no
        window can be opened.
        """
        pygame, (height, width) = self._pygame, picture.shape[:2]
        early = self._due_at - self._clock()
        if early > 0:
            self._sleep(early)
        self._due_at = max(self._due_at, self._clock() - 0.1) + self._seconds_each
        try:
            screen = pygame.display.get_surface() if pygame.display.get_init() else None
            if screen is None or screen.get_size() != (width, height):
                # The first one; or an environment that failed was made anew, and closed all windows when it went.
                pygame.display.init()
                screen = pygame.display.set_mode((width, height))
                pygame.display.set_caption(self._title)
            screen.blit(
                pygame.image.frombuffer(np.ascontiguousarray(picture).tobytes(), (width, height), "RGB"), (0, 0)
            )
            pygame.display.flip()
            return not any(map(self._closes, pygame.event.get()))
        except pygame.error as error:
            raise ConfigError(f"no window can be opened here: {error}; --out game.gif writes a file instead") from error

    def close(self) -> None:
        """Closes the window."""
        self._pygame.display.quit()

    def _closes(self, event: object) -> bool:
        pygame = self._pygame
        kind = getattr(event, "type", None)
        return kind == pygame.QUIT or (
            kind == pygame.KEYDOWN and getattr(event, "key", 0) in (pygame.K_q, pygame.K_ESCAPE)
        )


def _import_pygame() -> ModuleType:
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")  # Else it greets on standard output.
    try:
        import pygame
    except ImportError as error:
        raise ConfigError(
            f"a window needs pygame ({error}): pip install pygame-ce, or --out game.gif for a file"
        ) from error
    module: ModuleType = pygame
    return module
