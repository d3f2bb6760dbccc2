"""Reads films."""

import cv2
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


def read_mp4(path):
    """Returns the codec in the file's sample entry, the pictures per second, and the pictures as RGB."""
    data, video, pictures = path.read_bytes(), cv2.VideoCapture(str(path)), []
    codec = data[data.index(b"stsd") + 16 :][:4]  # after version and flags, number of entries, and size of the entry
    while (frame := video.read())[0]:
        pictures.append(frame[1][..., ::-1])
    fps = video.get(cv2.CAP_PROP_FPS)
    video.release()
    return codec, fps, pictures
