"""The quiet strip below a game: what is played, by which parameters, and what they think of each action."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from apex.evaluation.video import Picture

HEIGHT = 100  # pixels of the strip
MIN_WIDTH = 320  # narrower pictures get a border
SPREAD_STEPS = 300  # the highest bar is the greatest difference between two actions in so many steps
MAX_BAR_WIDTH = 64

BACKGROUND, QUIET, PLAIN, CHOSEN = (24, 26, 30), (120, 126, 136), (214, 218, 224), (240, 180, 70)
MARGIN, SCALE_WIDTH = 10, 44
BARS_TOP, BARS_BOTTOM = 46, 80


class Caption(NamedTuple):
    """What there is to say of one picture."""

    version: int  # of the parameters, in updates
    game: int  # 1, 2 ...
    step: int
    score: float  # until now, raw
    q: NDArray[np.float32]  # [A]
    action: int  # that is taken


class Strip:
    """Draws captions. The bars show how much better than the worst action each one is held to be.

    Q-values themselves would hide that: those of one state are nearly the same. Their numbers stand beside the bars.
    """

    def __init__(self, title: str, epsilon: float, names: Sequence[str]) -> None:
        """`names` of the actions; where columns are too narrow for them they are left out."""
        self._title = title
        self._epsilon = f"epsilon {epsilon:g}"
        self._names = names
        self._spreads: deque[float] = deque(maxlen=SPREAD_STEPS)
        self._font, self._small = ImageFont.load_default(13), ImageFont.load_default(10)

    def below(self, picture: Picture, caption: Caption) -> Picture:
        """The picture with the strip below it."""
        height, width = picture.shape[:2]
        whole = Image.new("RGB", (max(width, MIN_WIDTH), height + HEIGHT), BACKGROUND)
        whole.paste(Image.fromarray(picture), ((whole.width - width) // 2, 0))
        draw = _Pen(whole, height)
        right = whole.width - MARGIN
        draw.text(MARGIN, 6, self._title, PLAIN, self._font)
        draw.text(right, 6, f"update {caption.version:,}", PLAIN, self._font, anchor="ra")
        draw.text(MARGIN, 24, f"score {caption.score:g}", CHOSEN, self._font)
        draw.text(MARGIN + 90, 24, f"game {caption.game}, step {caption.step:,}", QUIET, self._font)
        draw.text(right, 24, self._epsilon, QUIET, self._font, anchor="ra")
        self._draw_bars(draw, caption, right)
        return np.asarray(whole)

    def _draw_bars(self, draw: _Pen, caption: Caption, right: int) -> None:
        low, high = float(caption.q.min()), float(caption.q.max())
        self._spreads.append(high - low)
        spread = max(*self._spreads, 1e-9)
        draw.text(MARGIN, BARS_TOP - 2, f"{high:.4g}", QUIET, self._small)
        draw.text(MARGIN, BARS_BOTTOM - 10, f"{low:.4g}", QUIET, self._small)
        draw.text(MARGIN, BARS_BOTTOM + 4, "Q", QUIET, self._small)
        left = MARGIN + SCALE_WIDTH
        column = (right - left) / len(caption.q)
        named = all(self._small.getlength(name) < column - 2 for name in self._names)
        for action, q in enumerate(caption.q.tolist()):
            colour = CHOSEN if action == caption.action else QUIET
            top = BARS_BOTTOM - 2 - (q - low) / spread * (BARS_BOTTOM - BARS_TOP - 2)
            middle, half = left + (action + 0.5) * column, min(column - 3, MAX_BAR_WIDTH) / 2
            draw.box(middle - half, top, middle + half, BARS_BOTTOM, colour)
            if named:
                draw.text(middle, BARS_BOTTOM + 4, self._names[action], colour, self._small, anchor="ma")


class _Pen:
    """Draws in the strip: y counts from its upper edge."""

    def __init__(self, image: Image.Image, top: int) -> None:
        self._draw = ImageDraw.Draw(image)
        self._top = top

    def text(
        self,
        x: float,
        y: float,
        words: str,
        colour: tuple[int, int, int],
        font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
        *,
        anchor: str = "la",
    ) -> None:
        self._draw.text((x, self._top + y), words, colour, font, anchor=anchor)

    def box(self, left: float, top: float, right: float, bottom: float, colour: tuple[int, int, int]) -> None:
        self._draw.rectangle((left, self._top + top, right, self._top + bottom), colour)
