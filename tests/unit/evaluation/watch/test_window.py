"""The window, on SDL's dummy screen: pictures at their time, and closed by whoever looks."""

from __future__ import annotations

import numpy as np
import pytest

from apex.errors import ConfigError
from apex.evaluation.watch.window import Window, has_display


class Clock:
    now = 100.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def opened(monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    clock = Clock()
    window = Window("game", 50.0, clock=clock, sleep=clock.sleep)
    yield window, clock
    window.close()


PICTURE = np.random.default_rng(0).integers(256, size=(50, 70, 3)).astype(np.uint8)


def shown():
    import pygame

    return pygame.surfarray.array3d(pygame.display.get_surface()).swapaxes(0, 1)


def test_it_shows_the_picture(opened):
    window, _ = opened
    assert window.show(PICTURE)
    np.testing.assert_array_equal(shown(), PICTURE)
    assert window.show(PICTURE[::-1])
    np.testing.assert_array_equal(shown(), PICTURE[::-1])


def test_pictures_come_at_the_games_speed_and_who_is_late_catches_up_a_little_only(opened):
    window, clock = opened
    times = []
    for late in (0.0, 0.0, 0.005, 5.0, *[0.0] * 7):
        clock.now += late
        window.show(PICTURE)
        times.append(clock.now - 100.0)
    assert times == pytest.approx([0.0, 0.02, 0.04, 5.04, *[5.04] * 5, 5.06, 5.08])


@pytest.mark.parametrize("key", [None, "K_q", "K_ESCAPE"])
def test_it_ends_when_closed_and_by_two_keys(opened, key):
    import pygame

    window, _ = opened
    assert window.show(PICTURE)
    pygame.event.post(pygame.event.Event(pygame.KEYDOWN, key=pygame.K_a))
    assert window.show(PICTURE)
    event = {"key": getattr(pygame, key)} if key else {}
    pygame.event.post(pygame.event.Event(pygame.KEYDOWN if key else pygame.QUIT, **event))
    assert not window.show(PICTURE)


def test_it_opens_again_when_an_environment_has_closed_all_windows(opened):
    import pygame

    window, _ = opened
    window.show(PICTURE)
    pygame.quit()  # As Gymnasium's environments do when they are closed.
    assert window.show(PICTURE)
    np.testing.assert_array_equal(shown(), PICTURE)


def test_without_a_screen_the_remedy_is_told(monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "nowhere")
    with pytest.raises(ConfigError, match=r"no window can be opened here: .*--out game.gif writes a file instead"):
        Window("game", 50.0).show(PICTURE)


def test_a_display_is_told_by_the_environment():
    assert [has_display({name: ":0"}) for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER")] == [True] * 3
    assert not has_display({"DISPLAY": ""})
