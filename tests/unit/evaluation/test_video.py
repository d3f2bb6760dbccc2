"""Tests of films: pictures, sizes and speed, and paths that cannot be written."""

import numpy as np
import pytest
from support.films import read_gif, read_mp4

from apex.evaluation.video import Gif, begin_video, enlarge
from apexreplay.errors import UsageError


def pictures(count, height=40, width=60):
    """Pictures with different grays and a red corner."""
    made = [np.full((height, width, 3), 10 + 2 * number, np.uint8) for number in range(count)]
    for picture in made:
        picture[:8, :8] = (200, 0, 0)
    return made


def film(path, fps, shown):
    return record(begin_video(path, fps, "--out"), path, shown)


def record(video, path, shown):
    for picture in shown:
        video.add(picture)
    video.close()
    return path


def test_gif_has_every_picture_of_a_slow_game_in_its_colours(tmp_path):
    shown = pictures(30)
    read = read_gif(film(tmp_path / "game.gif", 15.0, shown))
    assert len(read) == 30
    for (picture, _), expected in zip(read, shown, strict=True):
        np.testing.assert_array_equal(picture, expected)
    assert (
        sum(duration for _, duration in read) == 2_000
    )  # 15 pictures per second; one picture is not a whole number of 0.01 s.
    assert {duration for _, duration in read} == {60, 70}


@pytest.mark.parametrize(("fps", "kept"), [(25.0, 1), (30.0, 2), (50.0, 2), (60.0, 3)])
def test_gif_of_a_fast_game_omits_pictures_and_keeps_the_speed(tmp_path, fps, kept):
    shown = pictures(60)
    read = read_gif(film(tmp_path / "game.gif", fps, shown))
    np.testing.assert_array_equal([picture for picture, _ in read], shown[::kept])
    assert sum(duration for _, duration in read) == pytest.approx(1_000 * 60 / fps, abs=10)


def test_gif_has_at_most_max_pictures(tmp_path):
    video = Gif(tmp_path / "game.gif", 10.0, "--out", max_pictures=5)
    assert len(read_gif(record(video, tmp_path / "game.gif", pictures(9)))) == 5


@pytest.mark.parametrize("fps", [15.0, 100 / 3, 50.0])
def test_mp4_has_the_codec_of_browsers_and_every_picture_in_even_sizes(tmp_path, fps):
    shown = pictures(40, height=41, width=61)
    codec, read_fps, read = read_mp4(film(tmp_path / "game.mp4", fps, shown))
    assert (codec, read_fps) == (b"vp09", pytest.approx(fps, rel=1e-3))
    for picture, expected in zip(read, shown, strict=True):
        np.testing.assert_allclose(picture[16:], np.broadcast_to(expected[20, 20], (24, 60, 3)), atol=6)
        np.testing.assert_allclose(picture[2:6, 2:6], np.broadcast_to([200, 0, 0], (4, 4, 3)), atol=25)


@pytest.mark.parametrize("name", ["game.mp4", "game.gif"])
def test_film_on_a_full_disk_is_refused_with_option_and_path(tmp_path, name):
    path = tmp_path / name
    path.symlink_to("/dev/full")
    with pytest.raises(UsageError, match=f"--out {path}: "):
        film(path, 15.0, pictures(3))


def test_pictures_of_different_sizes_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"80 x 40 pixels.*60 x 40"):
        film(tmp_path / "game.mp4", 15.0, [*pictures(2), *pictures(1, width=80)])


def test_small_pictures_are_enlarged_by_whole_factors():
    picture = pictures(1, height=210, width=160)[0]
    large = enlarge(picture)
    assert large.shape == (420, 320, 3)
    np.testing.assert_array_equal(large[::2, ::2], picture)
    assert enlarge(large).shape == large.shape
    assert enlarge(pictures(1, height=400)[0]).shape == (400, 60, 3)
