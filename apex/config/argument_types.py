"""What may be typed after an option: each reads a text, or says what it must be, as argparse wants it."""

from __future__ import annotations

import argparse
import math
from typing import NoReturn

from apex.errors import ConfigError


def positive(text: str) -> int:
    """A whole number from 1 on."""
    if not (text.isdecimal() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1, got {text!r}")
    return int(text)


def seed(text: str) -> int:
    """What seeds are made of."""
    if not (text.isdecimal() and int(text) < 2**31):
        raise argparse.ArgumentTypeError(f"must be a whole number 0 ... 2147483647, got {text!r}")
    return int(text)


def fraction(text: str) -> float:
    """A probability."""
    if not 0 <= _number(text) <= 1:
        raise argparse.ArgumentTypeError(f"must be a number 0 ... 1, got {text!r}")
    return float(text)


def seconds(text: str) -> float:
    """A time that ends."""
    if not 0 < _number(text) < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds > 0, got {text!r}")
    return float(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


class PlainParser(argparse.ArgumentParser):
    """Raises ConfigError where argparse would print its usage and end the program."""

    def error(self, message: str) -> NoReturn:
        """What is wrong, and where more is told."""
        raise ConfigError(f"{message}; {self.prog} --help tells more")
