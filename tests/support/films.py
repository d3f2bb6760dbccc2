"""Reads films."""

import numpy as np
from PIL import Image


def read_gif(path):
    """Returns the images, and the milliseconds for which each is shown."""
    with Image.open(path) as gif:
        read = []
        for number in range(gif.n_frames):
            gif.seek(number)
            read.append((np.asarray(gif.convert("RGB")), gif.info["duration"]))
    return read
